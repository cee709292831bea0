"""Wait for changes of the cluster."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 0.5


def until(what: str, look: Callable[[], object], timeout_s: float) -> None:
    """Wait until `look` returns a true value. Raises AssertionError with `what` after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(LOOK_S)
