"""
The lines of the ranges that runners claim, read from the input file.

A range ends where a slice of the input ends. So it is cut by the request that reads it first.
"""

from __future__ import annotations

from baton_batches import input_file, wire
from baton_batches.input_file import InputCursor
from baton_batches.object_store import ObjectStore
from baton_batches.runner_leases import Claim, LineRange, RunnerLeases
from baton_batches.values import BatchRecord
from baton_batches.wire import InputLine


class ClaimedLines:
    """Reads of claimed ranges. All calls block: make them in a thread."""

    def __init__(
        self, leases: RunnerLeases, objects: ObjectStore, range_lines: int = wire.SLICE_LINES
    ) -> None:
        """`range_lines`: maximum lines of a range."""
        self._range_lines = range_lines
        self._leases = leases
        self._objects = objects

    def claimed(self, claim: Claim, epoch: int, turn: int) -> list[InputLine]:
        """
        The claimed lines that have no result; maybe none, although others are left.

        Raises StaleLease and the errors of the object store.
        """
        if claim.range is not None:
            return self._of_range(claim.batch, claim.range)
        return self._cut(claim.batch, claim.cut, epoch, turn) if claim.cut is not None else []

    def _of_range(self, batch: BatchRecord, range: LineRange) -> list[InputLine]:
        data = self._read(batch, range.position, range.position + range.size)
        lines, _ = input_file.cut_slice(data, InputCursor(range.position, range.first - 1), True, range.last)
        left = self._left(batch, range, lines)
        if not left:
            self._leases.drop(batch, range)
        return left

    def _cut(self, batch: BatchRecord, cursor: InputCursor, epoch: int, turn: int) -> list[InputLine]:
        lines, after = self._slice(batch, cursor)
        cut = LineRange(cursor.lines + 1, after.lines, cursor.position, after.position - cursor.position)
        left = self._left(batch, cut, lines)
        return left if self._leases.cut(batch.id, epoch, turn, cut, after, len(left)) else []

    def _left(self, batch: BatchRecord, range: LineRange, lines: list[InputLine]) -> list[InputLine]:
        answered = self._leases.answered(batch, range)
        return [line for line in lines if line.number not in answered]

    def _slice(self, batch: BatchRecord, cursor: InputCursor) -> tuple[list[InputLine], InputCursor]:
        """The next lines of the input, and where they end."""
        most = wire.SLICE_BYTES
        while True:
            end = min(batch.input_bytes, cursor.position + most)
            data = self._read(batch, cursor.position, end)
            lines, after = input_file.cut_slice(data, cursor, end == batch.input_bytes, self._range_lines)
            if after != cursor:
                return lines, after
            most *= 2  # one line is longer than that

    def _read(self, batch: BatchRecord, start: int, end: int) -> bytes:
        return b"".join(self._objects.read(batch.input_object, start, end))
