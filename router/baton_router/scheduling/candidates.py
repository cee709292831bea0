"""
Workers that can be chosen now, computed once until the state of a worker changes.

The cache is valid while every worker's health is the same value as before. Ejected workers are the exception,
because an ejection ends with time.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from baton_api.errors import NotReady
from baton_api.workers import EngineKind
from baton_router.requests.picker import DirectRoute
from baton_router.scheduling.pair_selection import LOCAL_PREFILL, PairOption, WorkerGroup
from baton_router.workers.costs import BytesPerToken, TransferCost
from baton_router.workers.worker import Worker, WorkerHealth, WorkerStatus
from baton_router.workers.worker_list import Workers, usable
from baton_router.workers.worker_state import WorkerState, WorkerStates

EJECTED_CACHE_S = 0.05
"""Seconds for which ejected and full workers are assumed to stay so."""


@dataclass(frozen=True, slots=True)
class WorkerPair:
    """The generating worker, and the one that computes the prompt; without `prefill`, `decode` does both."""

    decode: Worker
    prefill: Worker | None


class Candidates:
    """The workers that can serve one model, numbered for `pair_selection`."""

    __slots__ = (
        "_pairs",
        "by_revision",
        "bytes_per_token",
        "decode_states",
        "decodes",
        "groups",
        "pair_only",
        "prefill_states",
        "prefills",
        "reads_peers",
        "transfers",
    )

    def __init__(
        self, decodes: Sequence[Worker], prefills: Sequence[Worker], worker_states: WorkerStates
    ) -> None:
        self.decodes, self.prefills = decodes, prefills
        self.decode_states: list[WorkerState] = [worker_states.of(worker) for worker in decodes]
        self.prefill_states: list[WorkerState] = [worker_states.of(worker) for worker in prefills]
        self.transfers: list[list[TransferCost]] = [
            [worker_states.transfer(source.name, target.name) for target in decodes] for source in prefills
        ]
        self.groups: list[WorkerGroup] = [
            WorkerGroup(_workers_of(decodes, name), _workers_of(prefills, name))
            for name in {worker.group for worker in decodes}
        ]
        self.pair_only = frozenset(
            number for number, worker in enumerate(decodes) if not worker.computes_prompts
        )
        """Decode workers that compute no prompts."""
        self.reads_peers = any(state.peers for state in self.prefill_states)
        """Whether a prefill worker reads from the caches of other workers."""
        self.bytes_per_token: BytesPerToken = worker_states.bytes_per_token(decodes[0].model)
        self._pairs: dict[tuple[int, int], WorkerPair] = {}
        self.by_revision: dict[str, Candidates] = {}
        """The candidates of each revision, if there are several."""
        revisions = {worker.revision for worker in decodes}
        if len(revisions) > 1:
            for revision in sorted(revisions):
                of_revision = [worker for worker in decodes if worker.revision == revision]
                prefills_of_revision = [worker for worker in prefills if worker.revision == revision]
                self.by_revision[revision] = Candidates(of_revision, prefills_of_revision, worker_states)

    def holder(self, matched: Mapping[int, int]) -> str:
        """The revision with the longest cached prefix of a prompt; any of equal ones; empty without one."""
        most, holder = 0, ""
        for revision, of_revision in self.by_revision.items():
            for state in (*of_revision.decode_states, *of_revision.prefill_states):
                if (count := matched.get(state.slot, 0)) > most:
                    most, holder = count, revision
        return holder

    def pair(self, option: PairOption) -> WorkerPair:
        key = option.decode, option.prefill
        pair = self._pairs.get(key)
        if pair is None:
            prefill = None if option.prefill == LOCAL_PREFILL else self.prefills[option.prefill]
            pair = self._pairs[key] = WorkerPair(self.decodes[option.decode], prefill)
        return pair


class CandidateCache:
    """Finds the candidates for a request."""

    def __init__(self, workers: Workers, worker_states: WorkerStates) -> None:
        self._workers = workers
        self._worker_states = worker_states
        self._healths: list[WorkerHealth] = []
        self._expires = 0.0
        self._cached: dict[tuple[str | None, DirectRoute | None], Candidates] = {}
        """By the model and the route, as long as `_healths` are those of the workers."""

    def candidates(
        self, model: str | None, excluded: Collection[str], now: float, direct: DirectRoute | None = None
    ) -> Candidates | None:
        """None if `excluded` and `direct` leave no worker. Raises the errors of `Workers.serving`."""
        if excluded:
            return self._compute(model, excluded, now, direct)
        decode, prefill = self._workers.decode, self._workers.prefill
        healths: list[WorkerHealth] = [worker.health for worker in decode]
        healths += [worker.health for worker in prefill]
        if healths != self._healths or now >= self._expires:
            self._cached.clear()
            self._healths = healths
            ejected = any(
                worker.state(now) in (WorkerStatus.EJECTED, WorkerStatus.FULL) for worker in decode + prefill
            )
            self._expires = now + EJECTED_CACHE_S if ejected else math.inf
        candidates = self._cached.get((model, direct))
        if candidates is None:
            candidates = self._compute(model, (), now, direct)
            if candidates is not None:
                self._cached[model, direct] = candidates
        return candidates

    def _compute(
        self, model: str | None, excluded: Collection[str], now: float, direct: DirectRoute | None
    ) -> Candidates | None:
        decodes = self._workers.serving(model, excluded, now)
        if direct is not None:
            decodes = [worker for worker in decodes if direct.reaches(worker.name)]
        if not decodes:
            return None
        prefills = [one for one in usable(self._workers.prefill, now) if one.name not in excluded]
        if any(worker.is_adapter(model) for worker in decodes):
            prefills = [worker for worker in prefills if worker.is_adapter(model)]
        if direct is not None:
            # Only Baton's decode worker fetches a prompt by itself, from the control address in a header.
            prefills = [
                worker for worker in prefills if worker.control and worker.engine_kind is EngineKind.BATON
            ]
        groups = {worker.group for worker in prefills}
        able = [worker for worker in decodes if worker.computes_prompts or worker.group in groups]
        if not able:
            reason = "no prefill worker of its kind is ready"
            if direct is not None:
                reason = "only the router drives pairs of its engine: let the gateway route to the router"
            raise NotReady(
                f"{decodes[0].name} computes no prompts, and {reason}.",
                public="No worker that serves this model is ready.",
            )
        return Candidates(able, prefills, self._worker_states)


def _workers_of(workers: Sequence[Worker], group: str) -> list[int]:
    return [number for number, worker in enumerate(workers) if worker.group == group]
