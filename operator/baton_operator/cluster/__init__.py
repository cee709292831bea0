"""Access to the Kubernetes API: requests, watches, the cache, Events and the Lease."""
