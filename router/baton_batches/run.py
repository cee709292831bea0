"""
`baton batch run`: one runner as a process, and what its exit status says.

Started by a router it is on a leash: its standard input is a pipe that the router holds, and when that ends,
because the router ended in whatever way, so does the runner.
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
from typing import Any

from baton_batches.runner import Runner
from baton_batches.runner_gateway import Dismissed, Door, Refused

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
