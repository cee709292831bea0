"""Durations of the steps of a test."""

from __future__ import annotations

import time


class Stopwatch:
    """Prints the duration of each step, for `pytest -s` and for the report of a failure."""

    def __init__(self, story: str) -> None:
        self._story = story
        self._since = time.monotonic()

    def note(self, step: str) -> float:
        """Print and return the seconds since the last note."""
        now = time.monotonic()
        took, self._since = now - self._since, now
        print(f"\n{self._story}: {step}: {took:.1f} s")
        return took
