"""The decode role: asks a prefill worker for a prompt's KV blocks, pulls them, and generates."""
