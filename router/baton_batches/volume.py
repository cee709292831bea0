"""
The volume of a router's state: its limit, and a reserve with which a full one can be emptied.

To delete takes space first: SQLite writes down what changes. A file beside the database therefore keeps some.
When the volume is full, a call that frees space gets the bytes of that file. Nothing is stored until the file
is whole again, so that what was freed is not taken by others.

Calls wait for the disk: make them in a thread.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from baton_api.errors import StorageFull
from baton_batches.object_store import DISK_FULL_ERRORS

RESERVE = 8 * 1024 * 1024
"""Bytes of the reserve on a large volume."""

VOLUME_SHARE = 16
"""The reserve of a small volume is its size divided by this."""

MEASURED_S = 5.0
"""Seconds for which the measured size of the folder is valid, with what was added since."""

NAME = "reserve"


class StateVolume:
    """The volume of the folder `folder`. Thread-safe."""

    def __init__(
        self, folder: Path, limit: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`limit`: bytes that the folder may have; None: as many as the volume has."""
        self._folder = folder
        self._file = folder / NAME
        self._limit = limit
        self._clock = clock
        self._lock = threading.Lock()
        self._whole = False
        """Whether the reserve has its size."""
        self._used = 0
        self._measured_at = -MEASURED_S

    @property
    def reserve(self) -> int:
        """Bytes of the reserve. The folder must exist."""
        return min(RESERVE, self._total() // VOLUME_SHARE)

    def check(self, size: int = 0) -> None:
        """Call before `size` bytes are stored. Raises StorageFull. Does nothing while there is no folder."""
        if not self._folder.exists():
            return
        with self._lock:
            if self._limit is not None:
                now = self._clock()
                if now - self._measured_at >= MEASURED_S or self._used + size > self._limit:
                    self._measured_at, self._used = now, _folder_size(self._folder)
                if self._used + size > self._limit:
                    raise StorageFull("the folder of the router's state")
                self._used += size
            if not self._whole:
                self._fill()
            if not self._whole:
                raise StorageFull("the volume of the router's state")

    @contextmanager
    def released(self) -> Iterator[None]:
        """Free the reserve, and take it again at the end as far as there is space."""
        with self._lock:
            self._whole = False
            self._file.unlink(missing_ok=True)
            try:
                yield
            finally:
                self._fill()

    def _fill(self) -> None:
        wanted = size = self.reserve
        page = os.sysconf("SC_PAGE_SIZE")
        while size >= page:
            try:
                _allocate(self._file, size)
            except OSError as error:
                if error.errno not in DISK_FULL_ERRORS:
                    break  # the volume cannot be written at all, which the next write reports
                size //= 2
            else:
                break
        self._whole = size == wanted

    def _total(self) -> int:
        """Bytes of the volume."""
        volume = os.statvfs(self._folder)
        total = volume.f_blocks * volume.f_frsize
        return total if self._limit is None else min(total, self._limit)


def has_space(folder: Path, size: int) -> bool:
    """Whether the volume of a folder has `size` bytes left."""
    try:
        volume = os.statvfs(folder)
    except OSError:
        return True
    return volume.f_bavail * volume.f_frsize >= size


def _allocate(file: Path, size: int) -> None:
    """Give the file `size` bytes of the volume. Raises OSError; the file is empty then."""
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            os.pwrite(descriptor, bytes(size), 0)
    except OSError:
        os.ftruncate(descriptor, 0)
        raise
    finally:
        os.close(descriptor)


def _folder_size(folder: Path) -> int:
    """Bytes of all files below a folder, as the volume counts them."""
    size = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # it has just been removed
                size += os.lstat(os.path.join(place, name)).st_blocks * 512
    return size
