"""Turns an InferenceService into prefill workers, decode workers and a router, and keeps them so."""
