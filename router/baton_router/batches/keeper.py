"""
What becomes of batches besides their execution: they are validated, rendered, ended and forgotten here.

One task per router, beside any number of others on the same ledger: each step is done under a lease, by
whichever router gets it, and a router that dies in the middle of one is replaced when its lease runs out.
The steps run in threads, and let others run every few milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from baton_api.errors import BatonError, StaleLease
from baton_router.batches import lines, rendering
from baton_router.batches.files import OUTPUT, NewFile
from baton_router.batches.objects import Writer, new_key
from baton_router.batches.storage import Storage
from baton_router.batches.validation import Bounds, examine
from baton_router.batches.values import Batch, Result, Status

log = logging.getLogger(__name__)

LEASE_S = 15.0
RENEWED_S = 5.0
SLICE = 32 * 1024
BREATH_S = 0.0002
"""After so many bytes of a file a thread pauses, or what else runs in this process would wait for it."""

AT_ONCE = 2
"""Batches that are read or rendered at the same time."""

SWEEP_S = 60.0
"""Seconds between two rounds of removing what nobody wants."""

REFUSED_S = 120.0
"""Seconds for which an owner is refused before its batches are cancelled: replicas do not see a new file of
tenants at the same moment."""

RETRY_LIMIT_S = 30.0

OUTPUT_S = 30 * 86_400
"""For which output files are kept, if the batch does not say."""

RESULTS_AT_ONCE = 100
ROWS_AT_ONCE = 256 * 1024
"""Bytes that are written at once."""


class Stopped(Exception):
    """The router ends; another goes on."""


class Keeper:
    """Looks after all batches of a ledger."""

    def __init__(
        self,
        storage: Storage,
        now: Callable[[], float] = time.time,
        refusal: Callable[[str], str | None] = lambda owner: None,
    ) -> None:
        """`refusal`: why the batches of an owner may not go on; None if they may."""
        self._storage = storage
        self._refusal = refusal
        self._refused_since: dict[str, float] = {}
        """By owner with batches under way."""
        self._name = f"keeper {socket.gethostname()} {os.getpid()}"
        self._now = now
        self._woken = asyncio.Event()
        self._stopping = threading.Event()
        self._busy: dict[str, asyncio.Task[None]] = {}

    def wake(self) -> None:
        """Something has changed: look at once."""
        self._woken.set()

    async def run(self) -> None:
        """Until cancelled. Asks nothing of a database before there is a batch in it."""
        failed_s, swept = 0.0, 0.0
        self._stopping.clear()
        try:
            while True:
                self._woken.clear()
                if self._storage.in_use:
                    try:
                        await self._round()
                        await self._stop_refused()
                        await self._storage.look(self._now())
                        if self._now() - swept >= SWEEP_S:
                            await self._storage.run(self._sweep)
                            swept = self._now()
                        failed_s = 0.0
                    except BatonError as error:
                        failed_s = min(RETRY_LIMIT_S, max(1.0, 2 * failed_s))
                        log.warning("Batches cannot be looked after: %s Next try in %g s.", error, failed_s)
                with suppress(TimeoutError):
                    async with asyncio.timeout(failed_s or self._storage.settings.batch_poll_s):
                        await self._woken.wait()
        finally:
            self._stopping.set()  # for the threads, whom nobody can cancel
            for task in self._busy.values():
                task.cancel()
            await asyncio.gather(*self._busy.values(), return_exceptions=True)

    async def _round(self) -> None:
        """Begin what there is to do, as far as there is room."""
        for batch, work in await self._storage.run(self._found):
            if len(self._busy) >= AT_ONCE:
                return
            if batch.id not in self._busy:
                task = asyncio.create_task(self._work(batch, work), name=f"keep {batch.id}")
                self._busy[batch.id] = task

    async def _stop_refused(self) -> None:
        """Cancel the batches of owners who have not been let in for REFUSED_S."""
        ledger, now = self._storage.ledger, self._now()
        owners = await self._storage.run(ledger.owners_under_way)
        reasons = {owner: reason for owner in owners if (reason := self._refusal(owner)) is not None}
        self._refused_since = {owner: self._refused_since.get(owner, now) for owner in reasons}
        for owner, since in self._refused_since.items():
            if now - since >= REFUSED_S:
                stop = partial(ledger.cancel_refused, owner, reasons[owner], int(now))
                log.warning("%d batches are cancelled: %s", await self._storage.run(stop), reasons[owner])

    async def _work(self, batch: Batch, work: Callable[[], object]) -> None:
        try:
            await self._storage.run(work)
        except (StaleLease, Stopped):
            pass  # whoever took it goes on
        except BatonError as error:
            log.warning("%s stays %s for now: %s", batch.id, batch.status, error)
            await asyncio.sleep(1.0)
        except Exception:
            log.exception("%s stays %s: what it needs next broke.", batch.id, batch.status)
            await asyncio.sleep(RETRY_LIMIT_S)
        finally:
            del self._busy[batch.id]
            self.wake()

    def _found(self) -> list[tuple[Batch, Callable[[], object]]]:
        now = self._now()
        ledger = self._storage.ledger
        expire = [(batch, partial(self._end, batch, expired=True)) for batch in ledger.overdue(now)]
        ends = [
            (batch, partial(self._end, batch))
            for status in (Status.CANCELLING, Status.FINALIZING)
            for batch in ledger.unfinished(now, status)
        ]
        begins = [
            (batch, partial(self._validate, batch)) for batch in ledger.unfinished(now, Status.VALIDATING)
        ]
        return [*expire, *ends, *begins]

    # --- In threads ---

    @contextmanager
    def _lease(self, batch: Batch, take: bool = False) -> Iterator[_Lease | None]:
        """None if another has it."""
        ledger = self._storage.ledger
        way = ledger.take if take else ledger.lease
        epoch = way(batch.id, self._name, self._now(), LEASE_S)
        if epoch is None:
            yield None
            return
        try:
            yield _Lease(self._storage, batch.id, epoch, self._now, self._stopping)
        except BaseException:
            with suppress(BatonError):
                ledger.release(batch.id, epoch)
            raise

    def _validate(self, batch: Batch) -> None:
        settings = self._storage.settings
        with self._lease(batch) as lease:
            if lease is None:
                return
            bounds = Bounds(settings.batch_file_limit, settings.batch_lines, settings.batch_line_limit)
            verdict = examine(
                lambda: lease.watched(self._storage.objects.read(batch.input_object, 0, batch.input_bytes)),
                batch.input_bytes,
                batch.endpoint,
                bounds,
                lambda found: self._storage.ledger.record(batch.id, lease.epoch, found, int(self._now())),
            )
            ended = self._storage.ledger.validated(
                batch.id,
                lease.epoch,
                int(self._now()),
                total=verdict.total,
                model=verdict.model,
                errors=verdict.errors,
            )
        log.info("%s has %d requests and is %s.", batch.id, verdict.total, ended.status)

    def _end(self, batch: Batch, expired: bool = False) -> None:
        """Render what there is, and end the batch with it; the files of a second renderer are dropped."""
        with self._lease(batch, take=expired) as lease:
            if lease is None:
                return
            batch = self._storage.ledger.find(batch.id)
            usage = rendering.Usage()
            with self._outputs(batch) as (output, errors):
                if batch.in_progress_at is not None:
                    pieces = lease.watched(
                        self._storage.objects.read(batch.input_object, 0, batch.input_bytes)
                    )
                    numbered = lines.split(pieces, self._storage.settings.batch_line_limit)
                    for result, row in rendering.rows(batch.id, numbered, lease.results(batch), expired):
                        (output if result.completed else errors).add(row)
                        if result.completed:
                            usage.add(result.body)
                ended = self._storage.ledger.finalize(
                    batch.id,
                    lease.epoch,
                    int(self._now()),
                    output=output.finished(),
                    errors=errors.finished(),
                    usage=usage.counts(),
                    expired=expired,
                )
        log.info(
            "%s is %s: %d completed, %d failed, of %d.",
            *(ended.id, ended.status, ended.completed, ended.failed, ended.total),
        )

    @contextmanager
    def _outputs(self, batch: Batch) -> Iterator[tuple[_Output, _Output]]:
        """Two files; neither remains if it does not come to an end."""
        keeps = OUTPUT_S if batch.output_seconds is None else batch.output_seconds
        expires = int(self._now()) + keeps
        both = [
            _Output(self._storage, batch, kind, expires, int(self._now())) for kind in ("output", "error")
        ]
        try:
            yield both[0], both[1]
        except BaseException:
            for one in both:
                one.drop()
            raise

    def _sweep(self) -> None:
        """Remove what nobody wants any more."""
        storage, now = self._storage, int(self._now())
        while storage.files.purge(now) and not self._stopping.is_set():
            time.sleep(BREATH_S)
        for key in storage.files.broken(now):
            storage.objects.delete(key)
            storage.files.withdraw(key)
        while storage.ledger.forget(now, storage.settings.batches_kept_s) and not self._stopping.is_set():
            time.sleep(BREATH_S)


class _Lease:
    """A lease that is renewed as work goes on."""

    def __init__(
        self, storage: Storage, batch: str, epoch: int, now: Callable[[], float], stopping: threading.Event
    ) -> None:
        self.epoch = epoch
        self._storage = storage
        self._batch = batch
        self._now = now
        self._stopping = stopping
        self._renewed = now()

    def watched(self, pieces: Iterable[bytes]) -> Iterator[bytes]:
        """The same pieces, with pauses. Raises StaleLease, and Stopped when the router ends."""
        for piece in pieces:
            if self._stopping.is_set():
                raise Stopped
            if self._now() - self._renewed > RENEWED_S:
                self._renewed = self._now()
                self._storage.ledger.renew(self._batch, self.epoch, self._renewed, LEASE_S)
            for start in range(0, len(piece), SLICE):
                yield piece[start : start + SLICE]
                time.sleep(BREATH_S)

    def results(self, batch: Batch) -> Iterator[Result]:
        """All that were recorded, in the order of lines."""
        last = 0
        while found := self._storage.ledger.results(batch, last, RESULTS_AT_ONCE):
            time.sleep(BREATH_S)
            yield from found
            last = found[-1].line


class _Output:
    """A file that is there once it has a row."""

    def __init__(self, storage: Storage, batch: Batch, kind: str, expires_at: int, now: int) -> None:
        self._storage = storage
        self._batch = batch
        self._kind = kind
        self._expires_at = expires_at
        self._now = now
        self._tally = rendering.Tally()
        self._rows = bytearray()
        self._key = ""
        self._writer: Writer | None = None
        self._committed = False

    def add(self, row: bytes) -> None:
        self._tally.add(row)
        self._rows += row
        if len(self._rows) >= ROWS_AT_ONCE:
            self._write()

    def finished(self) -> NewFile | None:
        """The file in its place; None if it would be empty."""
        if not self._tally.lines:
            return None
        self._write().commit()
        self._committed = True
        return NewFile(
            owner=self._batch.owner,
            purpose=OUTPUT,
            filename=f"{self._batch.id}_{self._kind}.jsonl",
            bytes=self._tally.size,
            sha256=self._tally.hash.hexdigest(),
            object=self._key,
            expires_at=self._expires_at,
        )

    def drop(self) -> None:
        """
        Nobody will ask for it.

        What is in its place already may have a row, for all that is known; if not, it is swept up later.
        """
        with suppress(BatonError):
            if self._writer is not None and not self._committed:
                self._writer.abort()
                self._storage.files.withdraw(self._key)

    def _write(self) -> Writer:
        if self._writer is None:
            self._key = new_key(self._batch.owner)
            self._storage.files.promise(self._key, self._now)
            self._writer = self._storage.objects.writer(self._key)
        self._writer.write(bytes(self._rows))
        self._rows.clear()
        return self._writer
