"""What Baton's processes must agree on: errors, messages, hashes, names. It imports nothing of ours."""

__version__ = "0.1.0"
