"""
One service's objects in a cluster that does what Kubernetes does, one thing at a time, kindly or not.

Pods come, get ready and end, those of a worker with several nodes together. A Job fetches files onto a
volume, and workers that miss them crash. With `troubles` a seeded part of the events is unkind: workers crash
and are evicted, fetches fail and their Jobs vanish, a quota rejects pods. A write of the operator that a real
API server would reject fails the test.
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
from baton_operator.manifests.model_files import FOLDER
from baton_operator.manifests.objects import Key, Manifest, key, timestamp
from baton_operator.manifests.workers import GROUP_KIND
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
        """Revisions whose pods crash."""
        self.files: set[tuple[str, str]] = set()
        """Fetched files: the UID of a claim, and the folder in it."""
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
        state = self.observe()
        plan = plan_service(state, self.images, self.now)
        self.ticket_secret |= plan.ticket_secret
        for manifest in plan.create:
            assert key(manifest) not in self.objects
            self._write(manifest)
        for manifest in plan.apply:
            self._write(manifest)
        for gone in plan.prune:
            del self.objects[gone]
            self.writes += 1
        assert plan.state is not None
        status, _ = service_status(state, plan.state, self.now)
        if status != self.service["status"]:
            self.service["status"] = status
            self.writes += 1
        return plan

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
        match = next(one for one in self.service["status"]["conditions"] if one["type"] == type)
        return match["status"], match["reason"]

    def message(self, type: str) -> str:
        match = next(one for one in self.service["status"]["conditions"] if one["type"] == type)
        return str(match["message"])

    def revision(self, name: str) -> dict[str, Any]:
        """Return a revision's entry in status."""
        entry: dict[str, Any] = next(
            one for one in self.service["status"]["revisions"] if one["name"] == name
        )
        return entry

    def names(self, kind: str) -> list[str]:
        return sorted(name for _, listed_kind, name in self.objects if listed_kind == kind)

    def later(self, seconds: float) -> None:
        self.now += seconds
        assert timestamp(self.now)

    def delete_jobs(self) -> None:
        """Delete the Jobs with their pods, as their time to live or a user who wants a retry does."""
        self.pods = [pod for pod in self.pods if not pod.job]
        for gone in [one for one in self.objects if one[1] == "Job"]:
            del self.objects[gone]

    def alive(self, revision: str = "") -> list[Pod]:
        """Return workers that exist and stay, of one revision or of all."""
        staying = [pod for pod in self.pods if pod.revision and not pod.terminating and not pod.finished]
        return [pod for pod in staying if revision in ("", pod.revision)]

    def wanted_files(self, deployment: Manifest) -> set[tuple[str, str]]:
        """Return the files that its workers need on the operator's volumes. A user's claim has its files."""
        pod = pod_of(deployment)
        return {(uid, _model(pod)) for claim in _claims(pod) if (uid := self._uid(claim))}

    def _write(self, manifest: Manifest) -> None:
        """Store an applied object as the API server does: reject immutable changes, and keep status."""
        self.writes += 1
        before = self.objects.get(key(manifest))
        metadata = {"uid": f"uid-{next(self._numbers)}", "creationTimestamp": timestamp(self.now)}
        stored = {**manifest, "metadata": {**metadata, **manifest["metadata"]}}
        if stored["kind"] == "PersistentVolumeClaim":
            stored |= {"status": {"phase": "Bound"}}
        if before is not None:
            if manifest["kind"] == "PersistentVolumeClaim":
                stored["spec"] = {**before["spec"], **manifest["spec"]}
            if before.get("immutable"):
                assert manifest["data"] == before["data"], "an immutable ConfigMap"
            if self._is_of_workers(manifest):
                for field in ("template", "selector", "leaderWorkerTemplate"):
                    assert manifest["spec"].get(field) == before["spec"].get(field), "a restart in place"
            kept = {name: before["metadata"][name] for name in metadata if name in before["metadata"]}
            stored["metadata"] |= kept
            stored |= {"status": before["status"]} if "status" in before else {}
        self.objects[key(manifest)] = stored

    def _of_deployments(self) -> list[Move]:
        moves: list[Move] = self._of_groups()
        for deployment in self._deployments():
            meta = deployment["metadata"]["labels"]
            role, revision = meta[labels.ROLE], meta.get(labels.REVISION, "")
            staying = [
                pod
                for pod in self.pods
                if (pod.role, pod.revision, pod.terminating, pod.finished) == (role, revision, False, False)
                and not pod.follower
            ]
            wanted = deployment["spec"]["replicas"]
            refused = self.quota and self._is_of_workers(deployment) and len(staying) < wanted
            if deployment["kind"] == GROUP_KIND:
                pass  # a LeaderWorkerSet does not say so
            elif refused != bool(deployment.get("status", {}).get("conditions")):
                moves.append(partial(deployment.update, status={"conditions": [REFUSED] if refused else []}))
            if len(staying) < wanted and not refused:
                moves.append(partial(self._start, role, revision, nodes=nodes_of(deployment)))
            for pod in sorted(staying, key=lambda pod: pod.ready)[: max(0, len(staying) - wanted)]:
                moves.append(partial(self._end, pod))
        return moves

    def _of_groups(self) -> list[Move]:
        """As LeaderWorkerSet does: a group that lacks a pod comes again, and status counts groups."""
        moves: list[Move] = []
        for workload in [one for one in self._deployments() if one["kind"] == GROUP_KIND]:
            meta, ready = workload["metadata"]["labels"], 0
            of_it = [
                pod
                for pod in self.pods
                if (pod.role, pod.revision) == (meta[labels.ROLE], meta[labels.REVISION])
            ]
            for leader in [pod for pod in of_it if not pod.follower]:
                group = self._group(leader)
                whole = [pod for pod in group if not pod.terminating and not pod.finished]
                ready += len(whole) == nodes_of(workload) and all(pod.ready for pod in whole)
                if len(whole) != nodes_of(workload) and not leader.terminating:
                    moves.append(partial(self._end, leader))
            leaders = {pod.name for pod in of_it if not pod.follower}
            orphans = [pod for pod in of_it if pod.follower and pod.name.rpartition("-")[0] not in leaders]
            moves += [partial(self.pods.remove, pod) for pod in orphans]
            if workload.get("status", {}).get("readyReplicas", 0) != ready:
                moves.append(partial(workload.update, status={"readyReplicas": ready}))
        return moves

    def _group(self, leader: Pod) -> list[Pod]:
        """The pods of one worker."""
        return [pod for pod in self.pods if pod == leader or pod.name.rpartition("-")[0] == leader.name]

    def _end(self, leader: Pod) -> None:
        for pod in self._group(leader):
            self._change(pod, terminating=True, ready=False)

    def _of_pods(self) -> list[Move]:
        moves: list[Move] = []
        by_revision = {one["metadata"]["labels"].get(labels.REVISION, ""): one for one in self._deployments()}
        for pod in self.pods:
            if pod.job:
                continue
            if pod.terminating or (pod.revision and pod.revision not in by_revision):
                moves.append(partial(self.pods.remove, pod))
            elif pod.finished:
                continue
            elif pod.revision in self.broken or (
                pod.revision and not self.wanted_files(by_revision[pod.revision]) <= self.files
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
        """Return the failures that are possible now."""
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
            pod = pod_of(one)
            if one["metadata"]["labels"].get(labels.REVISION) == revision and "initContainers" in pod:
                (fetch,) = pod["initContainers"]
                pins = [var["valueFrom"]["configMapKeyRef"] for var in fetch["env"] if "valueFrom" in var]
                config_maps = [self.objects.get(("v1", "ConfigMap", one["name"])) for one in pins]
                return next((one["data"]["revision"] for one in config_maps if one), self.newest)
        return ""

    def _uid(self, claim: str) -> str:
        existing = self.objects.get(("v1", "PersistentVolumeClaim", claim))
        return str(existing["metadata"]["uid"]) if existing else ""

    def _deployments(self) -> list[Manifest]:
        kinds = ("Deployment", GROUP_KIND)
        return [one for (_, kind, _), one in sorted(self.objects.items()) if kind in kinds]

    @staticmethod
    def _is_of_workers(manifest: Manifest) -> bool:
        of_it = manifest["metadata"]["labels"]
        kinds = ("Deployment", GROUP_KIND)
        return manifest["kind"] in kinds and bool(of_it[labels.ROLE] != names.ROUTER)

    def _start(self, role: str, revision: str, job: str = "", nodes: int = 1) -> None:
        leader = Pod(f"pod{next(self._numbers)}", role, revision, False, False, 0, "", self.now, job=job)
        others = [replace(leader, name=f"{leader.name}-{rank}", follower=True) for rank in range(1, nodes)]
        self.pods += [leader, *others]

    def _change(self, pod: Pod, **changes: Any) -> None:
        self.pods[self.pods.index(pod)] = replace(pod, **changes)


def pod_of(workload: Manifest) -> Manifest:
    """The spec of the pods of a Deployment, or of the leaders of a LeaderWorkerSet."""
    groups = workload["spec"].get("leaderWorkerTemplate", {})
    template: Manifest = groups.get("leaderTemplate") or workload["spec"]["template"]
    pod: Manifest = template["spec"]
    return pod


def nodes_of(workload: Manifest) -> int:
    """Pods of one worker."""
    return int(workload["spec"].get("leaderWorkerTemplate", {}).get("size", 1))


def _model(pod: Manifest) -> str:
    """The folder in which its worker looks for the model, whichever engine it runs."""
    container = pod["containers"][0]
    values: list[str] = [one.rpartition("=")[2] for one in container["args"]]
    values += [one.get("value", "") for one in container["env"]]
    return next(one for one in values if one.startswith(FOLDER))


def _claims(pod: Manifest) -> list[str]:
    volumes = [one["persistentVolumeClaim"] for one in pod["volumes"] if "persistentVolumeClaim" in one]
    return [one["claimName"] for one in volumes]
