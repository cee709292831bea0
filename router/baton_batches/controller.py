"""
The batch controller: validates, renders, ends and removes batches; runners execute them.

Each router runs one controller task, beside others on the same ledger. Each step runs under a lease. If a
router dies, another one continues when the lease expires. Steps run in threads that pause every few
milliseconds; leases are renewed in the event loop, however slow the object store is. Owners are served in
turn. A batch whose step failed waits longer each time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from baton_api.errors import BatonError, StaleLease
from baton_batches import rendering, validation
from baton_batches.rendering import OutputFile
from baton_batches.storage import Storage
from baton_batches.supervisor import Backoff, choose_batches
from baton_batches.validation import FileLimits, validate
from baton_batches.values import BatchRecord, BatchStatus, LineResult

log = logging.getLogger(__name__)

LEASE_S = 15.0

STUCK_S = 300.0
"""Seconds without progress after which a step's lease is no longer renewed, so that another router may
try."""

PAUSE_BYTES = 32 * 1024
PAUSE_S = 0.0002
"""Pause of a thread after PAUSE_BYTES of a file, so that other threads can run."""

PARALLEL_BATCHES = 2
"""Batches that are validated or rendered at the same time."""

SWEEP_S = 60.0
"""Seconds between two removals of expired files and batches."""

OWNER_REJECTED_S = 120.0
"""Seconds without access after which an owner's batches are cancelled: replicas reload the tenants file at
different times."""

RETRY_LIMIT_S = 30.0

OUTPUT_S = 30 * 86_400
"""Default retention of output files in seconds."""

RESULTS_PER_READ = 100


class ControllerStopped(Exception):
    """The router stops; another one continues."""


class BatchController:
    """The controller of all batches in a ledger."""

    def __init__(
        self,
        storage: Storage,
        now: Callable[[], float] = time.time,
        refusal: Callable[[str], str | None] = lambda owner: None,
        lease_s: float = LEASE_S,
    ) -> None:
        """
        `now`: seconds of the Unix epoch. `refusal`: why an owner's batches may not continue; None if they
        may.
        """
        self._storage = storage
        self._lease_s = lease_s
        self._refusal = refusal
        self._refused_since: dict[str, float] = {}
        self._name = f"keeper {socket.gethostname()} {os.getpid()}"
        self._now = now
        self._woken = asyncio.Event()
        self._swept_at = 0.0
        """When the last removal of what is no longer needed began."""
        self._stopping = threading.Event()
        self._busy: dict[str, tuple[BatchRecord, asyncio.Task[None]]] = {}
        self._leases: dict[str, _ControllerLease] = {}
        self._setbacks: dict[str, Backoff] = {}

    def wake(self) -> None:
        """Check now: something has changed."""
        self._woken.set()

    def sweep(self) -> None:
        """Remove what is no longer needed soon: space may be short."""
        self._swept_at = 0.0
        self.wake()

    async def run(self) -> None:
        """Run until cancelled. Does not connect to a database without batches."""
        failed_s = 0.0
        self._stopping.clear()
        renewing, sweeping = asyncio.create_task(self._renew()), None
        try:
            while True:
                self._woken.clear()
                if self._storage.in_use:
                    try:
                        await self._round()
                        await self._stop_refused()
                        await self._storage.refresh_metrics(self._now())
                        due = self._now() - self._swept_at >= SWEEP_S
                        if due and (sweeping is None or sweeping.done()):
                            sweeping, self._swept_at = asyncio.create_task(self._swept()), self._now()
                        failed_s = 0.0
                    except BatonError as error:
                        failed_s = min(RETRY_LIMIT_S, max(1.0, 2 * failed_s))
                        log.warning("Cannot process batches: %s Next attempt in %g s.", error, failed_s)
                with suppress(TimeoutError):
                    async with asyncio.timeout(failed_s or self._storage.settings.batch_poll_s):
                        await self._woken.wait()
        finally:
            self._stopping.set()  # for the threads, which cannot be cancelled
            tasks = [renewing, *(task for _, task in self._busy.values())]
            tasks += [sweeping] if sweeping else []
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _round(self) -> None:
        """Start as many steps as fit."""
        now = self._now()
        excluded = {*self._busy, *(id for id, setback in self._setbacks.items() if now < setback.until)}
        work = await self._storage.run(partial(self._find_work, now, excluded))
        busy = [batch for batch, _ in self._busy.values()]
        for batch in choose_batches([batch for batch, _ in work.values()], busy, PARALLEL_BATCHES):
            task = asyncio.create_task(self._work(*work[batch.id]), name=f"keep {batch.id}")
            self._busy[batch.id] = batch, task

    async def _stop_refused(self) -> None:
        """Cancel the batches of owners without access for OWNER_REJECTED_S."""
        ledger, now = self._storage.ledger, self._now()
        owners = await self._storage.run(ledger.owners_under_way)
        reasons = {owner: reason for owner in owners if (reason := self._refusal(owner)) is not None}
        self._refused_since = {owner: self._refused_since.get(owner, now) for owner in reasons}
        for owner, since in self._refused_since.items():
            if now - since >= OWNER_REJECTED_S:
                stop = partial(ledger.cancel_refused, owner, reasons[owner], int(now))
                log.warning("%d batches are cancelled: %s", await self._storage.free(stop), reasons[owner])

    async def _work(self, batch: BatchRecord, work: Callable[[], object]) -> None:
        try:
            await self._storage.run_controller(work)
        except (StaleLease, ControllerStopped):
            pass  # the new holder of the lease continues
        except BatonError as error:
            log.warning("%s stays %s for now: %s", batch.id, batch.status, error)
            self._set_back(batch)
        except Exception:
            log.exception("%s stays %s: its next step failed.", batch.id, batch.status)
            self._set_back(batch)
        else:
            self._setbacks.pop(batch.id, None)
        finally:
            del self._busy[batch.id]
            self.wake()

    def _set_back(self, batch: BatchRecord) -> None:
        self._setbacks[batch.id] = Backoff.after(self._setbacks.get(batch.id), batch.done, self._now())

    async def _swept(self) -> None:
        try:
            await self._storage.run_controller(self._sweep)
        except BatonError as error:
            log.warning("Cannot remove expired files: %s", error)

    async def _renew(self) -> None:
        """Renew the leases of running steps."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            for lease in list(self._leases.values()):
                try:
                    await self._storage.run(partial(lease.renew, self._lease_s))
                except BatonError:
                    pass  # not now: the next time, before it has run out
                except Exception:
                    log.exception("Cannot renew a lease.")

    def _find_work(
        self, now: float, excluded: Collection[str]
    ) -> dict[str, tuple[BatchRecord, Callable[[], object]]]:
        """The next step of each batch."""
        ledger = self._storage.ledger
        free = partial(ledger.unfinished, now, without=excluded)
        steps: list[tuple[Callable[[BatchRecord], None], list[BatchRecord]]] = [
            (partial(self._end, expired=True), ledger.overdue(now, without=excluded)),
            (self._end, [*free(BatchStatus.CANCELLING), *free(BatchStatus.FINALIZING)]),
            (self._validate, free(BatchStatus.VALIDATING)),
        ]
        return {batch.id: (batch, partial(step, batch)) for step, ready in steps for batch in ready}

    # --- In threads ---

    @contextmanager
    def _lease(self, batch: BatchRecord) -> Iterator[_ControllerLease | None]:
        """None if another holder has the lease, or the status has changed."""
        ledger = self._storage.ledger
        epoch = ledger.lease(batch.id, self._name, self._now(), self._lease_s, batch.status)
        if epoch is None:
            yield None
            return
        lease = self._leases[batch.id] = _ControllerLease(
            self._storage, batch.id, epoch, self._now, self._stopping
        )
        try:
            yield lease
        except BaseException:
            with suppress(BatonError):
                ledger.release(batch.id, epoch)
            raise
        finally:
            del self._leases[batch.id]

    def _validate(self, batch: BatchRecord) -> None:
        settings = self._storage.settings
        with self._lease(batch) as lease:
            if lease is None:
                return
            bounds = FileLimits(settings.batch_file_limit, settings.batch_lines, settings.batch_line_limit)
            result = validate(
                lambda: lease.watched(self._storage.objects.read(batch.input_object, 0, batch.input_bytes)),
                batch.input_bytes,
                batch.endpoint,
                bounds,
                lambda work: self._storage.ledger.record(batch.id, lease.epoch, work, int(self._now())),
            )
            ended = self._storage.ledger.validated(
                batch.id,
                lease.epoch,
                int(self._now()),
                total=result.total,
                model=result.model,
                errors=result.errors,
            )
        log.info("%s has %d requests and is %s.", batch.id, result.total, ended.status)

    def _end(self, batch: BatchRecord, expired: bool = False) -> None:
        """Render the results and end the batch with them; a second renderer's files are dropped."""
        with self._lease(batch) as lease:
            if lease is None:
                return
            batch = self._storage.ledger.find(batch.id)
            usage = rendering.BatchUsage()
            with self._outputs(batch) as (output, errors):
                if batch.in_progress_at is not None:
                    pieces = lease.watched(
                        self._storage.objects.read(batch.input_object, 0, batch.input_bytes)
                    )
                    numbered = validation.split_lines(pieces, self._storage.settings.batch_line_limit)
                    for result, row in rendering.rows(batch.id, numbered, lease.results(batch), expired):
                        (output if result.completed else errors).add(row)
                        if result.completed:
                            usage.add(result.body)
                now = int(self._now())
                expires_at = now + (OUTPUT_S if batch.output_seconds is None else batch.output_seconds)
                ended = self._storage.ledger.finalize(
                    batch.id,
                    lease.epoch,
                    now,
                    output=output.finished(expires_at),
                    errors=errors.finished(expires_at),
                    usage=usage.counts(),
                    expired=expired,
                )
        log.info(
            "%s is %s: %d completed, %d failed, of %d.",
            *(ended.id, ended.status, ended.completed, ended.failed, ended.total),
        )

    @contextmanager
    def _outputs(self, batch: BatchRecord) -> Iterator[tuple[OutputFile, OutputFile]]:
        """The output and error files; neither is kept if rendering fails."""
        both = [OutputFile(self._storage, batch, kind, int(self._now())) for kind in ("output", "error")]
        try:
            yield both[0], both[1]
        except BaseException:
            for output in both:
                output.drop()
            raise

    def _sweep(self) -> None:
        """Remove what is no longer needed."""
        storage, now = self._storage, int(self._now())
        while storage.freeing(partial(storage.files.purge, now)) and not self._stopping.is_set():
            time.sleep(PAUSE_S)
        for key in storage.files.abandoned_uploads(now):
            storage.objects.delete(key)
            storage.freeing(partial(storage.files.forget_upload, key))
        forget = partial(storage.ledger.forget, now, storage.settings.batches_kept_s)
        while storage.freeing(forget) and not self._stopping.is_set():
            time.sleep(PAUSE_S)


class _ControllerLease:
    """A lease that the controller renews while the step makes progress."""

    def __init__(
        self, storage: Storage, batch: str, epoch: int, now: Callable[[], float], stopping: threading.Event
    ) -> None:
        self.epoch = epoch
        self._storage = storage
        self._batch = batch
        self._now = now
        self._stopping = stopping
        self._moved = now()
        self._lost: StaleLease | None = None

    def renew(self, seconds: float) -> None:
        """Raises StorageUnavailable."""
        now = self._now()
        if now - self._moved > STUCK_S:
            return
        try:
            self._storage.ledger.renew(self._batch, self.epoch, now, seconds)
        except StaleLease as error:
            self._lost = error

    def watched(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """The same pieces, with pauses. Raises StaleLease, and ControllerStopped when the router stops."""
        for piece in pieces:
            if self._stopping.is_set():
                raise ControllerStopped
            if self._lost is not None:
                raise self._lost
            self._moved = self._now()
            for start in range(0, len(piece), PAUSE_BYTES):
                yield piece[start : start + PAUSE_BYTES]
                time.sleep(PAUSE_S)

    def results(self, batch: BatchRecord) -> Iterator[LineResult]:
        """All recorded results, in the order of lines."""
        last = 0
        while work := self._storage.ledger.results(batch, last, RESULTS_PER_READ):
            time.sleep(PAUSE_S)
            yield from work
            last = work[-1].line
