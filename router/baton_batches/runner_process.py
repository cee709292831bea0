"""
`baton batch run`: one batch runner as a process, and what its exit status means.

A runner started by a router (`run`) holds a pipe to it on standard input and ends when the pipe closes,
however the router ended. A runner in the container of a Kubernetes Job (`run_job`) goes on until the batch
needs no runner: it waits while another pod holds the lease, the input file is being validated, or the router
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

from baton_api.errors import SetupError
from baton_batches.runner import Runner
from baton_batches.runner_gateway import Dismissed, Door, Missing, Refused
from baton_batches.submission import Submission, Unfit

log = logging.getLogger(__name__)

PARTING_S = 5.0
"""Seconds that a runner which was told to end has to post what is done."""


class Ended(enum.IntEnum):
    """Exit statuses: which ends mean that another runner is to be started."""

    THROUGH = 0
    """Nothing is left to run."""
    REFUSED = 43
    """The token is not good: to start again with the same one is of no use."""
    DISMISSED = 75
    """Another runner has the batch."""
    TOLD_TO = 76
    """Somebody asked it to end before the batch was through."""


def run(url: str, batch: str, token: str, name: str = "", leashed: bool = False) -> Ended:
    """Run what is left of a batch. Raises SetupError if `url` is no router's."""
    rng = random.Random()
    door = Door(url, batch, token, rng)
    return in_a_loop(_leashed(_run(door, batch, name or default_name(), rng), leashed))


def in_a_loop(work: Coroutine[Any, Any, Ended]) -> Ended:
    """The work, by the fastest event loop there is."""
    try:
        import uvloop
    except ModuleNotFoundError:  # not on Windows; asyncio's own loop does it more slowly
        factory = None
    else:
        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def default_name() -> str:
    """A name that no other runner has."""
    return f"{socket.gethostname()}-{secrets.token_hex(4)}"


async def _leashed(work: Coroutine[Any, Any, Ended], leashed: bool) -> Ended:
    """The work, until the leash is let go of."""
    working = asyncio.ensure_future(work)
    if not leashed:
        return await working
    leash = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(leash), sys.stdin)
    holding = asyncio.ensure_future(leash.read())
    await asyncio.wait((working, holding), return_when=asyncio.FIRST_COMPLETED)
    if working.done():
        holding.cancel()
        return working.result()
    working.cancel()
    await asyncio.wait((working,))
    return Ended.TOLD_TO


async def _run(door: Door, batch: str, name: str, rng: random.Random) -> Ended:
    told = ending()
    # A Ctrl-C in the terminal is for the router, who ends its runners.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)
    try:
        return await attempt(door, batch, name, rng, told)
    except Dismissed as error:
        log.info("%s lets go of %s: %s", name, batch, error)
        return Ended.DISMISSED
    except Refused as error:
        log.error("%s may not work on %s: %s", name, batch, error)
        return Ended.REFUSED
    finally:
        door.close()


def ending() -> asyncio.Event:
    """Set once somebody asks this process to end."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    return told


async def attempt(
    door: Door, batch: str, name: str, rng: random.Random, told: asyncio.Event, widest: int | None = None
) -> Ended:
    """
    One lease's work, until the batch needs no runner or until `told`. Raises Dismissed and Refused.

    `widest`: lines under way at once, at most.
    """
    leasing = asyncio.ensure_future(door.lease(name))
    if not await first(leasing, told):
        return Ended.TOLD_TO
    lease = leasing.result()
    if lease is None:
        return Ended.THROUGH
    log.info("%s runs %s: %d of %d lines are done.", name, batch, lease.done, lease.total)
    runner = Runner(batch, door, lease, rng, widest)
    running = asyncio.ensure_future(runner.run())
    telling = asyncio.ensure_future(told.wait())
    await asyncio.wait((running, telling), return_when=asyncio.FIRST_COMPLETED)
    telling.cancel()
    if running.done():
        running.result()
        await door.release()
        return Ended.THROUGH
    runner.stop()
    try:
        async with asyncio.timeout(PARTING_S):
            await running
            await door.release()
    except TimeoutError:
        pass
    return Ended.TOLD_TO


async def first(work: asyncio.Future[Any], told: asyncio.Event) -> bool:
    """Whether it is done before somebody asks this process to end; else it is broken off."""
    telling = asyncio.ensure_future(told.wait())
    await asyncio.wait((work, telling), return_when=asyncio.FIRST_COMPLETED)
    telling.cancel()
    if not work.done():
        work.cancel()
    return work.done()


LEASE_RETRY_S = 2.0
"""Seconds until the lease is asked for again while another has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a Job's container is for."""

    router: str
    token: Path
    """The file that Kubernetes keeps the pod's token in."""
    batch: str = ""
    submission: Submission | None = None
    """What the batch is to be made of, if there is none yet."""
    widest: int | None = None
    """Lines under way at once, at most; None: as many as the router allows."""


def run_job(work: Work) -> Ended:
    """Until nothing is left to run. Raises SetupError for what can never be."""
    if not work.batch and work.submission is None:
        raise SetupError("A runner needs --batch or --input-file.")
    return in_a_loop(_run_job(work, random.Random()))


async def _run_job(work: Work, rng: random.Random) -> Ended:
    told = ending()
    try:
        batch = work.batch
        if work.submission is not None:
            submitting = asyncio.ensure_future(work.submission.batch())
            if not await first(submitting, told):
                return Ended.TOLD_TO
            batch = submitting.result()
        return await _carry(work, batch, rng, told)
    except (Refused, Missing, Unfit) as error:
        log.error("This cannot be run: %s", error)
        return Ended.REFUSED


async def _carry(work: Work, batch: str, rng: random.Random, told: asyncio.Event) -> Ended:
    """Lease after lease. Raises Refused and Missing."""
    name = default_name()
    while True:
        door = Leased(work.router, batch, _read(work.token), rng)
        try:
            return await attempt(door, batch, name, rng, told, work.widest)
        except Missing:
            raise
        except Refused:
            if not door.leased:
                raise
            # It was believed before: the router's secret has changed, or this process stood still for long.
            log.info("%s asks for %s anew.", name, batch)
        except Dismissed as error:
            log.info("%s waits for %s: %s", name, batch, error)
        finally:
            door.close()
        if not await first(asyncio.ensure_future(asyncio.sleep(LEASE_RETRY_S)), told):
            return Ended.TOLD_TO


class Leased(Door):
    """A way to the router that knows whether it was ever let in."""

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
