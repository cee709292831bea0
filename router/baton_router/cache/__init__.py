"""What the workers' prefix caches hold, by KV events and by what was sent to them."""
