"""
The ledger of batches: the truth about them lies in its rows, and in no process's memory.

**The promise.** A line may be executed more than once; it has exactly one result. The first result that is
recorded for (batch, line) stands, whoever comes with another. A batch ends once: its files and its last
status are set in one transaction.

**Leases.** Whoever works on a batch, be it to validate it, run its lines or render its files, holds a lease:
`lease` gives an epoch, higher each time, and only while no other lease is live. A holder renews its lease
while it works. Each write names the epoch; one whose epoch is no longer the batch's is refused with
StaleLease, whatever its author believes, and the author must stop. A lease that has merely run out still
writes as long as nobody has taken its place.

**A batch's way.**

    validating -> in_progress -> finalizing -> completed      or failed, if the file is no batch
         any of the first two -> cancelling -> cancelled      by request_cancel
        validating or in_progress -> expired                  by its next holder, when its window has passed

`record` itself turns in_progress into finalizing with the last line, and lets go of the lease: whoever
renders takes it next. A runner learns from what `renew` and `record` return that its batch was cancelled or
that the window has passed: it records what is done, stops the rest, and releases. Nobody takes a lease from
its holder to end a batch: a runner's lease is not renewed beyond the window, and ends soon after it.

    epoch = ledger.lease(id, "runner 1", now, 30)          # None: another works on it, or it has ended
    for first, last in ledger.done(id): ...                # the lines that have a result already
    recorded = ledger.record(id, epoch, [Result(7, 200, b'{...}', "req_1")], now)
    status = ledger.renew(id, epoch, now, 30).status
    ledger.release(id, epoch)

Time is passed in, as seconds of the Unix epoch. All calls wait for the database: make them in a thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, exists, func, insert, select, text, update

from baton_api.errors import (
    INVALID_VALUE,
    BatchEnded,
    BatchNotFound,
    FileNotFound,
    InvalidRequest,
    StaleLease,
)
from baton_batches import api_objects
from baton_batches.database import Database
from baton_batches.files import NewFile, add, new_id
from baton_batches.tables import (
    as_json,
    batch_of,
    batches,
    bindable,
    change_batch,
    fetch_batch,
    fetch_held_batch,
    files,
    finalize_if_done,
    free_batches,
    insert_results,
    results,
)
from baton_batches.values import (
    ENDED,
    BatchRecord,
    BatchStatus,
    LineError,
    LineResult,
    RecordOutcome,
    StoredFile,
)

CANCELLABLE = frozenset({BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.FINALIZING})
UNDER_WAY = (BatchStatus.VALIDATING.value, BatchStatus.IN_PROGRESS.value)
RECORDING = frozenset({BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING})
EXPIRING = frozenset({BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS})
"""Statuses of batches that expire when their window passes; any other is on its way to its own end."""


class Ledger:
    """Batches, their leases and their results."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # --- What clients ask for ---

    def create(
        self,
        owner: str,
        endpoint: str,
        file: StoredFile,
        now: int,
        *,
        window: str = api_objects.DEFAULT_WINDOW,
        metadata: Mapping[str, str] | None = None,
        output_seconds: int | None = None,
        models: Iterable[str] | None = None,
    ) -> BatchRecord:
        """
        A batch that is to be validated, and has so much time from now on, as in `completion_window`.

        `models`: those that whoever makes it may use; None for all that the owner may. Raises FileNotFound
        if the file has just gone.
        """
        window_s = api_objects.window_seconds(window)
        assert window_s is not None
        values = {
            "id": new_id("batch_"),
            "owner": owner,
            "endpoint": endpoint,
            "input_file": file.id,
            "input_object": file.object,
            "input_bytes": file.bytes,
            "completion_window": window,
            "metadata": None if metadata is None else as_json(metadata),
            "output_seconds": output_seconds,
            "models": None if models is None else as_json(sorted(models)),
            "status": BatchStatus.VALIDATING.value,
            "created_at": now,
            "expires_at": now + window_s,
            "total": 0,
            "completed": 0,
            "failed": 0,
            "runner": "",
            "epoch": 0,
            "leased_until": 0.0,
            "job": "",
        }
        lasting = select(files.c.object).where(files.c.seq == file.seq, files.c.deleted_at.is_(None))
        with self._database.writing() as connection:
            if not connection.scalar(lasting.with_for_update()):
                raise FileNotFound(file.id, "input_file_id")
            row = connection.execute(insert(batches).values(values).returning(*batches.c)).one()
        return batch_of(row)

    def get(self, owner: str, id: str) -> BatchRecord:
        """As its owner sees it. Raises BatchNotFound."""
        with self._database.reading() as connection:
            row = connection.execute(
                select(batches).where(batches.c.owner == owner, batches.c.id == bindable(id))
            ).first()
        if row is None:
            raise BatchNotFound(id)
        return batch_of(row)

    def find(self, id: str) -> BatchRecord:
        """Whoever owns it: for those who work on it. Raises BatchNotFound."""
        with self._database.reading() as connection:
            return fetch_batch(connection, id, lock=False)

    def page(self, owner: str, *, limit: int, after: str = "") -> tuple[list[BatchRecord], bool]:
        """A page, newest first, and whether there is more. Raises InvalidRequest for an unknown `after`."""
        query = select(batches).where(batches.c.owner == owner)
        with self._database.reading() as connection:
            if after:
                seq = connection.scalar(
                    select(batches.c.seq).where(batches.c.owner == owner, batches.c.id == bindable(after))
                )
                if seq is None:
                    raise InvalidRequest(
                        f"There is no batch {after[:100]!r} to go on after.",
                        param="after",
                        code=INVALID_VALUE,
                    )
                query = query.where(batches.c.seq < seq)
            rows = connection.execute(query.order_by(batches.c.seq.desc()).limit(limit + 1)).all()
        return [batch_of(row) for row in rows[:limit]], len(rows) > limit

    def request_cancel(self, owner: str, id: str, now: int) -> BatchRecord:
        """
        The batch, cancelling from now on; one that was cancelled before stays as it is.

        Raises BatchNotFound, and BatchEnded if it has come to another end.
        """
        with self._database.writing() as connection:
            batch = fetch_batch(connection, id)
            if batch.owner != owner:
                raise BatchNotFound(id)
            if batch.status in (BatchStatus.CANCELLING, BatchStatus.CANCELLED):
                return batch
            if batch.status not in CANCELLABLE:
                raise BatchEnded(batch.status)
            return change_batch(connection, batch, status=BatchStatus.CANCELLING, cancelling_at=now)

    def reassign(self, owner: str, other: str) -> tuple[int, int]:
        """Give all files and batches of `owner` to `other`. Returns how many files and batches those were."""
        with self._database.writing() as connection:
            counts = [
                connection.execute(update(table).where(table.c.owner == owner).values(owner=other)).rowcount
                for table in (files, batches)
            ]
        return counts[0], counts[1]

    def owners_under_way(self) -> list[str]:
        """Whose batches have lines to validate or to run."""
        query = select(batches.c.owner).where(batches.c.status.in_(UNDER_WAY)).distinct()
        with self._database.reading() as connection:
            return list(connection.scalars(query))

    def cancel_refused(self, owner: str, reason: str, now: int) -> int:
        """Cancel all batches of `owner` that are under way, with `reason` as their error; gives how many."""
        errors = as_json((LineError("owner_refused", reason),))
        values = {"status": BatchStatus.CANCELLING.value, "cancelling_at": now, "errors": errors}
        chosen = batches.c.owner == owner, batches.c.status.in_(UNDER_WAY)
        with self._database.writing() as connection:
            return connection.execute(update(batches).where(*chosen).values(values)).rowcount

    # --- Leases ---

    def lease(
        self, id: str, runner: str, now: float, seconds: float, status: BatchStatus | None = None
    ) -> int | None:
        """
        A new epoch; None if another's lease is live or the batch has ended.

        With `status` also if the batch has another status by now: what was to be done is done. Raises
        BatchNotFound.
        """
        with self._database.writing() as connection:
            batch = fetch_batch(connection, id)
            if batch.status.ended or batch.leased_until > now or status not in (None, batch.status):
                return None
            return self._leased(connection, batch, runner, now + seconds)

    def take(self, id: str, runner: str, now: float, seconds: float) -> int | None:
        """The same, from whoever holds it: nothing that comes from them counts any more."""
        with self._database.writing() as connection:
            batch = fetch_batch(connection, id)
            return None if batch.status.ended else self._leased(connection, batch, runner, now + seconds)

    def _leased(self, connection: Connection, batch: BatchRecord, runner: str, until: float) -> int:
        return change_batch(connection, batch, runner=runner, epoch=batch.epoch + 1, leased_until=until).epoch

    def renew(self, id: str, epoch: int, now: float, seconds: float, in_window: bool = False) -> BatchRecord:
        """
        The batch as it is now, leased for so long again. Raises StaleLease.

        A lease that was released, or that ended with the work, stays free. With `in_window` the lease ends so
        many seconds after the batch's window at the latest.
        """
        with self._database.writing() as connection:
            batch = fetch_held_batch(connection, id, epoch)
            if not batch.runner:
                return batch
            until = min(now, batch.expires_at) + seconds if in_window else now + seconds
            return change_batch(connection, batch, leased_until=until)

    def release(self, id: str, epoch: int) -> None:
        """Let another have it at once; nothing happens if another has it."""
        with self._database.writing() as connection:
            batch = fetch_batch(connection, id)
            if batch.epoch == epoch:
                change_batch(connection, batch, runner="", leased_until=0.0)

    def unfinished(
        self, now: float, status: BatchStatus, limit: int = 100, without: Collection[str] = ()
    ) -> list[BatchRecord]:
        """
        Batches of that status on which nobody works and that are not overdue: each owner's oldest first.

        `without`: ids to leave out.
        """
        more = [batches.c.expires_at > now] if status in EXPIRING else []
        with self._database.reading() as connection:
            return free_batches(connection, now, [status], limit, without, *more)

    def overdue(self, now: float, limit: int = 100, without: Collection[str] = ()) -> list[BatchRecord]:
        """The same of batches whose window has passed before all of their lines had a result."""
        with self._database.reading() as connection:
            return free_batches(connection, now, EXPIRING, limit, without, batches.c.expires_at <= now)

    # --- Lines ---

    def validated(
        self,
        id: str,
        epoch: int,
        now: int,
        *,
        total: int,
        model: str | None,
        errors: Sequence[LineError] = (),
    ) -> BatchRecord:
        """
        The input was read: in_progress with so many lines, or failed because of `errors`.

        The lease ends with it. A batch that was cancelled meanwhile stays so. Raises StaleLease.
        """
        with self._database.writing() as connection:
            batch = fetch_held_batch(connection, id, epoch)
            model = model and bindable(model)
            free: dict[str, Any] = {"runner": "", "leased_until": 0.0}
            if batch.status is not BatchStatus.VALIDATING:
                return change_batch(connection, batch, total=total, model=model, **free)
            if errors:
                encoded = as_json(tuple(errors))
                return change_batch(
                    connection, batch, status=BatchStatus.FAILED, failed_at=now, errors=encoded, **free
                )
            batch = change_batch(
                connection,
                batch,
                status=BatchStatus.IN_PROGRESS,
                in_progress_at=now,
                total=total,
                model=model,
                **free,
            )
            return finalize_if_done(connection, batch, now)

    def record(self, id: str, epoch: int, new_results: Iterable[LineResult], now: int) -> RecordOutcome:
        """
        Keep results, all or none; of a line that has one already the first stands.

        Raises StaleLease: none of them was kept.
        """
        first: dict[int, LineResult] = {}
        for result in new_results:
            first.setdefault(result.line, result)
        with self._database.writing() as connection:
            batch = fetch_held_batch(connection, id, epoch)
            if batch.status not in RECORDING:
                return RecordOutcome(0, batch.status)
            new = insert_results(connection, batch.seq, first.values())
            completed = 0
            if new:
                completed = sum(200 <= status < 300 for status in new)
                batch = change_batch(
                    connection,
                    batch,
                    completed=batch.completed + completed,
                    failed=batch.failed + len(new) - completed,
                )
            return RecordOutcome(len(new), finalize_if_done(connection, batch, now).status, completed)

    def done(self, id: str, after: int = 0, limit: int = 10_000) -> list[tuple[int, int]]:
        """
        The lines that have a result, as at most `limit` ranges (first, last) in order, after line `after`.

        Go on after the last range's end; none are left when the list is empty. Raises BatchNotFound.
        """
        with self._database.reading() as connection:
            batch = fetch_batch(connection, id, lock=False)
            rows = connection.execute(
                text(
                    "SELECT MIN(line), MAX(line) FROM"
                    " (SELECT line, line - ROW_NUMBER() OVER (ORDER BY line) AS island FROM results"
                    " WHERE batch = :batch AND line > :after) AS lines"
                    " GROUP BY island ORDER BY 1 LIMIT :limit"
                ),
                {"batch": batch.seq, "after": after, "limit": limit},
            )
            return [(first, last) for first, last in rows]

    def counts(self, id: str) -> tuple[int, int]:
        """Results of completed and of failed lines, counted one by one: what the batch's columns must say."""
        good = func.count().filter(results.c.status.between(200, 299))
        with self._database.reading() as connection:
            batch = fetch_batch(connection, id, lock=False)
            query = select(func.count(), good).where(results.c.batch == batch.seq)
            every, completed = connection.execute(query).one()
        return int(completed), int(every) - int(completed)

    def results(self, batch: BatchRecord, after: int = 0, limit: int = 500) -> list[LineResult]:
        """Results in the order of lines, those after line `after`."""
        query = select(results.c.line, results.c.status, results.c.body, results.c.request_id)
        query = query.where(results.c.batch == batch.seq, results.c.line > after)
        with self._database.reading() as connection:
            rows = connection.execute(query.order_by(results.c.line).limit(limit))
            return [LineResult(line, status, bytes(body), request) for line, status, body, request in rows]

    # --- The end ---

    def finalize(
        self,
        id: str,
        epoch: int,
        now: int,
        *,
        output: NewFile | None,
        errors: NewFile | None,
        usage: Mapping[str, int] | None = None,
        expired: bool = False,
    ) -> BatchRecord:
        """
        End the batch with these files, whose bytes are in their place.

        A finalizing batch is completed, a cancelling one cancelled, and with `expired` any is expired. Raises
        StaleLease, also if it has ended before: the files that it has then are not these.
        """
        with self._database.writing() as connection:
            batch = fetch_held_batch(connection, id, epoch)
            end = BatchStatus.EXPIRED if expired else _END.get(batch.status)
            if end is None:
                raise StaleLease(id, epoch, batch.epoch, batch.status)
            ids = {
                name: None if file is None else add(connection, file, now).id
                for name, file in (("output_file", output), ("error_file", errors))
            }
            encoded = None if usage is None else as_json(usage)
            times = {f"{end}_at": now}
            return change_batch(
                connection, batch, status=end, usage=encoded, runner="", leased_until=0.0, **ids, **times
            )

    def forget(self, now: int, kept_s: int, limit: int = 5000) -> int:
        """
        Remove what ended batches need no more: their results, which stand in their files, and batches that
        ended, for want of a better date by their window, longer ago than `kept_s`.

        Returns how many rows went; call again until it is 0.
        """
        ended = select(batches.c.seq).where(batches.c.status.in_([one.value for one in ENDED]))
        with self._database.writing() as connection:
            seq = connection.scalar(ended.where(exists().where(results.c.batch == batches.c.seq)).limit(1))
            if seq is None:
                old = ended.where(batches.c.expires_at < now - kept_s)
                return connection.execute(delete(batches).where(batches.c.seq.in_(old))).rowcount
            lines = select(results.c.line).where(results.c.batch == seq).order_by(results.c.line).limit(limit)
            last = connection.scalar(select(func.max(lines.subquery().c.line)))
            where = (results.c.batch == seq, results.c.line <= last)
            return connection.execute(delete(results).where(*where)).rowcount


_END = {BatchStatus.FINALIZING: BatchStatus.COMPLETED, BatchStatus.CANCELLING: BatchStatus.CANCELLED}
