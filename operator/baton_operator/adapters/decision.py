"""
Adapters that each pod should load and unload: a pure decision.

A pod has loaded the adapters that its `/v1/models` lists. The status of an adapter only has the names under
which pods may have loaded it, so the operator never unloads an adapter that something else loaded. A changed
location is another path: the pod unloads the adapter and loads it again. (With vLLM's `load_inplace`, the
worker would read the files again for each batch.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from baton_operator.adapters.templates import FilesNotReachable, WorkerTemplate
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.lora_adapter import LoraAdapterSpec
from baton_operator.manifests.conditions import Fact


@dataclass(frozen=True, slots=True)
class AdapterPod:
    """A pod of a worker that serves the API, and the adapters that it lists."""

    name: str
    role: str
    ready: bool
    template: WorkerTemplate
    key: str
    """Differs for each pod of the cluster and each run of its container."""
    host: str = ""
    """Its address as in a URL, or empty."""
    models: Mapping[str, str] | None = None
    """Path of each adapter by its name, as the pod lists them. None: not read."""
    error: str = ""
    """Why they could not be read."""
    busy: bool = False
    """Whether the operator is still loading or unloading adapters of it."""

    @property
    def url(self) -> str:
        """Address of its API, without a path."""
        return f"http://{self.host}:{self.template.port}"


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoraAdapter."""

    object: str
    """Name of the object."""
    spec: LoraAdapterSpec
    created: float = 0.0
    """Unix seconds."""
    deleted: float | None = None
    """Unix seconds of the deletion, which waits for the operator; None: not deleted."""
    names: tuple[str, ...] = ()
    """Names under which pods may have loaded it."""

    @property
    def name(self) -> str:
        """Name in requests."""
        return self.spec.name or self.object


@dataclass(frozen=True, slots=True)
class PodWork:
    """Requests to one pod: first unload, then load."""

    unload: tuple[str, ...] = ()
    load: tuple[tuple[str, str], ...] = ()
    """Name and path of each adapter."""


@dataclass(frozen=True, slots=True)
class AdapterPlacement:
    """Where one adapter should be."""

    problem: Fact | None = None
    """Why no pod should have it."""
    paths: Mapping[str, str] = field(default_factory=dict)
    """Its path by pod key."""
    faults: Mapping[str, str] = field(default_factory=dict)
    """Why a ready pod cannot load it, by pod key."""
    unreachable: str = ""
    """Why no pod can read its files; empty if one can."""


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """Decision for all adapters of one service."""

    placements: Mapping[str, AdapterPlacement]
    """By name of the object."""
    work: Mapping[str, PodWork]
    """By pod key; only pods with something to do."""


def decide(
    service: str,
    spec: InferenceServiceSpec | None,
    adapters: Sequence[Adapter],
    pods: Sequence[AdapterPod],
    invalid: str = "",
) -> AdapterPlan:
    """
    Return what to load and unload.

    `service`: its name. `spec`: None if it does not exist, or is invalid: `invalid` says why. `adapters`:
    all LoraAdapters that name it.
    """
    holders = _holders(adapters)
    owned = {name for one in adapters for name in one.names}
    placements = {}
    for one in adapters:
        problem = _problem(service, spec, invalid, one, holders, pods)
        placements[one.object] = AdapterPlacement(problem) if problem else _placed(one, pods, owned)
    work = {}
    for pod in pods:
        desired = {
            one.name: placements[one.object].paths[pod.key]
            for one in adapters
            if pod.key in placements[one.object].paths
        }
        if todo := _work(pod, desired, owned):
            work[pod.key] = todo
    return AdapterPlan(placements, work)


def _holders(adapters: Iterable[Adapter]) -> dict[str, Adapter]:
    """Return the object that each name belongs to: the oldest one."""
    holders: dict[str, Adapter] = {}
    for one in sorted(adapters, key=lambda one: (one.created, one.object)):
        if one.deleted is None:
            holders.setdefault(one.name, one)
    return holders


def _problem(
    service: str,
    spec: InferenceServiceSpec | None,
    invalid: str,
    adapter: Adapter,
    holders: Mapping[str, Adapter],
    pods: Sequence[AdapterPod],
) -> Fact | None:
    """Return why no pod of the service should load the adapter."""
    if adapter.deleted is not None:
        return _inactive("Unloading", "The object is deleted. Pods unload the adapter.")
    if invalid:
        return _inactive("ServiceInvalid", invalid)
    if spec is None:
        return _inactive("ServiceNotFound", f"The InferenceService {service} does not exist.")
    if spec.engine.type not in ("Baton", "vLLM"):
        return _inactive(
            "EngineNotSupported",
            f"{service} has spec.engine.type {spec.engine.type}. This release loads adapters in Baton and "
            "vLLM workers only.",
        )
    if spec.security.mutual_tls is not None:
        return _inactive(
            "EngineNotSupported",
            f"The workers of {service} require client certificates (spec.security.mutualTls), which the "
            "operator does not have. Load adapters at startup: spec.engine.args with "
            "--lora-modules=NAME=PATH.",
        )
    holder = holders[adapter.name]
    if holder is not adapter:
        return _inactive(
            "NameConflict",
            f"The older LoraAdapter {holder.object} of {service} has the name {adapter.name}. Set another "
            "spec.name.",
        )
    if adapter.name in (spec.model.name or service, *spec.model.aliases):
        return _inactive(
            "NameConflict", f"{adapter.name} is a name of the model of {service}. Set another spec.name."
        )
    if spec.engine.lora is None and not any(pod.template.adapters for pod in pods):
        return _inactive(
            "AdaptersNotEnabled",
            f"The workers of {service} load no adapters. Set spec.engine.lora of the InferenceService, such "
            "as {maxAdapters: 4, maxRank: 16}; that rolls out new workers once.",
        )
    return None


def _placed(adapter: Adapter, pods: Sequence[AdapterPod], owned: set[str]) -> AdapterPlacement:
    paths, faults, unreachable = {}, {}, []
    enabled = 0
    for pod in pods:
        try:
            enabled += pod.template.adapters
            path = _path(adapter, pod)
        except FilesNotReachable as error:
            unreachable.append(str(error))
            faults[pod.key] = str(error)
        except ValueError as error:
            faults[pod.key] = str(error)
        else:
            root = (pod.models or {}).get(adapter.name, path)
            if root != path and adapter.name not in owned:
                faults[pod.key] = (
                    f"The pod has an adapter of this name already, from {root}, which no LoraAdapter loaded. "
                    "Set another spec.name."
                )
            else:
                paths[pod.key] = path
    everywhere = bool(unreachable) and len(unreachable) == enabled
    return AdapterPlacement(None, paths, faults, unreachable[0] if everywhere else "")


def _path(adapter: Adapter, pod: AdapterPod) -> str:
    """Return the path of the adapter's files in a pod. Raises ValueError if it cannot load them."""
    template = pod.template
    if not template.adapters:
        raise ValueError("The pod was started without spec.engine.lora. The rollout replaces it.")
    rank = adapter.spec.rank or 0
    path = template.lora_path(adapter.spec)
    if template.max_rank and rank > template.max_rank:
        raise ValueError(
            f"Rank {rank} (spec.rank) is above {template.max_rank}, the spec.engine.lora.maxRank of the pod."
        )
    return path


def _work(pod: AdapterPod, desired: Mapping[str, str], owned: set[str]) -> PodWork | None:
    if pod.models is None or pod.busy:
        return None
    stale = tuple(sorted(name for name in owned & pod.models.keys() if pod.models[name] != desired.get(name)))
    missing = tuple(sorted((name, path) for name, path in desired.items() if pod.models.get(name) != path))
    load = missing if pod.ready else ()
    return PodWork(stale, load) if stale or load else None


def _inactive(reason: str, message: str) -> Fact:
    return Fact("Active", False, reason, message)
