"""
Tiers of the KV cache as pods have them: memory of the pod, and the volume of a disk.

How an engine uses them is in its own module.
"""

from __future__ import annotations

from baton_operator.kinds.engine import Engine, KvCacheTier
from baton_operator.kinds.part import amount
from baton_operator.manifests.objects import Manifest

FOLDER = "/kv-tier"
"""Where containers mount the volume of a disk."""


VOLUME = "kv-tier"

SHARED_FOLDER = "/kv-shared"
"""Where containers mount the volume of a shared store."""

SHARED_VOLUME = "kv-shared"


_SHARED = frozenset({"persistentVolumeClaim", "nfs"})
"""Sources whose volume is the same one in all pods."""


_OWN = frozenset({"emptyDir", "ephemeral"})
"""Sources whose volume is another one in each pod, wherever it runs: those of one node share a hostPath."""


def memory(engine: Engine) -> int:
    """Return the bytes that a worker keeps in the memory of its pod, on each of its nodes."""
    return sum(int(amount(tier.size)) for tier in engine.kv_cache_tiers if tier.type == "Memory")


def disk(engine: Engine) -> KvCacheTier | None:
    """Return the disk, if there is one."""
    return next((tier for tier in engine.kv_cache_tiers if tier.type == "Disk"), None)


def shared(engine: Engine) -> KvCacheTier | None:
    """Return the store that workers share, if there is one."""
    return next((tier for tier in engine.kv_cache_tiers if tier.type == "SharedStore"), None)


def is_shared(tier: KvCacheTier) -> bool:
    """Return whether all pods of the service have the same disk."""
    return not _SHARED.isdisjoint(tier.volume or {})


def is_of_one_pod(tier: KvCacheTier) -> bool:
    """Return whether no two pods have the same disk."""
    return _OWN.issuperset(tier.volume or {})


def is_read_only(tier: KvCacheTier) -> bool:
    """Return whether the source of the volume lets no pod write."""
    sources = (tier.volume or {}).values()
    return any(isinstance(source, dict) and source.get("readOnly") for source in sources)


def volumes(engine: Engine) -> list[Manifest]:
    """
    Return the volumes of the disk and of the shared store.

    By default each pod has a claim of its own for the disk, which ends with the pod.
    """
    found: list[Manifest] = []
    if tier := disk(engine):
        claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": tier.size}}}
        found.append(
            {"name": VOLUME, **(tier.volume or {"ephemeral": {"volumeClaimTemplate": {"spec": claim}}})}
        )
    if (store := shared(engine)) and store.volume:
        found.append({"name": SHARED_VOLUME, **store.volume})
    return found


def mounts(engine: Engine) -> list[Manifest]:
    found = [{"name": VOLUME, "mountPath": FOLDER}] if disk(engine) else []
    if (store := shared(engine)) and store.volume:
        found.append({"name": SHARED_VOLUME, "mountPath": SHARED_FOLDER})
    return found
