"""Waiting for what a cluster does in its own time."""

from __future__ import annotations

import time
from collections.abc import Callable

LOOK_S = 0.5


def until(what: str, look: Callable[[], object], timeout_s: float) -> None:
    """Until `look` finds something; `what` names it where it never does."""
    deadline = time.monotonic() + timeout_s
    while not look():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(LOOK_S)
