"""One request that waits in the router, and all who wait for the same workers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from baton_router.scheduling.admission import Pace, Tolerance
from baton_router.scheduling.dispatcher import Dispatch
from baton_router.scheduling.picker import Ask
from baton_router.scheduling.tenant_queue import Entry
from baton_router.scheduling.waiting_room import WaitingRoom
from baton_router.scheduling.worker_capacity import Wishes

REPLAN_S = 0.25
"""For so long a request that waits for a busy worker is believed to want no other."""

BYTES_PER_TOKEN = 4
"""Of prompts, as long as no worker is there to have said it."""


@dataclass(slots=True, eq=False, kw_only=True)
class Waiting(Entry):
    """One request that waits, and who waits for it."""

    ask: Ask
    future: asyncio.Future[Dispatch]
    plan: Dispatch | None
    """Where it would have gone when that was asked last; None if nowhere."""
    planned: float
    predicted_s: float = 0.0
    """Until it goes, uncorrected."""

    @property
    def replan_at(self) -> float:
        """From when on it is worth asking where it would go now."""
        return self.planned + REPLAN_S

    @property
    def prompt_tokens(self) -> int:
        return prompt_tokens(self.ask, self.plan)

    def wish(self, wishes: Wishes) -> None:
        """Leave word of where it is going to go."""
        if self.plan is None:
            wishes.anywhere()
        else:
            wishes.add(self.plan.computing, self.plan.uncached, self.replan_at)


class Pool:
    """Those who wait for the same workers."""

    __slots__ = ("pace", "room", "tolerance", "wishes")

    def __init__(self) -> None:
        self.room = WaitingRoom()
        self.wishes = Wishes()
        self.pace = Pace()
        self.tolerance = Tolerance()


def prompt_tokens(ask: Ask, plan: Dispatch | None) -> int:
    """Tokens to compute, as far as one can tell."""
    return plan.uncached if plan else max(1, ask.prompt.bytes // BYTES_PER_TOKEN)
