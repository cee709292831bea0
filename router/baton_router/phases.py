"""
Where the time of one request went, reckoned from when it was seen to move and what its worker said.

    queue      it waits, in the router and then at the worker that computes its prompt
    prefill    its prompt is computed
    transfer   its blocks move to the worker that generates; mostly beside the computation
    decode     tokens come

The lengths are the worker's own, by its clock; where they lie between the router's times is reckoned as for
spans (`docs/adr/0024-the-router-makes-the-spans.md`): the computation follows the wait, and the transfer ends
with the first token.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton_api.reports import PromptReport


@dataclass(frozen=True, slots=True)
class Seen:
    """When the router saw a request move, by its clock, in seconds; None for what has not been."""

    arrived: float
    decided: float
    first_byte: float | None = None
    ended: float | None = None
    streams: bool = True
    """Whether the first byte is the first token's, and not that of a whole answer."""


@dataclass(frozen=True, slots=True)
class Phase:
    """One part of the way, by the router's clock."""

    name: str
    start: float
    end: float | None
    """None while it goes on."""


def phases(seen: Seen, report: PromptReport | None) -> tuple[Phase, ...]:
    """In their order; none ends before it starts, and none starts before the request arrived."""
    if seen.first_byte is None:
        queue = Phase("queue", seen.arrived, seen.decided)
        return queue, Phase("prefill", seen.decided, seen.ended)
    latest = seen.first_byte
    start = seen.decided if report is None else min(seen.decided + report.queue_s, latest)
    computed = latest if report is None else min(start + report.compute_s, latest)
    begins = latest if seen.streams else computed
    found = [Phase("queue", seen.arrived, start), Phase("prefill", start, computed)]
    if report is not None and report.remote:
        found.append(Phase("transfer", max(start, begins - report.transfer_s), begins))
    return *found, Phase("decode", begins, seen.ended)
