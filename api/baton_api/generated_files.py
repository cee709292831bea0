"""
Files that are made from code and kept beside it: written anew, or held against what would be written.

Nothing reads them back into the code that makes them, so whoever changes that code has to have them written
(`make fix`), and a check finds who has not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path


def settle(texts: Mapping[Path, str], there: Iterable[Path], *, check: bool) -> int:
    """
    Write these files, and delete those of `there` that are none of them; with `check` only say which would
    change. Gives the process's exit status: 1 if something would.
    """
    stale = [path for path, text in texts.items() if not path.is_file() or path.read_text() != text]
    gone = sorted(set(there) - set(texts))
    if check:
        for path in (*stale, *gone):
            print(f"{path} is not what would be written: run `make fix`.", file=sys.stderr)
        return int(bool(stale or gone))
    for path in gone:
        path.unlink()
    for path in stale:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(texts[path])
    return 0
