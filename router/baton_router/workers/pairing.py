"""
Why workers form no pairs: what a person has to change, with both workers named.

The router pairs only workers of one `Worker.group`. A worker without a counterpart serves on, so its requests
show no error. `PairingReview` finds such workers, keeps the reason at the worker, and logs each change.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from baton_api.workers import Load, Role
from baton_router.engines.checks import layout_differences
from baton_router.engines.registry import ENGINES
from baton_router.workers.worker import Worker
from baton_router.workers.worker_list import Workers

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PairSide:
    """One of two workers that could be a pair."""

    name: str
    load: Load
    revision: str = ""


def why_not_paired(prefill: PairSide, decode: PairSide) -> str:
    """Return why these workers form no pair, as a clause that names both; empty if they form one."""
    if prefill.revision != decode.revision:
        return _compared("revision", prefill.revision or "none", decode.revision or "none", prefill, decode)
    engine, other = ENGINES[prefill.load.engine], ENGINES[decode.load.engine]
    if engine is not other:
        return _compared("engine", engine.title, other.title, prefill, decode)
    if not engine.pairs:
        return f"neither {prefill.name} nor {decode.name} has an engine whose workers form pairs"
    missing = engine.no_connector
    if missing and not prefill.load.compatibility:
        return f"the prefill worker {prefill.name} {missing}, as for the decode worker {decode.name}"
    if missing and not decode.load.compatibility:
        return f"the decode worker {decode.name} {missing}, as for the prefill worker {prefill.name}"
    differences = layout_differences(prefill.load.compatibility, decode.load.compatibility)
    return "; ".join(_compared(*difference, prefill, decode) for difference in differences)


def unknown_version(load: Load) -> str:
    """Return a warning about a version that is not known to work, as a clause; empty if it is."""
    engine = ENGINES[load.engine]
    if not engine.tried or not load.version or f"{load.version}.".startswith(f"{engine.tried}."):
        return ""
    return (
        f"{engine.title} {load.version} was not tried with this router (tried: {engine.tried}); it serves, "
        "but its protocol may differ"
    )


class PairingReview:
    """The reasons why workers form no pairs. Belongs to one thread."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._seen: tuple[object, ...] = ()

    def review(self) -> None:
        """Set `warnings` of all listed workers, if a worker has changed, and log new ones."""
        seen = tuple(
            (worker, worker.group, worker.health.down, _reported(worker)) for worker in self._workers.listed
        )
        if seen == self._seen:
            return
        self._seen = seen
        for worker in self._workers.listed:
            self._set(worker, tuple(filter(None, (self._version(worker), self._unpaired(worker)))))

    @staticmethod
    def _version(worker: Worker) -> str:
        return unknown_version(worker.health.load) if worker.health.load is not None else ""

    def _unpaired(self, worker: Worker) -> str:
        """Why a worker has no counterpart; empty if it has one, or one has not answered yet."""
        prefills = worker.listed is Role.PREFILL
        own = _side(worker)
        if own is None or (prefills and not own.load.control):
            return ""  # the reason why it is not ready says it
        listed = self._workers.decode if prefills else self._workers.prefill
        counterparts = [one for one in listed if one.revision == worker.revision]
        if any(not _reported(counterpart) and not counterpart.health.down for counterpart in counterparts):
            return ""
        reasons = []
        for other in filter(None, map(_side, counterparts)):
            if not prefills and not other.load.control:
                continue
            reason = why_not_paired(own, other) if prefills else why_not_paired(other, own)
            if not reason:
                return ""
            reasons.append(reason)
        # The one with the fewest differences is the likeliest counterpart.
        return f"it is part of no pair: {min(reasons, key=lambda one: one.count(';'))}" if reasons else ""

    @staticmethod
    def _set(worker: Worker, warnings: tuple[str, ...]) -> None:
        before, worker.warnings = worker.warnings, warnings
        for warning in warnings:
            if warning not in before:
                log.warning("The %s worker %s: %s.", worker.listed, worker.title, warning)
        if before and not warnings:
            log.info("The %s worker %s: its warnings no longer apply.", worker.listed, worker.title)


def _reported(worker: Worker) -> bool:
    """Whether the worker has reported what pairs depend on. Other engines do so once they are ready."""
    load = worker.health.load
    return load is not None and (not ENGINES[load.engine].tried or bool(load.version))


def _side(worker: Worker) -> PairSide | None:
    load = worker.health.load
    return PairSide(worker.name, load, worker.revision) if load is not None and _reported(worker) else None


def _compared(name: str, ours: str, theirs: str, prefill: PairSide, decode: PairSide) -> str:
    return (
        f"{name} {ours} at the prefill worker {prefill.name}, but {theirs} at the decode worker {decode.name}"
    )
