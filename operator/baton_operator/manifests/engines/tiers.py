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


def is_shared(tier: KvCacheTier) -> bool:
    """Return whether all pods of the service have the same disk."""
    return not _SHARED.isdisjoint(tier.volume or {})


def is_of_one_pod(tier: KvCacheTier) -> bool:
    """Return whether no two pods have the same disk."""
    return _OWN.issuperset(tier.volume or {})


def volumes(engine: Engine) -> list[Manifest]:
    """Return the volume of the disk. By default each pod has a claim of its own, which ends with the pod."""
    tier = disk(engine)
    if tier is None:
        return []
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": tier.size}}}
    return [{"name": VOLUME, **(tier.volume or {"ephemeral": {"volumeClaimTemplate": {"spec": claim}}})}]


def mounts(engine: Engine) -> list[Manifest]:
    return [{"name": VOLUME, "mountPath": FOLDER}] if disk(engine) else []
