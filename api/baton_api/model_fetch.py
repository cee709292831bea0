"""What `baton fetch` tells whoever started it, beside its exit status and its log."""

from __future__ import annotations

RESULT_FILE = "BATON_FETCH_RESULT_FILE"
"""Environment variable with the path of a file, to which `baton fetch` writes what it has fetched: the
commit, or the digest of the files' versions. Without it nothing is written."""
