"""`POST /v1/chat/completions`: messages in, the assistant's next message out."""
