"""The prefill role: computes prompts and keeps their blocks until a decode worker has pulled them."""
