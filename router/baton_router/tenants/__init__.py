"""Tenants and authentication: keys, tokens, limits."""
