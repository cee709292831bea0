"""
Tiers: where a worker's KV blocks can be besides its pool, and which one an event is about.

A block in a tier is *reachable*: the worker can restore it to its pool, which takes time. It is not *hot*,
as blocks of the pool are. A tier's class decides what restoring costs, so the names of vLLM and SGLang for
similar media are one tier here.
"""

from __future__ import annotations

import enum

from baton_api.kv_events import HOST_MEMORY, IN_USE, SHARED_STORAGE, STORAGE, BlockRemoved, BlockStored


class Tier(enum.StrEnum):
    """In the order of what restoring costs: a block in several tiers comes from the first of them."""

    MEMORY = "memory"
    """Of the worker's host."""
    DISK = "disk"
    """Of the worker, and any medium that the router does not know."""
    SHARED = "shared"
    """Storage that all workers of a kind read: what one of them stores, each can restore."""


_MEMORY = (HOST_MEMORY, "CPU_PINNED")
"""Host memory, as vLLM and SGLang call it."""

MEDIA = {Tier.MEMORY: HOST_MEMORY, Tier.DISK: STORAGE, Tier.SHARED: SHARED_STORAGE}
"""A medium of each tier."""

_SHARED_LOCALITY = "REMOTE"
"""vLLM's locality of storage that is not the publisher's own."""


def tier_of(event: BlockStored | BlockRemoved) -> Tier | None:
    """
    The tier that an event is about; None for the pool.

    >>> tier_of(BlockRemoved([1])), tier_of(BlockRemoved([1], "CPU_PINNED"))
    (None, <Tier.MEMORY: 'memory'>)
    >>> tier_of(BlockRemoved([1], "STORAGE")), tier_of(BlockRemoved([1], "STORAGE", locality="REMOTE"))
    (<Tier.DISK: 'disk'>, <Tier.SHARED: 'shared'>)
    """
    medium = event.medium
    if medium is None or medium == IN_USE:
        return None
    if event.locality == _SHARED_LOCALITY or medium == MEDIA[Tier.SHARED]:
        return Tier.SHARED
    return Tier.MEMORY if medium in _MEMORY else Tier.DISK
