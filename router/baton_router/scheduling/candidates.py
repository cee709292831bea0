"""
Who may be chosen now: worked out once, for all the requests that come while nothing changes.

Nothing changes while every worker's health is the value that it was, but for those that were put aside: that
ends by itself.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from baton_router.scheduling.fallback_policy import WorkerPair
from baton_router.scheduling.pair_selection import LOCAL_PREFILL, PairOption, WorkerGroup
from baton_router.workers.costs import RunningAverage, TransferCost
from baton_router.workers.worker import Worker, WorkerHealth, Workers, WorkerStatus, usable
from baton_router.workers.worker_state import WorkerState, WorkerStates

EJECTED_CACHE_S = 0.05
"""For so long one relies on it that a worker that was put aside still is."""


class Candidates:
    """The workers that one model's requests can go to, by the numbers that the choice knows them by."""

    __slots__ = (
        "_pairs",
        "by_revision",
        "bytes_per_token",
        "decodes",
        "groups",
        "known_decodes",
        "known_prefills",
        "prefills",
        "transfers",
    )

    def __init__(
        self, decodes: Sequence[Worker], prefills: Sequence[Worker], knowledge: WorkerStates
    ) -> None:
        self.decodes, self.prefills = decodes, prefills
        self.known_decodes: list[WorkerState] = [knowledge.of(worker) for worker in decodes]
        self.known_prefills: list[WorkerState] = [knowledge.of(worker) for worker in prefills]
        self.transfers: list[list[TransferCost]] = [
            [knowledge.transfer(source.name, target.name) for target in decodes] for source in prefills
        ]
        self.groups: list[WorkerGroup] = [
            WorkerGroup(_workers_of(decodes, name), _workers_of(prefills, name))
            for name in {worker.group for worker in decodes}
        ]
        self.bytes_per_token: RunningAverage = knowledge.bytes_per_token(decodes[0].model)
        self._pairs: dict[tuple[int, int], WorkerPair] = {}
        self.by_revision: dict[str, Candidates] = {}
        """Those of each generation, if they are of several."""
        revisions = {worker.revision for worker in decodes}
        if len(revisions) > 1:
            for revision in sorted(revisions):
                own = [worker for worker in decodes if worker.revision == revision]
                computing = [worker for worker in prefills if worker.revision == revision]
                self.by_revision[revision] = Candidates(own, computing, knowledge)

    def holder(self, matched: Mapping[int, int]) -> str:
        """The generation that holds most of a prompt; of several that do, or if none does, any."""
        most, holder = 0, ""
        for revision, own in self.by_revision.items():
            for known in (*own.known_decodes, *own.known_prefills):
                if (count := matched.get(known.slot, 0)) > most:
                    most, holder = count, revision
        return holder

    def pair(self, way: PairOption) -> WorkerPair:
        key = way.decode, way.prefill
        pair = self._pairs.get(key)
        if pair is None:
            prefill = None if way.prefill == LOCAL_PREFILL else self.prefills[way.prefill]
            pair = self._pairs[key] = WorkerPair(self.decodes[way.decode], prefill)
        return pair


class CandidateCache:
    """Finds the candidates for a request."""

    def __init__(self, workers: Workers, knowledge: WorkerStates) -> None:
        self._workers = workers
        self._knowledge = knowledge
        self._states: list[WorkerHealth] = []
        self._expires = 0.0
        self._found: dict[str | None, Candidates] = {}
        """By the model, as long as `_states` are those of the workers."""

    def candidates(self, model: str | None, tried: Collection[str], now: float) -> Candidates | None:
        """None if all were tried. Raises what `Workers.serving` raises."""
        if tried:
            return self._find(model, tried, now)
        decode, prefill = self._workers.decode, self._workers.prefill
        states: list[WorkerHealth] = [worker.health for worker in decode]
        states += [worker.health for worker in prefill]
        if states != self._states or now >= self._expires:
            self._found.clear()
            self._states = states
            aside = any(
                worker.state(now) in (WorkerStatus.EJECTED, WorkerStatus.FULL) for worker in decode + prefill
            )
            self._expires = now + EJECTED_CACHE_S if aside else math.inf
        found = self._found.get(model)
        if found is None:
            found = self._find(model, (), now)
            if found is not None:
                self._found[model] = found
        return found

    def _find(self, model: str | None, tried: Collection[str], now: float) -> Candidates | None:
        decodes = self._workers.serving(model, tried, now)
        if not decodes:
            return None
        prefills = [one for one in usable(self._workers.prefill, now) if one.name not in tried]
        return Candidates(decodes, prefills, self._knowledge)


def _workers_of(workers: Sequence[Worker], group: str) -> list[int]:
    return [number for number, worker in enumerate(workers) if worker.group == group]
