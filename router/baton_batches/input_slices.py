"""
Slices of an input file: the next lines that have no result, cut out of its bytes.

Pure. Where a slice begins is a cursor, a byte's position and the number of lines before it, so that nobody
has to remember anything between two slices. Blank lines count as lines and are no requests.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from baton_batches.wire import Line

BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Cursor:
    """The start of a line of the file."""

    position: int = 0
    lines: int = 0
    """Before it."""

    @classmethod
    def read(cls, text: str) -> Cursor:
        """What `str` made; the start for an empty text. Raises ValueError."""
        if not text:
            return cls()
        position, _, lines = text.partition("-")
        read = cls(int(position), int(lines))
        if read.position < 0 or read.lines < 0:
            raise ValueError(text)
        return read

    def __str__(self) -> str:
        return f"{self.position}-{self.lines}"


class Done:
    """The lines that have a result, as ranges (first, last) in order."""

    def __init__(self, ranges: Sequence[tuple[int, int]]) -> None:
        self._first = [first for first, _ in ranges]
        self._last = [last for _, last in ranges]

    def __contains__(self, number: int) -> bool:
        at = bisect.bisect_right(self._first, number) - 1
        return at >= 0 and number <= self._last[at]


def cut(data: bytes, cursor: Cursor, end: bool, done: Done, limit: int) -> tuple[list[Line], Cursor]:
    """
    Up to `limit` lines of `data`, the file's bytes from `cursor` on, and where they end.

    Unless `data` is the file's end, what follows its last newline is left for the next slice; if that is
    everything, the cursor does not move.
    """
    lines: list[Line] = []
    position, number = 0, cursor.lines
    while len(lines) < limit and position < len(data):
        newline = data.find(b"\n", position)
        if newline < 0:
            if not end:
                break
            newline = len(data)
        number += 1
        if number not in done:
            text = data[position:newline].strip()
            if number == 1:
                text = text.removeprefix(BOM)
            if text:
                lines.append(Line(number, text))
        position = min(newline + 1, len(data))
    return lines, Cursor(cursor.position + position, number)
