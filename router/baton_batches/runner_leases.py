"""
Leases of runners: several runners work on one batch, each on its own ranges of lines.

**Leases.** Each runner has a row with its own epoch and the end of its lease. A batch's `leased_until` is the
latest of them. An exclusive lease of the ledger waits until all have ended, and dismisses their runners.

**Ranges.** A range is a part of the input file, cut when a runner asks for lines. It belongs to the epoch of
that runner. When the runner leaves, its ranges are free. When its lease ends, another runner takes its ranges
once no other lines are left. This dismisses the late runner, whose later writes raise StaleLease.

Ranges say who sends a line, not whether it has a result: a line that two runners send still has one result,
the first that is recorded. A range is removed with its last result.

**Suspects.** A line that was in flight when workers were lost must be sent while no other line of the batch
is in flight. A runner with only such lines gives its ranges back as `solo` ones. One runner gets them, and
only while no other runner has a range.

Times are seconds of the Unix epoch. All calls block on the database: make them in a thread.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import Connection, and_, delete, func, insert, or_, select, update

from baton_api.errors import StaleLease
from baton_batches import validation, wire
from baton_batches.database import Database
from baton_batches.object_store import ObjectStore
from baton_batches.tables import (
    FREE,
    batches,
    change_batch,
    fetch_batch,
    free_batches,
    ranges,
    results,
    runners,
)
from baton_batches.validation import InputCursor
from baton_batches.values import BatchRecord, BatchStatus
from baton_batches.wire import InputLine


@dataclass(frozen=True, slots=True)
class LineRange:
    """Lines `first` to `last` of the input, and the position and size of their bytes."""

    first: int
    last: int
    position: int
    size: int


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to a runner that asks for lines of a batch."""

    batch: BatchRecord
    range: LineRange | None = None
    cut: InputCursor | None = None
    """Without a range: where the next one is to be cut; None if the whole input is cut."""
    whole: bool = False
    """Without either: whether no other runner has lines."""


def fetch_writable_batch(connection: Connection, id: str, epoch: int) -> BatchRecord:
    """The locked batch, for a holder of its exclusive lease or one of its runners. Raises StaleLease."""
    batch = fetch_batch(connection, id)
    runner = select(runners.c.epoch).where(runners.c.batch == batch.seq, runners.c.epoch == epoch)
    if batch.status.ended or (batch.epoch != epoch and connection.execute(runner).first() is None):
        raise StaleLease(id, epoch, batch.epoch, batch.status)
    return batch


def count_in_ranges(connection: Connection, seq: int, lines: Collection[int]) -> None:
    """Count new results of these lines in their ranges, and remove ranges without lines left."""
    touched = and_(ranges.c.batch == seq, ranges.c.first <= max(lines), ranges.c.last >= min(lines))
    rows = connection.execute(select(ranges.c.first, ranges.c.last, ranges.c.open).where(touched)).all()
    numbers = sorted(lines)
    for first, last, open in rows:
        answered = bisect.bisect_right(numbers, last) - bisect.bisect_left(numbers, first)
        row = and_(ranges.c.batch == seq, ranges.c.first == first)
        if answered >= open:
            connection.execute(delete(ranges).where(row))
        elif answered:
            connection.execute(update(ranges).where(row).values(open=open - answered))


def dismiss_runners(connection: Connection, seq: int) -> None:
    """End the leases of all runners of a batch, and free its ranges."""
    connection.execute(delete(runners).where(runners.c.batch == seq))
    connection.execute(update(ranges).where(ranges.c.batch == seq).values(epoch=FREE, turn=0))


def working_runners(connection: Connection, seq: int) -> int:
    """Number of runners that have ranges of the batch, at least 1."""
    held = and_(ranges.c.batch == seq, ranges.c.epoch != FREE)
    return max(1, connection.scalar(select(func.count(ranges.c.epoch.distinct())).where(held)) or 0)


def finalize_if_done(connection: Connection, batch: BatchRecord, now: int) -> BatchRecord:
    """Move a batch to finalizing if it has its last result, and release its lease."""
    if batch.status is not BatchStatus.IN_PROGRESS or batch.done < batch.total:
        return batch
    connection.execute(delete(ranges).where(ranges.c.batch == batch.seq))
    dismiss_runners(connection, batch.seq)
    return change_batch(
        connection, batch, status=BatchStatus.FINALIZING, finalizing_at=now, runner="", leased_until=0.0
    )


class RunnerLeases:
    """The runners and ranges of all batches."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def join(
        self, id: str, name: str, now: float, seconds: float, most: int | None = None
    ) -> BatchRecord | None:
        """
        The batch with a new epoch, which is this runner's; a runner of the same name loses its own.

        None if the batch is not in progress, has an exclusive lease, or has `most` other runners. Raises
        BatchNotFound.
        """
        with self._database.writing() as connection:
            batch = fetch_batch(connection, id)
            exclusive = batch.runner not in ("", name) and batch.leased_until > now
            if batch.status is not BatchStatus.IN_PROGRESS or exclusive:
                return None
            epochs = connection.scalars(
                select(runners.c.epoch).where(runners.c.batch == batch.seq, runners.c.name == name)
            ).all()
            _dismiss(connection, batch, epochs)
            if most is not None and not epochs and _live(connection, batch, now) >= most:
                return None
            epoch, until = batch.epoch + 1, now + seconds
            row = {"batch": batch.seq, "epoch": epoch, "name": name, "leased_until": until}
            connection.execute(insert(runners).values(row))
            until = _latest(connection, batch)
            return change_batch(connection, batch, epoch=epoch, runner="", leased_until=until)

    def renew(self, id: str, epoch: int, now: float, seconds: float) -> BatchRecord:
        """
        Renew a runner's lease, until `seconds` after the batch's window at the latest, and return the batch.

        A finalizing batch needs no runner: no lease is renewed. Raises StaleLease.
        """
        with self._database.writing() as connection:
            batch = fetch_batch(connection, id)
            if batch.status is BatchStatus.FINALIZING and epoch <= batch.epoch:
                return batch
            batch = fetch_writable_batch(connection, id, epoch)
            until = min(now, batch.expires_at) + seconds
            renewed = connection.execute(
                update(runners)
                .where(runners.c.batch == batch.seq, runners.c.epoch == epoch)
                .values(leased_until=until)
            ).rowcount
            if not renewed and not batch.runner:
                return batch
            until = _latest(connection, batch) if renewed else until
            return change_batch(connection, batch, leased_until=until)

    def leave(self, id: str, epoch: int) -> None:
        """End a runner's lease: its ranges are free. Without effect after the lease."""
        with self._database.writing() as connection:
            batch = fetch_batch(connection, id)
            held = select(runners.c.epoch).where(runners.c.batch == batch.seq, runners.c.epoch == epoch)
            if connection.execute(held).first() is not None:
                _dismiss(connection, batch, [epoch])
                change_batch(connection, batch, leased_until=_latest(connection, batch))
            elif batch.epoch == epoch and batch.runner:
                change_batch(connection, batch, runner="", leased_until=0.0)

    def dismiss(self, id: str, name: str) -> BatchRecord:
        """End the lease of the runner with this name, if it has one. Returns the batch."""
        with self._database.writing() as connection:
            batch = fetch_batch(connection, id)
            epochs = connection.scalars(
                select(runners.c.epoch).where(runners.c.batch == batch.seq, runners.c.name == name)
            ).all()
            if not epochs:
                return batch
            _dismiss(connection, batch, epochs)
            return change_batch(connection, batch, leased_until=_latest(connection, batch))

    def understaffed(
        self, now: float, most: int, limit: int = 100, without: Collection[str] = ()
    ) -> list[BatchRecord]:
        """
        Batches in progress and in their window with fewer than `most` runners, each owner's oldest first.

        `without`: ids to leave out.
        """
        live = select(func.count()).where(runners.c.batch == batches.c.seq, runners.c.leased_until > now)
        free = or_(batches.c.leased_until <= now, and_(batches.c.runner == "", live.scalar_subquery() < most))
        with self._database.reading() as connection:
            return free_batches(
                connection, free, [BatchStatus.IN_PROGRESS], limit, without, batches.c.expires_at > now
            )

    def working(self, batch: BatchRecord) -> int:
        """Number of runners that have ranges of the batch, at least 1."""
        with self._database.reading() as connection:
            return working_runners(connection, batch.seq)

    # --- Ranges ---

    def claim(self, id: str, epoch: int, turn: int, now: float) -> Claim:
        """
        The runner's next lines: a free range, else a new one, else the ranges of runners that are late.

        `turn`: number of the request. A repeated request gets the same range. Raises StaleLease.
        """
        with self._database.writing() as connection:
            batch = fetch_writable_batch(connection, id, epoch)
            if batch.status is not BatchStatus.IN_PROGRESS:
                return Claim(batch)
            of_batch = ranges.c.batch == batch.seq
            mine, free = and_(of_batch, ranges.c.epoch == epoch), and_(of_batch, ranges.c.epoch == FREE)
            others = and_(of_batch, ranges.c.epoch.not_in((epoch, FREE)))
            live = select(runners.c.epoch).where(runners.c.batch == batch.seq, runners.c.leased_until > now)
            if (repeated := _first(connection, and_(mine, ranges.c.turn == turn))) is not None:
                return Claim(batch, repeated)
            if _first(connection, and_(others, ranges.c.solo == 1, ranges.c.epoch.in_(live))) is not None:
                return Claim(batch)
            claimed = _first(connection, and_(free, ranges.c.solo == 0))
            if claimed is None and batch.cut_bytes < batch.input_bytes:
                return Claim(batch, cut=InputCursor(batch.cut_bytes, batch.cut_lines))
            if claimed is None:
                late = select(ranges.c.epoch).distinct().where(others, ranges.c.epoch.not_in(live))
                if epochs := connection.scalars(late).all():
                    _dismiss(connection, batch, epochs)
                    if batch.epoch in epochs:  # no holder of the newest epoch may be left
                        change_batch(connection, batch, epoch=batch.epoch + 1)
                    claimed = _first(connection, and_(free, ranges.c.solo == 0))
            if claimed is None and _first(connection, others) is not None:
                return Claim(batch)
            claimed = claimed or _first(connection, free)
            if claimed is not None:
                taken = and_(of_batch, ranges.c.first == claimed.first)
                connection.execute(update(ranges).where(taken).values(epoch=epoch, turn=turn))
            return Claim(batch, claimed, whole=claimed is None)

    def cut(self, id: str, epoch: int, turn: int, cut: LineRange, after: InputCursor, lines: int) -> bool:
        """
        Make a range of the runner; `after` is where the next one begins.

        `lines`: count of its lines without a result. Without any, no range is made.
        False if the input was cut there before. Raises StaleLease.
        """
        with self._database.writing() as connection:
            batch = fetch_writable_batch(connection, id, epoch)
            if (batch.cut_bytes, batch.cut_lines) != (cut.position, cut.first - 1):
                return False
            change_batch(connection, batch, cut_bytes=after.position, cut_lines=after.lines)
            if lines:
                row = {
                    "batch": batch.seq, "first": cut.first, "last": cut.last, "position": cut.position,
                    "size": cut.size, "epoch": epoch, "turn": turn, "open": lines, "solo": 0,
                }  # fmt: skip
                connection.execute(insert(ranges).values(row))
            return True

    def answered(self, batch: BatchRecord, range: LineRange) -> set[int]:
        """The lines of the range that have a result."""
        query = select(results.c.line).where(results.c.batch == batch.seq)
        with self._database.reading() as connection:
            return set(connection.scalars(query.where(results.c.line.between(range.first, range.last))))

    def drop(self, batch: BatchRecord, range: LineRange) -> None:
        """Remove a range that has no lines without a result."""
        with self._database.writing() as connection:
            row = and_(ranges.c.batch == batch.seq, ranges.c.first == range.first)
            connection.execute(delete(ranges).where(row))

    def give_back(self, id: str, epoch: int) -> None:
        """Free the ranges of a runner that has only suspects, as solo ones. Raises StaleLease."""
        with self._database.writing() as connection:
            batch = fetch_writable_batch(connection, id, epoch)
            mine = and_(ranges.c.batch == batch.seq, ranges.c.epoch == epoch)
            connection.execute(update(ranges).where(mine).values(epoch=FREE, turn=0, solo=1))


def _first(connection: Connection, where: object) -> LineRange | None:
    query = select(ranges.c.first, ranges.c.last, ranges.c.position, ranges.c.size)
    row = connection.execute(query.where(where).order_by(ranges.c.first).limit(1)).first()  # type: ignore[arg-type]
    return None if row is None else LineRange(*row)


def _dismiss(connection: Connection, batch: BatchRecord, epochs: Collection[int]) -> None:
    """End the leases of these epochs; their ranges are free."""
    if not epochs:
        return
    gone = and_(runners.c.batch == batch.seq, runners.c.epoch.in_(epochs))
    connection.execute(delete(runners).where(gone))
    held = and_(ranges.c.batch == batch.seq, ranges.c.epoch.in_(epochs))
    connection.execute(update(ranges).where(held).values(epoch=FREE, turn=0))


def _live(connection: Connection, batch: BatchRecord, now: float) -> int:
    query = select(func.count()).where(runners.c.batch == batch.seq, runners.c.leased_until > now)
    return connection.scalar(query) or 0


def _latest(connection: Connection, batch: BatchRecord) -> float:
    """The end of the last lease of the batch's runners; 0 without any."""
    query = select(func.max(runners.c.leased_until)).where(runners.c.batch == batch.seq)
    return float(connection.scalar(query) or 0.0)


class ClaimedLines:
    """
    Reads of claimed ranges. All calls block: make them in a thread.

    A range ends where a slice of the input ends. So it is cut by the request that reads it first.
    """

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
        lines, _ = validation.cut_slice(data, InputCursor(range.position, range.first - 1), True, range.last)
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
            lines, after = validation.cut_slice(data, cursor, end == batch.input_bytes, self._range_lines)
            if after != cursor:
                return lines, after
            most *= 2  # one line is longer than that

    def _read(self, batch: BatchRecord, start: int, end: int) -> bytes:
        return b"".join(self._objects.read(batch.input_object, start, end))
