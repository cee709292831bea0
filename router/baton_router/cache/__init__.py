"""The contents of the workers' prefix caches, learned from KV events and from the requests sent to them."""
