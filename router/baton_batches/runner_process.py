"""
`baton batch run`: one batch runner as a process, and what its exit status means.

A runner started by a router (`run`) holds a pipe to it on standard input and ends when the pipe closes,
however the router ended. A runner in the container of a Kubernetes Job (`run_job`) runs until the batch
needs no runner. It waits while another pod holds the lease, the input file is being validated, or the router
restarts. It exits with 0 when nothing is left to run and with 43 when a restart is useless; the Job has a
rule for 43.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
import secrets
import signal
import socket
import sys
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from baton_api import batch_jobs
from baton_api.batch_jobs import DAY, window_fields
from baton_api.errors import (
    NotReady,
    SetupError,
    WorkerLost,
)
from baton_batches import retries
from baton_batches.runner import BatchRunner
from baton_batches.runner_gateway import (
    OK,
    REPLY_LIMIT,
    REQUEST_TIMEOUT_S,
    BatchMissing,
    LeaseLost,
    RunnerGateway,
    TokenRejected,
    upstream_of,
)
from baton_http.upstream import fetch

BATCHES = "/v1/batches"


PAGE = 100


RETRY_STATUSES = frozenset({408, 429, *range(500, 600)})
"""Answers after which the same request may get another one."""


class SubmissionRejected(Exception):
    """The router rejects the request, and a retry is useless; the text has the reason."""


class _SubmittedBatch(msgspec.Struct):
    id: str
    metadata: dict[str, str] | None = None


class _BatchPage(msgspec.Struct):
    data: list[_SubmittedBatch]
    has_more: bool


class BatchSubmission:
    """The requests to a router for one BatchJob."""

    def __init__(
        self,
        url: str,
        key: str,
        file: str,
        endpoint: str,
        job: str,
        window: str = DAY,
        rng: random.Random | None = None,
    ) -> None:
        """`job` is the BatchJob's name and uid, as `name/uid`. Raises SetupError for an invalid `url`."""
        self._upstream = upstream_of(url)
        self._key = key
        self._file = file
        self._endpoint = endpoint
        self._job = job
        self._window = window
        self._rng = rng or random.Random()

    async def batch(self) -> str:
        """Return the id of the batch, after creating it if needed. Raises SubmissionRejected."""
        try:
            return await self._find() or await self._make()
        finally:
            self._upstream.close()

    async def _find(self) -> str:
        after = ""
        while True:
            more = f"&after={quote(after, safe='')}" if after else ""
            page = msgspec.json.decode(await self._request("GET", f"?limit={PAGE}{more}"), type=_BatchPage)
            for one in page.data:
                if (one.metadata or {}).get(batch_jobs.METADATA) == self._job:
                    return one.id
            if not page.has_more:
                return ""
            after = page.data[-1].id

    async def _make(self) -> str:
        body = {
            "input_file_id": self._file,
            "endpoint": self._endpoint,
            "metadata": {batch_jobs.METADATA: self._job},
            **window_fields(self._window),
        }
        return msgspec.json.decode(
            await self._request("POST", "", msgspec.json.encode(body)), type=_SubmittedBatch
        ).id

    async def _request(self, method: str, query: str, body: bytes = b"") -> bytes:
        """Repeat the request until the router answers. Raises SubmissionRejected."""
        headers = [("content-type", "application/json")]
        headers += [("authorization", f"Bearer {self._key}")] if self._key else []
        attempts = 0
        while True:
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    target = f"{BATCHES}{query}"
                    reply = await fetch(self._upstream, method, target, headers, body, limit=REPLY_LIMIT)
            except (WorkerLost, NotReady, TimeoutError):
                pass
            else:
                if reply.status == OK:
                    return reply.body
                if reply.status not in RETRY_STATUSES:
                    raise SubmissionRejected(reply.body.decode(errors="replace"))
            await asyncio.sleep(retries.backoff_s(attempts, self._rng) / 5)
            attempts += 1
            if body and (id := await self._find()):  # the batch was created, but the reply was lost
                return msgspec.json.encode({"id": id})


log = logging.getLogger(__name__)

STOP_S = 5.0
"""Seconds that a stopping runner has to post finished results."""


class ExitStatus(enum.IntEnum):
    """Exit statuses: which of them require another runner."""

    DONE = 0
    """The batch needs no runner any more."""
    REJECTED = 43
    """The token is invalid; a restart with it is useless."""
    LEASE_LOST = 75
    """Another runner has the batch."""
    TERMINATED = 76
    """The runner was stopped before the batch was done."""


def run(url: str, batch: str, token: str, name: str = "", exit_with_parent: bool = False) -> ExitStatus:
    """Run what is left of a batch. Raises SetupError if `url` is not a router's."""
    rng = random.Random()
    gateway = RunnerGateway(url, batch, token, rng)
    work = _run(gateway, batch, name or default_name(), rng)
    return run_in_event_loop(_until_parent_exits(work) if exit_with_parent else work)


def run_in_event_loop(work: Coroutine[Any, Any, ExitStatus]) -> ExitStatus:
    """Run the coroutine in the fastest event loop available."""
    try:
        import uvloop
    except ModuleNotFoundError:  # not on Windows; asyncio's own loop does it more slowly
        factory = None
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def default_name() -> str:
    """A unique name."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"


async def _until_parent_exits(work: Coroutine[Any, Any, ExitStatus]) -> ExitStatus:
    """Run until the parent closes the standard input of this process, which it does by ending."""
    working = asyncio.ensure_future(work)
    parent = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(parent), sys.stdin
    )
    waiting = asyncio.ensure_future(parent.read())
    await asyncio.wait((working, waiting), return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        waiting.cancel()
        return working.result()
    working.cancel()
    await asyncio.wait((working,))
    return ExitStatus.TERMINATED


async def _run(gateway: RunnerGateway, batch: str, name: str, rng: random.Random) -> ExitStatus:
    stop = stop_event()
    # A Ctrl-C in the terminal is for the router, who ends its runners.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)
    try:
        return await run_lease(gateway, batch, name, rng, stop)
    except LeaseLost as error:
        log.info("%s has lost the lease of %s: %s", name, batch, error)
        return ExitStatus.LEASE_LOST
    except TokenRejected as error:
        log.error("The router rejected the token of %s for %s: %s", name, batch, error)
        return ExitStatus.REJECTED
    finally:
        gateway.close()


def stop_event() -> asyncio.Event:
    """An event that is set when this process is asked to stop."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    return stop


async def run_lease(
    gateway: RunnerGateway,
    batch: str,
    name: str,
    rng: random.Random,
    stop: asyncio.Event,
    max_in_flight: int | None = None,
) -> ExitStatus:
    """
    Work under one lease until the batch needs no runner, or until `stop`. Raises LeaseLost and TokenRejected.

    `max_in_flight`: maximum lines in flight.
    """
    leasing = asyncio.ensure_future(gateway.lease(name))
    if not await finished_before_stop(leasing, stop):
        return ExitStatus.TERMINATED
    lease = leasing.result()
    if lease is None:
        return ExitStatus.DONE
    log.info("%s runs %s: %d of %d lines are done.", name, batch, lease.done, lease.total)
    runner = BatchRunner(batch, gateway, lease, rng, max_in_flight)
    running = asyncio.ensure_future(runner.run())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if running.done():
        running.result()
        await gateway.release()
        return ExitStatus.DONE
    runner.stop()
    try:
        async with asyncio.timeout(STOP_S):
            await running
            await gateway.release()
    except TimeoutError:
        pass
    return ExitStatus.TERMINATED


async def finished_before_stop(work: asyncio.Future[Any], stop: asyncio.Event) -> bool:
    """Whether `work` is done before `stop` is set; otherwise it is cancelled."""
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait((work, stopping), return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not work.done():
        work.cancel()
    return work.done()


LEASE_RETRY_S = 2.0
"""Seconds between two attempts to get a lease that another runner has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """Options of a Job's container."""

    router: str
    token: Path
    """File with the pod's token, maintained by Kubernetes."""
    batch: str = ""
    submission: BatchSubmission | None = None
    """The batch to create, if none exists."""
    max_in_flight: int | None = None
    """Maximum lines in flight; None for the router's limit."""


def run_job(work: JobOptions) -> ExitStatus:
    """Run until nothing is left. Raises SetupError for invalid options."""
    if not work.batch and work.submission is None:
        raise SetupError("A runner needs --batch or --input-file.")
    return run_in_event_loop(_run_job(work, random.Random()))


async def _run_job(work: JobOptions, rng: random.Random) -> ExitStatus:
    stop = stop_event()
    try:
        batch = work.batch
        if work.submission is not None:
            submitting = asyncio.ensure_future(work.submission.batch())
            if not await finished_before_stop(submitting, stop):
                return ExitStatus.TERMINATED
            batch = submitting.result()
        return await _run_leases(work, batch, rng, stop)
    except (TokenRejected, BatchMissing, SubmissionRejected) as error:
        log.error("Cannot run the batch: %s", error)
        return ExitStatus.REJECTED


async def _run_leases(work: JobOptions, batch: str, rng: random.Random, stop: asyncio.Event) -> ExitStatus:
    """Work lease after lease. Raises TokenRejected and BatchMissing."""
    name = default_name()
    while True:
        gateway = LeasedGateway(work.router, batch, _read(work.token), rng)
        try:
            status = await run_lease(gateway, batch, name, rng, stop, work.max_in_flight)
            if status is not ExitStatus.DONE or not gateway.leased:
                return status
            continue  # DONE only when the router has nothing to run
        except BatchMissing:
            raise
        except TokenRejected:
            if not gateway.leased:
                raise
            # It was accepted before: the router's secret has changed, or this process was suspended for long.
            log.info("%s requests the lease of %s again.", name, batch)
        except LeaseLost as error:
            log.info("%s waits for %s: %s", name, batch, error)
        finally:
            gateway.close()
        if not await finished_before_stop(asyncio.ensure_future(asyncio.sleep(LEASE_RETRY_S)), stop):
            return ExitStatus.TERMINATED


class LeasedGateway(RunnerGateway):
    """A gateway that remembers whether its token was ever accepted."""

    @property
    def leased(self) -> bool:
        return self._token != self._first

    def __init__(self, url: str, batch: str, token: str, rng: random.Random) -> None:
        super().__init__(url, batch, token, rng)
        self._first = token


def _read(token: Path) -> str:
    try:
        return token.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"The token {token} cannot be read: {error}") from error
