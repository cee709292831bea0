"""The contract between who holds a client's connection and who knows the workers."""

from __future__ import annotations

from typing import Protocol

from baton_api.reports import PromptReport
from baton_router.asks import Ask, Grant


class Picker(Protocol):
    """
    Gives requests to workers, and wants to hear what becomes of each.

    After `pick` come, in this order and at most once each: `began` or `full`, then perhaps `failed`, and in
    any case `let_go`.
    Only `pick` may wait; the others tell, and what they tell may arrive later.
    """

    async def pick(self, ask: Ask) -> Grant:
        """
        The worker that has the request from now on.

        Raises ModelNotFound, PoisonRequest, or NotReady if nobody is there who did not have it yet.
        Cancelled, it leaves nothing behind.
        """
        ...

    def began(self, grant: Grant, report: PromptReport | None) -> None:
        """The worker answers, whatever it says, and `report` is what it says of the prompt."""
        ...

    def failed(self, grant: Grant, *, crashed: bool = False) -> None:
        """
        The worker was lost: it could not be reached, broke off, or said nothing for too long.

        `crashed`: it died or stopped while it had the request, which may be why.
        """
        ...

    def full(self, grant: Grant) -> None:
        """The worker is well, but has no room for the request."""
        ...

    def let_go(self, grant: Grant, *, complete: bool, tokens: int | None = None) -> None:
        """
        Nobody waits for the worker any more; `complete` if its answer was whole and good.

        `tokens` are those that it generated, if somebody has counted them.
        """
        ...
