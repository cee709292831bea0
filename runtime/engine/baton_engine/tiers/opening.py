"""
The tiers of a worker, from its settings: memory, and behind it a disk and a shared store.

Blocks pass through the memory, so the others need it. Disk and store keep them under a name of the weights
that computed them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from baton_api.errors import SetupError
from baton_api.setting_types import show_size
from baton_engine import machine
from baton_engine.devices import free_bytes
from baton_engine.kv.cache import KVCache
from baton_engine.settings import WorkerSettings
from baton_engine.tiers.disk import DiskStore
from baton_engine.tiers.namespace import Weights
from baton_engine.tiers.objects import BlockObjects
from baton_engine.tiers.objects import opened as objects_of
from baton_engine.tiers.shared import SharedTier
from baton_engine.tiers.store import MemoryStore
from baton_engine.tiers.tier import EngineTier, Tier

log = logging.getLogger(__name__)

FLUSH_S = 5.0
"""Seconds after the drain for blocks that are only in memory, if there is a tier behind it."""


def check_tiers(settings: WorkerSettings) -> None:
    """Raise SetupError if the settings of the tiers contradict each other."""
    tiers = {
        "--kv-memory-tier": settings.kv_memory_tier,
        "--kv-disk-tier": settings.kv_disk_tier,
        "--kv-shared-store": settings.kv_shared_store,
    }
    chosen = [flag for flag, value in tiers.items() if value]
    if chosen and settings.tensor_parallel_size > 1:
        raise SetupError(
            f"--tensor-parallel-size {settings.tensor_parallel_size} cannot be used with "
            f"{' and '.join(chosen)}: only the first rank's part of a block would be kept. "
            "Use --tensor-parallel-size 1, or no tier."
        )
    if bool(settings.kv_disk_tier) != bool(settings.kv_disk_tier_size):
        raise SetupError(
            "--kv-disk-tier and --kv-disk-tier-size are set together: a folder, and its size, such as 100GiB."
        )
    if settings.kv_disk_tier and not settings.kv_memory_tier:
        raise SetupError(
            "--kv-disk-tier needs --kv-memory-tier, through which its blocks pass. Set one, such as 1GiB."
        )
    if bool(settings.kv_shared_store) != bool(settings.kv_shared_store_size):
        raise SetupError(
            "--kv-shared-store and --kv-shared-store-size are set together: a URL and its size, such as 1TiB."
        )
    if settings.kv_shared_store and not settings.kv_memory_tier:
        raise SetupError(
            "--kv-shared-store needs --kv-memory-tier, through which its blocks pass. Set one, such as 1GiB."
        )


def open_tiers(
    settings: WorkerSettings, cache: KVCache, beside: int, model: Path, head: Path | None, compatibility: str
) -> list[EngineTier]:
    """
    Open the tiers behind `cache`, the fastest first.

    `beside`: bytes of the cache of a draft model. `model`, `head`: the weights, and those of a draft head.
    `compatibility`: the digest of `Compatibility`. Raises SetupError.
    """
    if not settings.kv_memory_tier:
        return []
    free = free_bytes(torch.device("cpu"))
    if free is not None and cache.kv.device.type == "cpu":
        # Caches get their memory at the first use of each block: all of it still counts as free.
        free = max(0, free - cache.kv.nbytes - beside)
    store = MemoryStore(settings.kv_memory_tier, cache.block_bytes, free)
    log.info("%d KV blocks fit into the memory tier of %s", store.slots, show_size(settings.kv_memory_tier))
    memory = Tier(store, cache)
    tiers: list[EngineTier] = [memory]
    if not settings.kv_disk_tier and not settings.kv_shared_store:
        return tiers
    try:
        weights = read_weights(settings, model, head)
        namespace = weights.namespace(compatibility)
        if settings.kv_disk_tier:
            tiers.append(_open_disk(settings, cache, weights, namespace, memory))
        if settings.kv_shared_store:
            tiers.append(_open_shared(settings, cache, namespace, memory))
    except BaseException:
        close_tiers(tiers)
        raise
    return tiers


def read_weights(settings: WorkerSettings, model: Path, head: Path | None) -> Weights:
    """Read all weights, unless the folder of the disk tier, or else Baton's cache, has their digest."""
    if settings.kv_disk_tier:
        folder = Path(settings.kv_disk_tier).expanduser()
    else:
        name = hashlib.sha256(bytes(model.resolve())).hexdigest()[:16]
        folder = machine.cache_folder(os.environ) / "digests" / name
    try:
        weights = Weights.of(model, folder, head=head)
    except OSError as error:
        raise SetupError(f"Cannot read {model}: {error}.") from error
    if not settings.kv_disk_tier:  # which is opened later
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        weights.keep(folder)
    return weights


def _open_disk(
    settings: WorkerSettings, cache: KVCache, weights: Weights, namespace: bytes, above: Tier
) -> Tier:
    """Open the tier on a disk, without slots if the disk cannot be used. Raises SetupError."""
    folder, size = Path(settings.kv_disk_tier).expanduser(), settings.kv_disk_tier_size
    store = DiskStore(folder, size, cache.block_bytes, namespace)
    tier = Tier(store, cache, above=above)
    if store.slots:
        weights.keep(folder)
        counts = store.slots, show_size(size), folder, len(store.found)
        log.info("%d KV blocks fit into the disk tier of %s in %s, which has %d of this model", *counts)
    else:
        tier.totals.errors += 1
    return tier


def _open_shared(settings: WorkerSettings, cache: KVCache, namespace: bytes, memory: Tier) -> SharedTier:
    """Open the shared store, which need not be reachable. Raises SetupError."""
    url, size = settings.kv_shared_store, settings.kv_shared_store_size
    objects = BlockObjects(objects_of(url), namespace, cache.block_bytes, url=url)
    log.info("KV blocks are shared in %s, of %s at most, as %s", url, show_size(size), namespace.hex())
    return SharedTier(objects, cache, memory, size, settings.kv_shared_store_expiry_s)


def close_tiers(tiers: Sequence[EngineTier]) -> None:
    """Bring what only the memory has to the tiers behind it, within a short time."""
    if len(tiers) > 1:
        until = time.monotonic() + FLUSH_S
        try:
            for tier in tiers:
                tier.flush(until)
        except Exception:  # a broken device must not keep the process from its end
            log.exception("Cannot write the KV blocks of the memory to the tiers behind it.")
    for tier in reversed(tiers):
        tier.close()
