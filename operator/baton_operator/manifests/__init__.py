"""From specs to manifests: pure functions, each of which says what Kubernetes object there is to be."""
