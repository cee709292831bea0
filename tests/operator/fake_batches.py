"""A BatchJob in a cluster that behaves: its Job, and a router that says how far the batch is."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

from baton_api import labels
from baton_operator.manifests.objects import Manifest, written
from baton_operator.reconcilers.batch_job import BatchDecision, decide

IMAGE = "registry.example/router:1"
SERVICE: Manifest = {
    "metadata": {"name": "chat"},
    "spec": {
        "model": {"uri": "builtin://smollm2"},
        "decode": {},
        "router": {"batches": {"execution": "Jobs"}},
    },
}
BY_ROUTER = {labels.MANAGED_BY: "baton-router"}


class FakeBatch:
    """One BatchJob. Its ledger's batch has ten lines."""

    def __init__(self, spec: dict[str, Any] | None = None, by_router: bool = False, seed: int = 0) -> None:
        metadata: Manifest = {"name": "night", "namespace": "models", "uid": "uid-1", "generation": 1}
        if by_router:
            metadata["labels"] = dict(BY_ROUTER)
        given = {"serviceName": "chat", "batchId": "batch_1", **(spec or {})}
        self.stored: Manifest | None = {"metadata": metadata, "spec": given, "status": {}}
        self.job: Manifest | None = None
        self.service: Manifest | None = SERVICE
        self.now = 1_800_000_000.0
        self.writes = 0
        self.jobs_made = 0
        self.done = 0
        self.phase = "in_progress"
        self._rng = random.Random(seed)

    @property
    def batch_job(self) -> Manifest:
        assert self.stored is not None
        return self.stored

    def decide(self) -> BatchDecision:
        return decide(self.batch_job, self.job, self.service, IMAGE, self.now)

    def reconcile(self) -> BatchDecision | None:
        """Decide, carry it out, write conditions if they differ."""
        if self.stored is None:
            return None
        decision = self.decide()
        if decision.create is not None:
            assert self.job is None
            self.job = {**decision.create, "status": {}}
            self.jobs_made += 1
        if decision.patch is not None:
            assert self.job is not None
            self.job["spec"] = {**self.job["spec"], **decision.patch["spec"]}
        if decision.delete_job:
            assert self.job is not None
            self.job = None
        self.writes += sum(map(bool, (decision.create, decision.patch, decision.delete_job, decision.forget)))
        if decision.forget:
            self.stored = self.job = None
            return decision
        status = self.stored["status"]
        conditions, _ = written(decision.facts, status.get("conditions", ()), 1, self.now)
        if conditions != status.get("conditions"):
            status["conditions"] = conditions
            self.writes += 1
        return decision

    def condition(self, type: str) -> tuple[str, str]:
        """Status and reason."""
        match = next(one for one in self.batch_job["status"]["conditions"] if one["type"] == type)
        return match["status"], match["reason"]

    def says(self, phase: str) -> None:
        """Write the batch's phase to status, as a router does."""
        self.phase = phase
        self.batch_job["status"] |= {"phase": phase, "batchId": "batch_1"}

    def starts(self) -> None:
        assert self.job is not None
        self.job["status"] = {"active": 1}

    def ends(self, type: str = "Complete", reason: str = "") -> None:
        """The Job does."""
        assert self.job is not None
        self.job["status"] = {"conditions": [{"type": type, "status": "True", "reason": reason}]}

    def suspend(self, so: bool) -> None:
        self.batch_job["spec"]["suspend"] = so

    def happen(self) -> None:
        """Apply one random change that comes from outside the operator."""
        self.now += self._rng.choice((1, 10, 1000))
        if self.stored is None:
            return
        moves: list[Callable[[], None]] = [lambda: None]
        ended = self.phase in ("completed", "expired", "cancelled", "failed")
        if not ended:
            moves += [partial(self.says, "cancelled"), partial(self.says, "expired")]
            moves += [partial(self.suspend, so) for so in (True, False)]
            moves += [partial(setattr, self, "service", one) for one in (None, SERVICE)]
        if self.job is not None:
            finished = bool(self.job["status"].get("conditions"))
            if finished:
                moves.append(partial(setattr, self, "job", None))  # its time to live is over
                if not ended and self.job["status"]["conditions"][0]["type"] == "Complete":
                    moves = [partial(self.says, "completed")]
            elif self.job["status"].get("active"):
                moves += [self.ends, partial(self.ends, "Failed", "FailedIndexes")]
            elif not self.job["spec"]["suspend"]:
                moves += [self.starts] * 3
        self._rng.choice(moves)()
