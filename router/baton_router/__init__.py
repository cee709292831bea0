"""The OpenAI API of a whole cluster: one address in front of prefill and decode workers."""
