"""
One service's objects in a cluster that does what Kubernetes does, one thing at a time, kindly or not.

Pods come, get ready and end; a Job fetches files onto a volume, and workers that find none there crash. With
`troubles` a seeded part of what happens is unkind: workers crash and are evicted, fetches fail and their Jobs
vanish, a quota refuses pods. What a real API server would refuse of the operator's writes fails the test.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from baton_api import labels
from baton_operator import names
from baton_operator.cluster.state import ClusterState, Pod
from baton_operator.manifests.objects import Key, Manifest, key, timestamp
from baton_operator.reconcilers.plan import OperatorDefaults, ServicePlan, plan_service
from baton_operator.reconcilers.report import service_status

IMAGES = OperatorDefaults("registry.example/worker:1", "registry.example/router:1")
MOST_RESTARTS = 5
"""Restarts after which a pod that crashes waits so long for the next one that nothing happens any more."""

DONE = {"type": "Complete", "status": "True"}
GAVE_UP = {
    "type": "Failed",
    "status": "True",
    "reason": "BackoffLimitExceeded",
    "message": "Job has reached the specified backoff limit",
}
REFUSED = {
    "type": "ReplicaFailure",
    "status": "True",
    "reason": "FailedCreate",
    "message": "pods is forbidden: exceeded quota: gpus",
}

Move = Callable[[], None]


class FakeCluster:
    """One InferenceService and what is made for it."""

    def __init__(self, spec: dict[str, Any], name: str = "chat", seed: int = 0, troubles: int = 0) -> None:
        metadata = {"name": name, "namespace": "models", "uid": "uid-1", "generation": 1}
        self.service: Manifest = {"metadata": metadata, "spec": spec, "status": {}}
        self.objects: dict[Key, Manifest] = {}
        self.pods: list[Pod] = []
        self.apis: frozenset[str] = frozenset()
        self.now = 1_000_000.0
        self.writes = 0
        self.troubles = troubles
        """Unkind things that are still to happen."""
        self.broken: set[str] = set()
        """Generations whose pods crash."""
        self.files: set[tuple[str, str]] = set()
        """What was fetched: the UID of a claim, and the folder in it."""
        self.newest = "0123abcd"
        """The hub's newest commit."""
        self.fetch_s = 0.0
        """Seconds that a fetch takes."""
        self.fetches_fail = False
        self.ticket_secret = False
        """Whether the Secret for tickets was created."""
        self.quota = False
        """Whether a quota refuses new workers."""
        self.images = IMAGES
        self._rng = random.Random(seed)
        self._numbers = itertools.count()

    def change(self, spec: dict[str, Any]) -> None:
        self.service["spec"] = spec
        self.service["metadata"]["generation"] += 1

    def observe(self) -> ClusterState:
        """With everything in another order each time."""
        items, pods = list(self.objects.items()), list(self.pods)
        self._rng.shuffle(items)
        self._rng.shuffle(pods)
        return ClusterState(self.service, dict(items), pods, self.apis)

    def plan(self) -> ServicePlan:
        return plan_service(self.observe(), self.images, self.now)

    def reconcile(self) -> ServicePlan:
        """Plan, carry it out, write status if it differs."""
        observed = self.observe()
        made = plan_service(observed, self.images, self.now)
        self.ticket_secret |= made.ticket_secret
        for manifest in made.create:
            assert key(manifest) not in self.objects
            self._write(manifest)
        for manifest in made.apply:
            self._write(manifest)
        for gone in made.prune:
            del self.objects[gone]
            self.writes += 1
        assert made.state is not None
        status, _ = service_status(observed, made.state, self.now)
        if status != self.service["status"]:
            self.service["status"] = status
            self.writes += 1
        return made

    def happen(self) -> bool:
        """One thing that Kubernetes does by itself, or a trouble; False if there is nothing to do."""
        self.now += 1
        moves = [*self._of_deployments(), *self._of_pods(), *self._of_jobs()]
        if self.troubles and (not moves or self._rng.random() < 0.3):
            self.troubles -= 1
            moves = self._unkind()
        if moves:
            self._rng.choice(moves)()
        return bool(moves) or self.troubles > 0

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

    def message(self, type: str) -> str:
        there = next(one for one in self.service["status"]["conditions"] if one["type"] == type)
        return str(there["message"])

    def revision(self, name: str) -> dict[str, Any]:
        """What status says of a generation."""
        found: dict[str, Any] = next(
            one for one in self.service["status"]["revisions"] if one["name"] == name
        )
        return found

    def names(self, kind: str) -> list[str]:
        return sorted(name for _, there, name in self.objects if there == kind)

    def later(self, seconds: float) -> None:
        self.now += seconds
        assert timestamp(self.now)

    def delete_jobs(self) -> None:
        """As their time to live does, or somebody who wants another try: with their pods."""
        self.pods = [pod for pod in self.pods if not pod.job]
        for gone in [one for one in self.objects if one[1] == "Job"]:
            del self.objects[gone]

    def alive(self, revision: str = "") -> list[Pod]:
        """Workers that are there and stay, of one generation or of all."""
        there = [pod for pod in self.pods if pod.revision and not pod.terminating and not pod.finished]
        return [pod for pod in there if revision in ("", pod.revision)]

    def wanted_files(self, deployment: Manifest) -> set[tuple[str, str]]:
        """What workers of it have to find on the operator's volumes; a claim of the user's has its files."""
        pod = deployment["spec"]["template"]["spec"]
        model = pod["containers"][0]["args"][1]
        return {(uid, model) for claim in _claims(pod) if (uid := self._uid(claim))}

    def _write(self, manifest: Manifest) -> None:
        """What the API server makes of an applied object: it refuses what cannot change, and keeps status."""
        self.writes += 1
        before = self.objects.get(key(manifest))
        metadata = {"uid": f"uid-{next(self._numbers)}", "creationTimestamp": timestamp(self.now)}
        made = {**manifest, "metadata": {**metadata, **manifest["metadata"]}}
        if made["kind"] == "PersistentVolumeClaim":
            made |= {"status": {"phase": "Bound"}}
        if before is not None:
            if manifest["kind"] == "PersistentVolumeClaim":
                made["spec"] = {**before["spec"], **manifest["spec"]}
            if before.get("immutable"):
                assert manifest["data"] == before["data"], "an immutable ConfigMap"
            if self._is_of_workers(manifest):
                assert manifest["spec"]["template"] == before["spec"]["template"], "a restart in place"
                assert manifest["spec"]["selector"] == before["spec"]["selector"], "an immutable selector"
            kept = {name: before["metadata"][name] for name in metadata if name in before["metadata"]}
            made["metadata"] |= kept
            made |= {"status": before["status"]} if "status" in before else {}
        self.objects[key(manifest)] = made

    def _of_deployments(self) -> list[Move]:
        moves: list[Move] = []
        for deployment in self._deployments():
            meta = deployment["metadata"]["labels"]
            role, revision = meta[labels.ROLE], meta.get(labels.REVISION, "")
            staying = [
                pod
                for pod in self.pods
                if (pod.role, pod.revision, pod.terminating, pod.finished) == (role, revision, False, False)
            ]
            wanted = deployment["spec"]["replicas"]
            refused = self.quota and self._is_of_workers(deployment) and len(staying) < wanted
            if refused != bool(deployment.get("status", {}).get("conditions")):
                moves.append(partial(deployment.update, status={"conditions": [REFUSED] if refused else []}))
            if len(staying) < wanted and not refused:
                moves.append(partial(self._start, role, revision))
            for pod in sorted(staying, key=lambda pod: pod.ready)[: max(0, len(staying) - wanted)]:
                moves.append(partial(self._change, pod, terminating=True, ready=False))
        return moves

    def _of_pods(self) -> list[Move]:
        moves: list[Move] = []
        there = {one["metadata"]["labels"].get(labels.REVISION, ""): one for one in self._deployments()}
        for pod in self.pods:
            if pod.job:
                continue
            if pod.terminating or (pod.revision and pod.revision not in there):
                moves.append(partial(self.pods.remove, pod))
            elif pod.finished:
                continue
            elif pod.revision in self.broken or (
                pod.revision and not self.wanted_files(there[pod.revision]) <= self.files
            ):
                if pod.restarts < MOST_RESTARTS:
                    changes = {"restarts": pod.restarts + 1, "trouble": "CrashLoopBackOff: exit code 1"}
                    moves.append(partial(self._change, pod, **changes))
            elif not pod.ready:
                note = self._fetched(pod.revision) if pod.revision else ""
                moves.append(partial(self._change, pod, ready=True, trouble="", note=pod.note or note))
        return moves

    def _of_jobs(self) -> list[Move]:
        moves: list[Move] = []
        for (_, kind, name), job in self.objects.items():
            pods = [pod for pod in self.pods if pod.job == name]
            if kind != "Job" or job.get("status", {}).get("conditions"):
                continue
            if not pods:
                moves.append(partial(self._start, "", "", name))
                continue
            if pods[-1].created + self.fetch_s > self.now:
                moves.append(lambda: None)  # it takes its time
            elif self.fetches_fail:
                moves.append(partial(self._fail, job, pods[-1]))
            else:
                moves.append(partial(self._complete, job, pods[-1]))
        return moves

    def _unkind(self) -> list[Move]:
        """What may go wrong now."""
        moves: list[Move] = [partial(setattr, self, "quota", not self.quota)]
        for pod in self.alive():
            trouble = "Evicted: The node was low on resource: memory."
            moves.append(partial(self._change, pod, phase="Failed", ready=False, trouble=trouble))
            moves.append(partial(self.pods.remove, pod))
            if pod.ready:
                moves.append(partial(self._change, pod, ready=False))
                if pod.restarts < 1:
                    moves.append(partial(self._change, pod, ready=False, restarts=pod.restarts + 1))
        if "Job" in {kind for _, kind, _ in self.objects}:
            moves += [self.delete_jobs, partial(setattr, self, "fetches_fail", not self.fetches_fail)] * 4
        return moves

    def _fail(self, job: Manifest, pod: Pod) -> None:
        trouble = "Error: The model org/model is gated."
        self._change(pod, phase="Failed", trouble=trouble)
        job["status"] = {"conditions": [GAVE_UP]}

    def _complete(self, job: Manifest, pod: Pod) -> None:
        spec = job["spec"]["template"]["spec"]
        self.files.add((self._uid(*_claims(spec)), spec["containers"][0]["args"][2]))
        self._change(pod, phase="Succeeded", note=self.newest)
        job["status"] = {"conditions": [DONE], "completionTime": timestamp(self.now)}

    def _fetched(self, revision: str) -> str:
        """The commit that a pod's first container fetches, of a hub where newer ones may come."""
        for one in self._deployments():
            pod = one["spec"]["template"]["spec"]
            if one["metadata"]["labels"].get(labels.REVISION) == revision and "initContainers" in pod:
                (fetch,) = pod["initContainers"]
                pins = [var["valueFrom"]["configMapKeyRef"] for var in fetch["env"] if "valueFrom" in var]
                found = [self.objects.get(("v1", "ConfigMap", one["name"])) for one in pins]
                return next((one["data"]["revision"] for one in found if one), self.newest)
        return ""

    def _uid(self, claim: str) -> str:
        there = self.objects.get(("v1", "PersistentVolumeClaim", claim))
        return str(there["metadata"]["uid"]) if there else ""

    def _deployments(self) -> list[Manifest]:
        return [one for (_, kind, _), one in sorted(self.objects.items()) if kind == "Deployment"]

    @staticmethod
    def _is_of_workers(manifest: Manifest) -> bool:
        of_it = manifest["metadata"]["labels"]
        return manifest["kind"] == "Deployment" and bool(of_it[labels.ROLE] != names.ROUTER)

    def _start(self, role: str, revision: str, job: str = "") -> None:
        name = f"pod-{next(self._numbers)}"
        self.pods.append(Pod(name, role, revision, False, False, 0, "", self.now, job=job))

    def _change(self, pod: Pod, **changes: Any) -> None:
        self.pods[self.pods.index(pod)] = replace(pod, **changes)


def _claims(pod: Manifest) -> list[str]:
    volumes = [one["persistentVolumeClaim"] for one in pod["volumes"] if "persistentVolumeClaim" in one]
    return [one["claimName"] for one in volumes]
