"""KV blocks that this worker's pool does not have: in its tiers, in a shared store, and at peers."""
