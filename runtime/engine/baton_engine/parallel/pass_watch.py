"""A limit of the time for which rank 0 waits for its device, which may wait for another rank forever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOOKS = 4
"""Times per limit that the thread looks at the wait."""


class PassWatch:
    """
    Calls a function, once, if a wait takes longer than the limit, and up to a quarter of it later.

    torch's watchdog of NCCL does so for operations that it launches, but a replayed graph does not pass it.
    A thread looks from time to time, so that a wait itself costs no system call.
    """

    def __init__(
        self, seconds: float, on_late: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._on_late = on_late
        self._clock = clock
        self._since: float | None = None
        """Begin of the wait. None: nothing waits."""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pass-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Return a context that waits for the device. One thread waits at a time."""
        self._since = self._clock()
        try:
            yield
        finally:
            self._since = None

    def close(self) -> None:
        """End the thread. `on_late` may call it."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._seconds / LOOKS):
            since = self._since
            if since is not None and self._clock() - since > self._seconds:
                self._on_late()
                return
