"""
The reconciler of LoraAdapters: it keeps the adapters of one service loaded in its pods.

    reads     the adapters, the service, its pods and their templates, and what each pod lists
    decides   what each pod loads and unloads: `adapters.decision`; status: `adapters.report`
    writes    requests to pods; status, and finalizers, of the adapters

A pass does not wait for a pod that hangs; a later one sees the result. The names under which pods may
have an adapter are written before the first load, so that a new operator can unload them. Only an object
whose adapter a pod may have has a finalizer: all others can be deleted while no operator runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from baton_api import labels
from baton_operator.adapters import report as reports
from baton_operator.adapters.decision import Adapter, AdapterPlan, AdapterPod, decide
from baton_operator.adapters.pod_loads import PodLoads
from baton_operator.adapters.report import AdapterReport
from baton_operator.adapters.templates import WorkerTemplate
from baton_operator.cluster.api_server import ApiServer
from baton_operator.cluster.cache import ObjectCache
from baton_operator.cluster.state import Pod
from baton_operator.crd import GROUP
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.lora_adapter import LoraAdapterSpec, LoraAdapterStatus
from baton_operator.manifests import network
from baton_operator.manifests.conditions import ReportTransition, written
from baton_operator.manifests.drift import merge_patch
from baton_operator.manifests.groups import GROUP_KIND
from baton_operator.manifests.objects import Manifest, seconds
from baton_operator.reconcilers.reconciler import write_status

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
        return [_adapter(one) for one in self.manifests]

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
                kept = [*adapter.names, adapter.name][-reports.NAMES_LIMIT :]
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
            reported = reports.report(adapter, placement, service.pods, errors, taken, self.clock())
            if reported.released:
                if reported.names:
                    log.warning(
                        "LoraAdapter %s is deleted, but pods may still have %s until they restart.",
                        adapter.object,
                        ", ".join(reported.names),
                    )
                await self._hold(manifest, held=False)
            else:
                held = reports.held(adapter, service.pods)
                if adapter.deleted is None and held is not None:
                    await self._hold(manifest, held=held)
                await self._write_status(manifest, adapter, reported)

    async def _hold(self, manifest: Manifest, *, held: bool) -> None:
        """Set or remove the finalizer. Raises ApiException: 409 if another client changed the object."""
        metadata = manifest["metadata"]
        finalizers = metadata.get("finalizers", [])
        if held == (FINALIZER in finalizers):
            return
        others = [one for one in finalizers if one != FINALIZER]
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
