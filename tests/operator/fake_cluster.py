"""A cluster that behaves: objects as they were applied, pods that come, get ready and end, one at a time."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from baton_api import labels
from baton_operator.manifests.objects import Manifest
from baton_operator.observed import Key, Observed, Pod, key, timestamp
from baton_operator.plan import Images, Plan, plan
from baton_operator.report import report

IMAGES = Images("registry.example/worker:1", "registry.example/router:1")


class FakeCluster:
    """One InferenceService and what is made for it."""

    def __init__(self, spec: dict[str, Any], name: str = "chat", seed: int = 0) -> None:
        metadata = {"name": name, "namespace": "models", "uid": "uid-1", "generation": 1}
        self.service: Manifest = {"metadata": metadata, "spec": spec, "status": {}}
        self.objects: dict[Key, Manifest] = {}
        self.pods: list[Pod] = []
        self.apis: frozenset[str] = frozenset()
        self.now = 1_000_000.0
        self.writes = 0
        self.broken: set[str] = set()
        """Generations whose pods crash."""
        self._rng = random.Random(seed)
        self._numbers = itertools.count()

    def change(self, spec: dict[str, Any]) -> None:
        self.service["spec"] = spec
        self.service["metadata"]["generation"] += 1

    def observe(self) -> Observed:
        """With everything in another order each time."""
        items, pods = list(self.objects.items()), list(self.pods)
        self._rng.shuffle(items)
        self._rng.shuffle(pods)
        return Observed(self.service, dict(items), pods, self.apis)

    def plan(self) -> Plan:
        return plan(self.observe(), IMAGES, self.now)

    def reconcile(self) -> Plan:
        """Plan, carry it out, write status if it differs."""
        made = self.plan()
        for manifest in (*made.apply, *made.create):
            self.objects[key(manifest)] = manifest
            self.writes += 1
        for gone in made.prune:
            del self.objects[gone]
            self.writes += 1
        assert made.state is not None
        status, _ = report(self.observe(), made.state, self.now)
        if status != self.service["status"]:
            self.service["status"] = status
            self.writes += 1
        return made

    def happen(self) -> bool:
        """One thing that Kubernetes does by itself; False if there is nothing to do."""
        self.now += 1
        moves: list[Callable[[], None]] = []
        for deployment in self._deployments():
            meta = deployment["metadata"]["labels"]
            role, revision = meta[labels.ROLE], meta.get(labels.REVISION, "")
            staying = [
                pod
                for pod in self.pods
                if (pod.role, pod.revision, pod.terminating) == (role, revision, False)
            ]
            wanted = deployment["spec"]["replicas"]
            if len(staying) < wanted:
                moves.append(partial(self._start, role, revision))
            for pod in sorted(staying, key=lambda pod: pod.ready)[: max(0, len(staying) - wanted)]:
                moves.append(partial(self._change, pod, terminating=True, ready=False))
            for pod in staying:
                if pod.revision in self.broken and pod.restarts < 5:
                    moves.append(partial(self._change, pod, restarts=pod.restarts + 1))
                elif not pod.ready and pod.revision not in self.broken:
                    moves.append(partial(self._change, pod, ready=True))
        there = {one["metadata"]["labels"].get(labels.REVISION, "") for one in self._deployments()}
        for pod in self.pods:
            if pod.terminating or (pod.revision and pod.revision not in there):
                moves.append(partial(self.pods.remove, pod))
        for (_, kind, _), job in self.objects.items():
            if kind == "Job" and not job.get("status"):
                done = {"conditions": [{"type": "Complete", "status": "True"}]}
                moves.append(partial(job.update, status=done))
        if moves:
            self._rng.choice(moves)()
        return bool(moves)

    def settle(self, limit: int = 1000) -> None:
        """Until nothing changes any more."""
        for _ in range(limit):
            before = self.writes
            self.reconcile()
            if not self.happen() and self.writes == before:
                return
        raise AssertionError(f"not settled after {limit} turns")

    def condition(self, type: str) -> tuple[str, str]:
        """Status and reason."""
        there = next(one for one in self.service["status"]["conditions"] if one["type"] == type)
        return there["status"], there["reason"]

    def names(self, kind: str) -> list[str]:
        return sorted(name for _, there, name in self.objects if there == kind)

    def later(self, seconds: float) -> None:
        self.now += seconds
        assert timestamp(self.now)

    def _deployments(self) -> list[Manifest]:
        return [one for (_, kind, _), one in sorted(self.objects.items()) if kind == "Deployment"]

    def _start(self, role: str, revision: str) -> None:
        self.pods.append(Pod(f"pod-{next(self._numbers)}", role, revision, False, False, 0, ""))

    def _change(self, pod: Pod, **changes: Any) -> None:
        self.pods[self.pods.index(pod)] = replace(pod, **changes)
