"""KV blocks that this worker's pool does not have, and that something else has: so far, peers."""
