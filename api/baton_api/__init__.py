"""The contract between Baton's processes: errors, messages, hashes, names. It imports no other package."""

__version__ = "0.2.0.dev0"
