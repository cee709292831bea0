"""
A file that may change while the process runs. It is checked on use, at most once per second.

There is no thread and no file notification, because notifications are unreliable on mounted volumes. Each
user checks for a change before it uses the content, is notified of each change once, and handles an
unreadable file itself.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

LOOK_S = 1.0
"""Minimum seconds between two checks."""


class WatchedFile:
    """A file that is checked for changes."""

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = Path(path).expanduser()
        self._clock = clock
        self._looked = clock()
        self._stamp = self._stamp_now()

    def changed(self) -> bool:
        """Return whether the file differs from the last check."""
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
        """Return the version of the file. A mounted Secret changes through its symbolic link."""
        try:
            status = os.stat(self.path)
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_size, status.st_ino
