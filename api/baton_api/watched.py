"""
A file that may change under a running process: looked at when somebody needs it, at most once a second.

No thread and no notification, which mounted volumes do not give reliably: whoever is about to use what
was read asks first whether it is still so. What to do with a file that has become unreadable is the asker's
to say; it is told of each change once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

LOOK_S = 1.0
"""Seconds between two looks, if somebody asks that often."""


class WatchedFile:
    """One path."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = Path(path).expanduser()
        self._clock = clock
        self._looked = clock()
        self._stamp = self._stamp_now()

    def changed(self) -> bool:
        """Whether it is another file than at the last look."""
        now = self._clock()
        if now - self._looked < LOOK_S:
            return False
        self._looked = now
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return False
        self._stamp = stamp
        return True

    def _stamp_now(self) -> tuple[int, ...]:
        """What differs between two versions of it; a mounted secret changes by its link."""
        try:
            seen = os.stat(self.path)
        except OSError:
            return ()
        return seen.st_mtime_ns, seen.st_size, seen.st_ino
