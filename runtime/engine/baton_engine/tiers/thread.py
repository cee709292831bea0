"""A thread of a tier. Unlike that of an executor, it does not keep a process from its end if it is stuck."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

Result = TypeVar("Result")


class TierThread:
    """Does one piece of work after the other. Its methods are for one other thread."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._closed = False
        self._thread.start()

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        done: Future[Result] = Future()

        def run() -> None:
            if self._closed:
                done.cancel()
                return
            try:
                result = work()
            except Exception as error:
                done.set_exception(error)
            else:
                done.set_result(result)

        self._work.put(run)
        return done

    def close(self, within_s: float) -> bool:
        """Leave out what has not begun. Returns whether the thread ends within this time."""
        self._closed = True
        self._work.put(None)
        self._thread.join(within_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()
            del work  # and the arrays that it has
