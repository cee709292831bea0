"""
`baton batch run` as the container of a Job: it goes on until the batch needs no runner.

Unlike a subprocess of the router it is not told apart from those that were before it: the pod that was here
may still hold the lease, the file may still be read, the router may be exchanged. All of that is waited for.
It ends with 0 when nothing is left to run, and with 43 when to start it again would be of no use, for which
the Job has a rule. The token is Kubernetes' own, in a file that is written anew before it ends.
"""

from __future__ import annotations

import asyncio
import logging
import random
from dataclasses import dataclass
from pathlib import Path

from baton_api.errors import SetupError
from baton_batches.run import Ended, attempt, default_name, ending, first, in_a_loop
from baton_batches.runner_gateway import Dismissed, Door, Missing, Refused
from baton_batches.submission import Submission, Unfit

log = logging.getLogger(__name__)

AGAIN_S = 2.0
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


def run(work: Work) -> Ended:
    """Until nothing is left to run. Raises SetupError for what can never be."""
    if not work.batch and work.submission is None:
        raise SetupError("A runner needs --batch or --input-file.")
    return in_a_loop(_run(work, random.Random()))


async def _run(work: Work, rng: random.Random) -> Ended:
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
        if not await first(asyncio.ensure_future(asyncio.sleep(AGAIN_S)), told):
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
