"""The KV cache: its blocks, their memory, and the events that tell the router what is cached."""
