"""
All workers as a front knows them, to choose by load alone while nobody who knows more can be asked.

The load is what this front itself has with each worker: a front that is on its own for a moment needs no
better figure, and an older one of somebody else's would draw all fronts to the same worker.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from baton_api.errors import ModelNotFound, NotReady
from baton_api.workers import Role
from baton_router.asks import Ask, Grant
from baton_router.policy import choose


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One worker."""

    name: str
    role: Role
    names: tuple[str, ...]
    """Of its models."""
    group: str
    """Only workers of one group can be a pair."""
    control: str
    ready: bool
    down_since: float
    """Loop time from which on nothing came of it, if it is down; else 0."""
    expired: bool = False
    """Whether it was to end what it had, and has had its time."""
    secure: bool = False
    """Whether it is spoken to by TLS."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker and how busy it is."""

    entry: Entry
    pressure: tuple[int, int]


def by_load(workers: Sequence[Entry], busy: Counter[str], ask: Ask, number: int, rng: random.Random) -> Grant:
    """
    A pair, or a decode worker without one, that was not tried: power of two choices among `busy` ones.

    Raises ModelNotFound, or NotReady.
    """
    decodes = [one for one in workers if one.role is not Role.PREFILL]
    known = decodes if ask.model is None else [one for one in decodes if ask.model in one.names]
    if decodes and not known:
        assert ask.model is not None  # else all are known
        raise ModelNotFound(ask.model, tuple(sorted({name for one in decodes for name in one.names})))
    usable = [one for one in known if one.ready and one.name not in ask.tried]
    if not usable:
        raise NotReady("No worker is known to be ready, and the router's scheduler cannot be asked.")
    decode = _least(usable, busy, rng)
    sources = [
        one
        for one in workers
        if one.role is Role.PREFILL and one.ready and one.group == decode.group and one.name not in ask.tried
    ]
    prefill = _least(sources, busy, rng) if sources else None
    summary = f"number={number};computed_by={(prefill or decode).name};by_load=1".encode()
    if prefill is None:
        return Grant(number, decode.name, "", "", summary)
    return Grant(number, decode.name, prefill.name, prefill.control, summary)


def _least(workers: Sequence[Entry], busy: Counter[str], rng: random.Random) -> Entry:
    return choose([Candidate(one, (busy[one.name], 0)) for one in workers], rng).entry
