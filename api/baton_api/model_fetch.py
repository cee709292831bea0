"""What `baton fetch` and whoever starts it tell each other, beside arguments, exit status and log."""

from __future__ import annotations

RESULT_FILE = "BATON_FETCH_RESULT_FILE"
"""Environment variable with the path of a file, to which `baton fetch` writes what it has fetched: the
commit, or the digest of the files' versions. Without it nothing is written."""

PINNED_REVISION = "BATON_FETCH_PINNED_REVISION"
"""Environment variable with the commit to fetch where no revision is asked for, in place of the newest one.
Files that are there already stay, whichever commit they are of."""
