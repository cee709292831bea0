"""
The contract between the process that holds a client's connection and the scheduler.

`PickRequest` and `Grant` are values that may cross a process boundary. The body is not among them: choosing a
worker needs the prompt's chunks, not the prompt.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from baton_api.reports import PromptReport
from baton_router.cache.prompt_chunks import PromptChunks
from baton_router.tenants.tenants import TenantLimits


class PickRequest(msgspec.Struct, frozen=True):
    """One request that wants a worker."""

    model: str | None
    """None if it does not say: then any worker may have it, to refuse it in its own words."""
    prompt: PromptChunks
    tried: tuple[str, ...] = ()
    """Names of the workers that had it already and lost or refused it."""
    tenant: str = ""
    """Its id."""
    kind: str = "default"
    """Its class."""
    limits: TenantLimits | None = None
    """What its tenant may use; None if there is no limit."""
    objective_s: float | None = None
    """Within which its first token is wanted; None if it does not say."""
    streams: bool = True
    """Whether the answer begins when the prompt is computed, and not when all of it is there."""
    answer_tokens: int | None = None
    """It wants at most so many; None if it does not say."""
    size: int = 0
    """Bytes of its body."""
    retried: bool = False
    """Whether it was given to a worker before: then it goes first, and is let in in any case."""
    resumed: bool = False
    """Whether a stream goes on that broke off."""
    waited_s: float = 0.0
    """Since it came for the first time, if it is to be counted."""
    digest: int = 0
    """Of its body, by which it is recognized when its client sends it again; 0 if it is not to be."""
    explain: bool = False
    """Whether to say what the ways cost."""


class Grant(msgspec.Struct, frozen=True):
    """Where the request goes. Whoever has one lets it go, whatever becomes of the request."""

    number: int
    """Of the decision, in this scheduler."""
    decode: str
    """Name of the worker that answers, which is its address: `host:port`."""
    prefill: str
    """Name of the worker that computes the prompt for it; empty if it does so itself."""
    control: str
    """That one's control address, for the decode worker."""
    summary: bytes
    """The decision, for a header of the answer."""
    first_token_timeout_s: float = 0.0
    """Seconds for the first token after which another worker may be asked; 0 if there is none, or nobody can
    tell."""
    step_s: float = 0.0
    """Seconds from one token to the next, as the worker says; 0 if it does not."""
    has_alternative: bool = False
    """Whether another worker could have had the request."""
    first_token_s: float = 0.0
    """Seconds from the decision to the first token, predicted; 0 if nobody did."""
    costs: str = ""
    """The cheapest ways with what each costs, if that was asked for."""


class Picker(Protocol):
    """
    Gives requests to workers, and wants to hear what becomes of each.

    After `pick` come, in this order and at most once each: `began` or `full`, then perhaps `failed`, and in
    any case `release`.
    Only `pick` may wait; the others tell, and what they tell may arrive later.
    """

    async def pick(self, request: PickRequest) -> Grant:
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

    def release(self, grant: Grant, *, complete: bool, tokens: int | None = None) -> None:
        """
        Nobody waits for the worker any more; `complete` if its answer was whole and good.

        `tokens` are those that it generated, if somebody has counted them.
        """
        ...
