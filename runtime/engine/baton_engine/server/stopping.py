"""
Finds stop strings in text that arrives in pieces.

Text that could begin a stop string is held back, so that no part of one is ever sent. Of several
matches the one that ends first counts, the longer one at a tie: then the answer does not depend on
how the text was cut into pieces.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """The stop strings of one sequence, and the text held back for them."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """(text that may be sent now, the stop string that was completed)"""
        if not self._stops:
            return text, None
        self._held += text
        found = self._first_match()
        if found is not None:
            start, stop = found
            released = self._held[: start + len(stop) if self._include else start]
            self._held = ""
            return released, stop
        keep = self._could_begin()
        cut = len(self._held) - keep
        released, self._held = self._held[:cut], self._held[cut:]
        return released, None

    def flush(self) -> str:
        """What was held back, at an end for another reason."""
        released, self._held = self._held, ""
        return released

    def _first_match(self) -> tuple[int, str] | None:
        found = [(self._held.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not matches:
            return None
        _, start, stop = min(matches)
        return start, stop

    def _could_begin(self) -> int:
        """Characters at the end that are a proper beginning of a stop string, at most."""
        held = self._held
        return max(
            next((n for n in range(min(len(stop) - 1, len(held)), 0, -1) if held.endswith(stop[:n])), 0)
            for stop in self._stops
        )
