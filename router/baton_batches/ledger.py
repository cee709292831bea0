"""
The ledger of batches: its database rows are the truth about them; no process holds state.

**Results.** A line may run more than once but has exactly one result: the first that is recorded. A batch
ends once; its files and final status are set in one transaction.

**Leases.** A process that validates or renders a batch holds an exclusive lease. `lease` returns a new epoch,
and only while no other lease is live. The holder renews it and names its epoch in each write. A write with an
old epoch raises StaleLease, and its author must stop. An expired lease is valid until another one is taken.
Runners hold shared leases: see `runner_leases`.

**Lifecycle.**

    validating -> in_progress -> finalizing -> completed      or failed, if the file is invalid
    validating, in_progress or finalizing -> cancelling -> cancelled      by request_cancel
    validating or in_progress -> expired      by the next holder, after the completion window

`record` moves in_progress to finalizing with the last line and releases the lease. A runner learns of
cancellation and expiry from `renew` and `record`: it records finished lines, stops the rest, and releases. No
lease is taken from its holder to end a batch; a runner's lease is not renewed beyond the window.

Times are passed in as seconds of the Unix epoch. All calls block on the database: make them in a thread.

**BatchJobs.** A router creates a BatchJob for each batch without one. A batch that a BatchJob created from a
file names that BatchJob in its metadata, and waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, delete, exists, func, insert, or_, select, update

from baton_api import batch_jobs
from baton_api.batch_jobs import DAY
from baton_api.errors import BatchEnded, BatchNotFound, FileNotFound, StaleLease, Unauthorized
from baton_batches import api_objects
from baton_batches.database import Database
from baton_batches.files import NewFile, add, new_id
from baton_batches.runner_leases import (
    count_in_ranges,
    dismiss_runners,
    fetch_writable_batch,
    finalize_if_done,
    working_runners,
)
from baton_batches.tables import (
    as_json,
    batch_of,
    batches,
    bindable,
    change_batch,
    count_results,
    fetch_batch,
    fetch_held_batch,
    fetch_page,
    files,
    free_batches,
    insert_results,
    ranges,
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
"""Statuses of batches that expire when their window passes."""


class Ledger:
    """Batches, their leases and their results."""

    def __init__(self, database: Database) -> None:
        self._database = database

    # --- Clients' requests ---

    def create(
        self,
        owner: str,
        endpoint: str,
        file: StoredFile,
        now: int,
        *,
        window: str = DAY,
        metadata: Mapping[str, str] | None = None,
        output_seconds: int | None = None,
        models: Iterable[str] | None = None,
    ) -> BatchRecord:
        """
        A batch to be validated, with a window as in `completion_window`.

        `models`: models that its creator may use; None for all that the owner may use. Raises FileNotFound.
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
        """The batch, for its owner. Raises BatchNotFound."""
        with self._database.reading() as connection:
            row = connection.execute(
                select(batches).where(batches.c.owner == owner, batches.c.id == bindable(id))
            ).first()
        if row is None:
            raise BatchNotFound(id)
        return batch_of(row)

    def find(self, id: str) -> BatchRecord:
        """The batch, for any owner: for those that work on it. Raises BatchNotFound."""
        with self._database.reading() as connection:
            return fetch_batch(connection, id, lock=False)

    def page(self, owner: str, *, limit: int, after: str = "") -> tuple[list[BatchRecord], bool]:
        """A page, newest first, and whether more follow. Raises InvalidRequest for an unknown `after`."""
        query = select(batches).where(batches.c.owner == owner)
        with self._database.reading() as connection:
            rows, more = fetch_page(connection, batches, owner, query, limit, after)
        return [batch_of(row) for row in rows], more

    def request_cancel(self, owner: str, id: str, now: int) -> BatchRecord:
        """
        The batch with status cancelling; a batch that was cancelled before is unchanged.

        Raises BatchNotFound, and BatchEnded if it has ended otherwise.
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
        """Give all files and batches of `owner` to `other`. Returns the counts of files and batches."""
        with self._database.writing() as connection:
            counts = [
                connection.execute(update(table).where(table.c.owner == owner).values(owner=other)).rowcount
                for table in (files, batches)
            ]
        return counts[0], counts[1]

    def owners_under_way(self) -> list[str]:
        """Owners with batches to validate or run."""
        query = select(batches.c.owner).where(batches.c.status.in_(UNDER_WAY)).distinct()
        with self._database.reading() as connection:
            return list(connection.scalars(query))

    def cancel_refused(self, owner: str, reason: str, now: int) -> int:
        """Cancel all active batches of `owner` with `reason` as their error. Returns their count."""
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
        A new epoch; None if another lease is live, the batch has ended, or its status is not `status`.

        Raises BatchNotFound.
        """
        with self._database.writing() as connection:
            batch = fetch_batch(connection, id)
            if batch.status.ended or batch.leased_until > now or status not in (None, batch.status):
                return None
            return self._leased(connection, batch, runner, now + seconds)

    def take(self, id: str, runner: str, now: float, seconds: float) -> int | None:
        """A new epoch, taken from the current holder: its later writes fail. None if the batch has ended."""
        with self._database.writing() as connection:
            batch = fetch_batch(connection, id)
            return None if batch.status.ended else self._leased(connection, batch, runner, now + seconds)

    def _leased(self, connection: Connection, batch: BatchRecord, runner: str, until: float) -> int:
        dismiss_runners(connection, batch.seq)
        return change_batch(connection, batch, runner=runner, epoch=batch.epoch + 1, leased_until=until).epoch

    def renew(self, id: str, epoch: int, now: float, seconds: float) -> BatchRecord:
        """Renew the lease and return the batch. A released lease stays free. Raises StaleLease."""
        with self._database.writing() as connection:
            batch = fetch_held_batch(connection, id, epoch)
            if not batch.runner:
                return batch
            return change_batch(connection, batch, leased_until=now + seconds)

    def release(self, id: str, epoch: int) -> None:
        """Release the lease at once, unless another holder has it."""
        with self._database.writing() as connection:
            batch = fetch_batch(connection, id)
            if batch.epoch == epoch:
                change_batch(connection, batch, runner="", leased_until=0.0)

    def unfinished(
        self, now: float, status: BatchStatus, limit: int = 100, without: Collection[str] = ()
    ) -> list[BatchRecord]:
        """
        Unleased batches of this status that are not overdue, each owner's oldest first.

        `without`: ids to leave out.
        """
        more = [batches.c.expires_at > now] if status in EXPIRING else []
        with self._database.reading() as connection:
            return free_batches(connection, batches.c.leased_until <= now, [status], limit, without, *more)

    def overdue(self, now: float, limit: int = 100, without: Collection[str] = ()) -> list[BatchRecord]:
        """Unleased batches whose window has passed before every line had a result."""
        with self._database.reading() as connection:
            free = batches.c.leased_until <= now
            return free_batches(connection, free, EXPIRING, limit, without, batches.c.expires_at <= now)

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
        End the validation: in_progress with `total` lines, or failed because of `errors`.

        The lease ends. A cancelled batch stays cancelled. Raises StaleLease.
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
        Keep results, all or none; the first result of a line stays.

        Raises StaleLease, in which case none is kept.
        """
        first: dict[int, LineResult] = {}
        for result in new_results:
            first.setdefault(result.line, result)
        with self._database.writing() as connection:
            batch = fetch_writable_batch(connection, id, epoch)
            if batch.status not in RECORDING:
                return RecordOutcome(0, batch.status)
            new = insert_results(connection, batch.seq, first.values())
            completed = 0
            if new:
                count_in_ranges(connection, batch.seq, new)
                completed = sum(200 <= status < 300 for status in new.values())
                batch = change_batch(
                    connection,
                    batch,
                    completed=batch.completed + completed,
                    failed=batch.failed + len(new) - completed,
                )
            working = working_runners(connection, batch.seq)
            return RecordOutcome(
                len(new), finalize_if_done(connection, batch, now).status, completed, working
            )

    def counts(self, id: str) -> tuple[int, int]:
        """Results of completed and failed lines, counted one by one; the batch's columns must agree."""
        with self._database.reading() as connection:
            return count_results(connection, fetch_batch(connection, id, lock=False).seq)

    def results(self, batch: BatchRecord, after: int = 0, limit: int = 500) -> list[LineResult]:
        """Results after line `after`, in the order of lines."""
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
        End the batch with these files, whose bytes are stored.

        A finalizing batch becomes completed, a cancelling one cancelled, and with `expired` any becomes
        expired. Raises StaleLease, also if it has ended before.
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
            dismiss_runners(connection, batch.seq)
            connection.execute(delete(ranges).where(ranges.c.batch == batch.seq))
            return change_batch(
                connection, batch, status=end, usage=encoded, runner="", leased_until=0.0, **ids, **times
            )

    def forget(self, now: int, kept_s: int, limit: int = 5000) -> int:
        """
        Remove results of ended batches, and batches whose window ended more than `kept_s` ago.

        Returns the count of removed rows; call again until it is 0.
        """
        ended = select(batches.c.seq).where(batches.c.status.in_([status.value for status in ENDED]))
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


class BatchJobAssignments:
    """All batches' BatchJobs."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def claim(self, id: str, job: str) -> BatchRecord:
        """
        The batch, run by this BatchJob from now on.

        Raises BatchNotFound, and Unauthorized if it is for another.
        """
        with self._database.writing() as connection:
            batch = fetch_batch(connection, id)
            meant = batch.job or (batch.metadata or {}).get(batch_jobs.METADATA, "").partition("/")[0]
            if meant and meant != job:
                raise Unauthorized(token=f"is of the BatchJob {job}, and {id} is for the BatchJob {meant}")
            return batch if batch.job or batch.status.ended else change_batch(connection, batch, job=job)

    def disown(self, id: str, job: str) -> None:
        """Detach the batch from a BatchJob that is deleted, or that knows that the batch has ended."""
        with self._database.writing() as connection:
            connection.execute(update(batches).where(batches.c.id == id, batches.c.job == job).values(job=""))

    def missing(self, limit: int = 100) -> list[BatchRecord]:
        """Batches with lines to run and no BatchJob that would, the oldest first."""
        meant = f'%"{batch_jobs.METADATA}"%'
        query = select(batches).where(
            batches.c.status == BatchStatus.IN_PROGRESS.value,
            batches.c.job == "",
            or_(batches.c.metadata.is_(None), batches.c.metadata.not_like(meant)),
        )
        with self._database.reading() as connection:
            return [batch_of(row) for row in connection.execute(query.order_by(batches.c.seq).limit(limit))]

    def assigned(self) -> list[BatchRecord]:
        """Batches with a BatchJob, whose status follows them."""
        query = select(batches).where(batches.c.job != "").order_by(batches.c.seq)
        with self._database.reading() as connection:
            return [batch_of(row) for row in connection.execute(query)]
