"""`POST /v1/chat/completions`: the assistant's next message of a conversation."""
