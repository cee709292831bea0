"""
The reconciler of LoraAdapters: it keeps the adapters of one service loaded in its pods.

    reads     the adapters, the service, its pods and their templates, and what each pod lists
    decides   what each pod loads and unloads: `adapters.decision`; status: `report`
    writes    requests to pods; status, and finalizers, of the adapters

A pass does not wait for a pod that hangs; a later one sees the result. The names under which pods may
have an adapter are written before the first load, so that a new operator can unload them. Only an object
whose adapter a pod may have has a finalizer: all others can be deleted while no operator runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from baton_api import labels
from baton_operator.adapters.decision import (
    Adapter,
    AdapterPlacement,
    AdapterPlan,
    AdapterPod,
    WorkerTemplate,
    decide,
)
from baton_operator.adapters.worker_api import PodLoads
from baton_operator.cluster.api_server import ApiServer
from baton_operator.cluster.cache import ObjectCache
from baton_operator.cluster.state import Pod
from baton_operator.crd import GROUP
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.lora_adapter import (
    PODS_LIMIT,
    AdapterPodStatus,
    AdapterState,
    LoraAdapterSpec,
    LoraAdapterStatus,
)
from baton_operator.manifests import network
from baton_operator.manifests.objects import Fact, Manifest, ReportTransition, merge_patch, seconds, written
from baton_operator.manifests.workers import GROUP_KIND
from baton_operator.reconcilers.reconciler import write_status

UNLOAD_LIMIT_S = 120.0
"""Seconds after which a deleted LoraAdapter disappears even if a pod still has the adapter."""

NAMES_LIMIT = 16

_ORDER = {"Failed": 0, "Loading": 1, "Loaded": 2}

Errors = Mapping[tuple[str, str], str]
"""Last error by pod key and name of the adapter."""


@dataclass(frozen=True, slots=True)
class AdapterReport:
    """Content of the status of one adapter."""

    fact: Fact
    names: tuple[str, ...]
    """Names under which pods may still have it."""
    pods: tuple[AdapterPodStatus, ...] = ()
    ready_pods: int = 0
    loaded_pods: int = 0
    released: bool = False
    """Whether a deleted object may disappear."""


def report(
    adapter: Adapter,
    placement: AdapterPlacement,
    pods: Sequence[AdapterPod],
    errors: Errors,
    taken: frozenset[str],
    now: float,
) -> AdapterReport:
    """Return the report. `taken`: names that other adapters of the service have. `now`: Unix seconds."""
    names = remaining_names(adapter, placement, pods, taken)
    if placement.problem is not None:
        late = adapter.deleted is not None and now - adapter.deleted >= UNLOAD_LIMIT_S
        released = adapter.deleted is not None and (late or not names)
        return AdapterReport(placement.problem, names, released=released)
    states = [(pod, *_state(adapter, placement, pod, errors)) for pod in pods]
    ready = [one for one in states if one[0].ready]
    loaded = sum(state == "Loaded" for _, state, _ in ready)
    ordered = sorted(states, key=lambda one: (_ORDER[one[1]], one[0].name))
    shown = tuple(AdapterPodStatus(name=pod.name, state=state) for pod, state, _ in ordered[:PODS_LIMIT])
    return AdapterReport(_fact(placement, ready, loaded), names, shown, len(ready), loaded)


def remaining_names(
    adapter: Adapter, placement: AdapterPlacement, pods: Sequence[AdapterPod], taken: frozenset[str]
) -> tuple[str, ...]:
    """Return the names under which a pod may have the adapter, now or after the work of the plan."""
    ours = [adapter.name] if placement.paths else []
    for name in adapter.names:
        if name in taken or name in ours:
            continue
        if any(_may_have(pod, name) for pod in pods):
            ours.append(name)
    return tuple(ours[:NAMES_LIMIT])


def held(adapter: Adapter, pods: Sequence[AdapterPod]) -> bool | None:
    """Return whether a pod has the adapter under one of its names; None if that is not known yet."""
    if any(name in (pod.models or ()) for pod in pods for name in adapter.names):
        return True
    return None if any(_may_have(pod, name) for pod in pods for name in adapter.names) else False


def _may_have(pod: AdapterPod, name: str) -> bool:
    """Whether the pod may have an adapter, or get it from a load that runs. One that is not ready and cannot
    be read is about to restart.
    """
    if not pod.template.adapters:
        return False
    return pod.busy or (name in pod.models if pod.models is not None else pod.ready)


def _state(
    adapter: Adapter, placement: AdapterPlacement, pod: AdapterPod, errors: Errors
) -> tuple[AdapterState, str]:
    """Return the state of the adapter in a pod, and why it failed."""
    if fault := placement.faults.get(pod.key):
        return "Failed", fault
    if not pod.ready:
        return "Loading", ""
    if pod.models is not None and pod.models.get(adapter.name) == placement.paths.get(pod.key):
        return "Loaded", ""
    error = errors.get((pod.key, adapter.name)) or pod.error
    return ("Failed", error) if error and not pod.busy else ("Loading", "")


def _fact(
    placement: AdapterPlacement, ready: Sequence[tuple[AdapterPod, AdapterState, str]], loaded: int
) -> Fact:
    if placement.unreachable:
        return Fact("Active", False, "FilesNotReachable", placement.unreachable)
    if not ready:
        return Fact("Active", False, "NoReadyPods", "The service has no ready worker.")
    if loaded == len(ready):
        return Fact("Active", True, "LoadedOnAllPods", f"All {loaded} ready pods have the adapter.")
    failed: dict[str, list[str]] = {}
    for pod, state, why in ready:
        if state == "Failed":
            failed.setdefault(why, []).append(pod.name)
    trouble = "".join(f" {', '.join(sorted(pods))}: {why}" for why, pods in failed.items())
    roles = {pod.role for pod, _, _ in ready}
    served = {pod.role for pod, state, _ in ready if state == "Loaded"}
    if loaded:
        # A pair needs the adapter on both sides.
        lacking = "".join(f" No {role} worker has it." for role in sorted(roles - served))
        message = f"{loaded} of {len(ready)} ready pods have the adapter.{lacking}{trouble}"
        return Fact("Active", roles == served, "PartlyLoaded", message)
    if failed:
        return Fact("Active", False, "LoadFailed", trouble.strip())
    return Fact("Active", False, "Loading", f"{len(ready)} pods are loading the adapter.")


KIND = "LoraAdapter"
FINALIZER = f"{GROUP}/unload"
"""Keeps a deleted LoraAdapter until pods have unloaded it, or for `reports.UNLOAD_LIMIT_S`."""

CHECK_S = 60.0
"""Seconds between two reads of what pods have loaded, without any change."""

SETTLE_S = 3.0
"""Seconds for which a pass waits for loads. Most take less."""

RUNNING_S = 5.0
"""Seconds between two passes while a load runs."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AdapterService:
    """One service with its adapters and pods."""

    namespace: str
    name: str
    spec: InferenceServiceSpec | None
    manifests: Sequence[Manifest]
    """Its LoraAdapters."""
    pods: Sequence[AdapterPod]
    invalid: str = ""
    """What is wrong with its spec."""

    @property
    def adapters(self) -> list[Adapter]:
        return [_adapter(manifest) for manifest in self.manifests]

    @property
    def prefix(self) -> str:
        """Beginning of the keys of its pods."""
        return f"{self.namespace}/{self.name}/"

    @property
    def plan(self) -> AdapterPlan:
        return decide(self.name, self.spec, self.adapters, self.pods, self.invalid)


@dataclass(frozen=True, slots=True)
class LoraAdapterReconciler:
    """Keeps the adapters of each service loaded in its pods."""

    api: ApiServer
    cache: ObjectCache
    loads: PodLoads
    report: ReportTransition
    clock: Callable[[], float]
    """Returns Unix seconds."""

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """Bring the pods of the service `name` to the adapters that its LoraAdapters describe."""
        service = self._service(namespace, name)
        self.loads.keep([pod.key for pod in service.pods], service.prefix)
        if not service.manifests:
            return None
        service = replace(service, pods=await self.loads.read(service.pods))
        due = self.loads.due(service.pods, service.plan.work)
        await self._prepare(service, {name for work in due.values() for name, _ in work.load})
        if started := self.loads.start(service.pods, due):
            await asyncio.wait(started, timeout=SETTLE_S)
            service = self._service(namespace, name)  # the status now has the names
            service = replace(service, pods=await self.loads.read(service.pods))
        await self._conclude(service)
        if self.loads.is_running(service.pods):
            return RUNNING_S
        again_s = self.loads.next_s(service.pods)
        return CHECK_S if again_s is None else min(CHECK_S, max(again_s, 1.0))

    def _service(self, namespace: str, name: str) -> AdapterService:
        existing = self.cache.service(namespace, name)
        spec = InferenceServiceSpec.of(existing)
        adapters = [one for one in self.cache.of_service(namespace, name, KIND) if not _is_gone(one)]
        pods = self._pods(namespace, name) if spec is not None and adapters else []
        invalid = InferenceServiceSpec.problem(existing) if adapters else ""
        return AdapterService(namespace, name, spec, adapters, pods, invalid)

    def _pods(self, namespace: str, name: str) -> list[AdapterPod]:
        """Return the pods that serve the API of workers, not read yet."""
        templates = {}
        for one in self.cache.of_service(namespace, name, "Deployment", GROUP_KIND):
            of_it = one["metadata"].get("labels", {})
            if revision := of_it.get(labels.REVISION):
                policy_name = network.workers_policy(name, revision)
                policy = self.cache.get("NetworkPolicy", namespace, policy_name)
                templates[of_it.get(labels.ROLE), revision] = WorkerTemplate.of(one, policy)
        pods = []
        for pod in map(Pod.of, self.cache.of_service(namespace, name, "Pod")):
            template = templates.get((pod.role, pod.revision))
            if template is None or pod.terminating or pod.finished or pod.follower:
                continue
            key = f"{namespace}/{name}/{pod.name}/{pod.created:.0f}/{pod.restarts}"
            pods.append(AdapterPod(pod.name, pod.role, pod.ready, template, key, pod.host))
        return pods

    async def _prepare(self, service: AdapterService, loading: Collection[str]) -> None:
        """Write the finalizer and the names before the adapters with the names `loading` are loaded."""
        for manifest, adapter in zip(service.manifests, service.adapters, strict=True):
            if not service.plan.placements[adapter.object].paths or adapter.name not in loading:
                continue
            await self._hold(manifest, held=True)
            if adapter.name not in adapter.names:
                kept = [*adapter.names, adapter.name][-NAMES_LIMIT:]
                await self.api.write_status(manifest, {"names": kept})

    async def _conclude(self, service: AdapterService) -> None:
        """Write status. Deleted objects come last: another one may have taken over their name."""
        plan, errors = service.plan, self.loads.errors()
        pairs = list(zip(service.manifests, service.adapters, strict=True))
        for manifest, adapter in sorted(pairs, key=lambda pair: pair[1].deleted is not None):
            taken = frozenset(
                other.name
                for other in service.adapters
                if other is not adapter and other.object != adapter.object
                if plan.placements[other.object].paths
            )
            placement = plan.placements[adapter.object]
            reported = report(adapter, placement, service.pods, errors, taken, self.clock())
            if reported.released:
                if reported.names:
                    log.warning(
                        "LoraAdapter %s is deleted, but pods may still have %s until they restart.",
                        adapter.object,
                        ", ".join(reported.names),
                    )
                await self._hold(manifest, held=False)
            else:
                in_pods = held(adapter, service.pods)
                if adapter.deleted is None and in_pods is not None:
                    await self._hold(manifest, held=in_pods)
                await self._write_status(manifest, adapter, reported)

    async def _hold(self, manifest: Manifest, *, held: bool) -> None:
        """Set or remove the finalizer. Raises ApiException: 409 if another client changed the object."""
        metadata = manifest["metadata"]
        finalizers = metadata.get("finalizers", [])
        if held == (FINALIZER in finalizers):
            return
        others = [finalizer for finalizer in finalizers if finalizer != FINALIZER]
        # A merge patch replaces the list, so it must be for this version of the object.
        body = {
            "resourceVersion": metadata["resourceVersion"],
            "finalizers": [*others, FINALIZER] if held else others,
        }
        where = (manifest["apiVersion"], KIND, metadata["namespace"], metadata["name"])
        await self.api.merge(*where, {"metadata": body})

    async def _write_status(self, manifest: Manifest, adapter: Adapter, reported: AdapterReport) -> None:
        before = manifest.get("status", {})
        generation = int(manifest["metadata"].get("generation", 0))
        conditions, transitions = written(
            [reported.fact], before.get("conditions", ()), generation, self.clock()
        )
        status = LoraAdapterStatus(
            observed_generation=generation,
            name=adapter.name,
            names=list(reported.names),
            pods=list(reported.pods),
            ready_pods=reported.ready_pods,
            loaded_pods=reported.loaded_pods,
        ).model_dump(mode="json", by_alias=True)
        patch = merge_patch(before, {**status, "conditions": conditions})
        await write_status(self.api, manifest, patch, transitions, self.report)


def _adapter(manifest: Manifest) -> Adapter:
    metadata = manifest["metadata"]
    deleted = metadata.get("deletionTimestamp")
    return Adapter(
        object=metadata["name"],
        spec=LoraAdapterSpec.model_validate(manifest["spec"]),
        created=seconds(metadata["creationTimestamp"]),
        deleted=seconds(deleted) if deleted else None,
        names=tuple(manifest.get("status", {}).get("names", ())),
    )


def _is_gone(manifest: Manifest) -> bool:
    """Whether the object is deleted and does not wait for this operator."""
    metadata = manifest["metadata"]
    return "deletionTimestamp" in metadata and FINALIZER not in metadata.get("finalizers", ())
