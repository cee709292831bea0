"""Manifests from specs: pure functions that build the Kubernetes objects."""
