"""
Files that are generated from code: written, or compared with what would be written.

`make fix` writes them, and `make check` finds files that are not current.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path


def settle(texts: Mapping[Path, str], existing: Iterable[Path], *, check: bool) -> int:
    """
    Write these files and delete those of `existing` that are not among them.

    With `check`, only report which files would change. Returns the exit status: 1 if any would.
    """
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text() != text]
    gone = sorted(set(existing) - set(texts))
    if check:
        for path in (*stale, *gone):
            print(f"{path} is not current. Run `make fix`.", file=sys.stderr)
        return int(bool(stale or gone))
    for path in gone:
        path.unlink()
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path])
    return 0
