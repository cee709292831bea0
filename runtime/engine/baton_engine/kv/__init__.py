"""The KV cache: its blocks, their memory, and the events that report cached blocks to the router."""
