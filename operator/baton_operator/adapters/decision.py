"""
Adapters that each pod should load and unload: a pure decision, from the templates of the pods.

A pod has loaded the adapters that its `/v1/models` lists. The status of an adapter only has the names under
which pods may have loaded it, so the operator never unloads an adapter that something else loaded. A changed
location is another path: the pod unloads the adapter and loads it again. (With vLLM's `load_inplace`, the
worker would read the files again for each batch.)

The template of a role and revision is read from the object that creates its pods.

The `lora_path` of the workers' API is a folder in the container, or a repository of the Hugging Face Hub
that the worker downloads itself. Pods keep running when an adapter is added, so its files have to be where a
running pod can read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_operator import names
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.lora_adapter import LoraAdapterSpec
from baton_operator.manifests.engines.container import ENABLE_LORA, MAX_LORA_RANK, last_value
from baton_operator.manifests.objects import Fact, Manifest


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
    owned = {name for adapter in adapters for name in adapter.names}
    placements = {}
    for adapter in adapters:
        problem = _problem(service, spec, invalid, adapter, holders, pods)
        placements[adapter.object] = AdapterPlacement(problem) if problem else _placed(adapter, pods, owned)
    work = {}
    for pod in pods:
        desired = {
            adapter.name: placements[adapter.object].paths[pod.key]
            for adapter in adapters
            if pod.key in placements[adapter.object].paths
        }
        if todo := _work(pod, desired, owned):
            work[pod.key] = todo
    return AdapterPlan(placements, work)


def _holders(adapters: Iterable[Adapter]) -> dict[str, Adapter]:
    """Return the object that each name belongs to: the oldest one."""
    holders: dict[str, Adapter] = {}
    for adapter in sorted(adapters, key=lambda adapter: (adapter.created, adapter.object)):
        if adapter.deleted is None:
            holders.setdefault(adapter.name, adapter)
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


EVERYWHERE: Manifest = {}
"""The egress rule of a NetworkPolicy that allows all connections."""


class FilesNotReachable(ValueError):
    """The pods cannot read the files of an adapter. The message names the way out."""


@dataclass(frozen=True, slots=True)
class Mount:
    """A claim that the main container mounts."""

    claim: str
    path: str
    """Where it is mounted."""
    sub_path: str = ""
    """Folder of the claim that is mounted; empty for the whole claim."""


@dataclass(frozen=True, slots=True)
class WorkerTemplate:
    """The pod template of a role and revision, as far as it concerns adapters."""

    adapters: bool = True
    """Whether the engine was started with `spec.engine.lora`."""
    max_rank: int = 0
    """Maximum rank of an adapter; 0: not known."""
    port: int = names.HTTP_PORT
    """Port of the API."""
    mounts: tuple[Mount, ...] = ()
    downloads: bool = True
    """Whether the NetworkPolicy of the pods allows connections to the Hub."""

    @classmethod
    def of(cls, workload: Manifest, policy: Manifest | None) -> WorkerTemplate:
        """Return the template of a Deployment or LeaderWorkerSet. `policy`: the NetworkPolicy of its pods."""
        pod = _pod_spec(workload)
        container: dict[str, Any] = next((one for one in pod["containers"] if one["name"] == names.MAIN), {})
        args = [str(argument) for argument in container.get("args", ())]
        rank = last_value(args, MAX_LORA_RANK)
        ports = {port.get("name"): int(port["containerPort"]) for port in container.get("ports", ())}
        egress = policy["spec"].get("egress", ()) if policy else (EVERYWHERE,)
        return cls(
            adapters=ENABLE_LORA in args,
            max_rank=int(rank) if rank.isdigit() else 0,
            port=ports.get("http", names.HTTP_PORT),
            mounts=tuple(_mounts(pod, container)),
            downloads=EVERYWHERE in egress,
        )

    def lora_path(self, adapter: LoraAdapterSpec) -> str:
        """Return the adapter's path in the workers' API. Raises FilesNotReachable."""
        scheme, _, rest = adapter.uri.partition("://")
        if scheme == "file":
            return rest
        if scheme == "pvc":
            return self._in_claim(rest)
        return self._in_hub(rest)

    def _in_claim(self, rest: str) -> str:
        claim, _, folder = rest.partition("/")
        folder = folder.strip("/")
        for mount in self.mounts:
            inside = folder == mount.sub_path or folder.startswith(f"{mount.sub_path}/")
            if mount.claim == claim and (not mount.sub_path or inside):
                below = folder.removeprefix(mount.sub_path).strip("/")
                return f"{mount.path.rstrip('/')}/{below}".rstrip("/")
        mounted = ", ".join(sorted({one.claim for one in self.mounts})) or "no claim"
        raise FilesNotReachable(
            f"The workers do not mount {folder or 'the root'} of the claim {claim}; they mount {mounted}. "
            "Put the files on a claim that they mount, or add a volume by podTemplate of each role."
        )

    def _in_hub(self, repository: str) -> str:
        if repository.count("/") != 1 or repository.startswith("/") or repository.endswith("/"):
            raise FilesNotReachable(f"hf://{repository} is not of the form hf://ORGANIZATION/NAME.")
        if not self.downloads:
            raise FilesNotReachable(
                "Workers download an hf:// adapter themselves, and the NetworkPolicy of these workers allows "
                "no downloads. Copy the files into a claim that the workers mount, and set spec.uri to "
                "pvc://CLAIM/PATH."
            )
        return repository


def _pod_spec(workload: Manifest) -> dict[str, Any]:
    spec = workload["spec"]
    groups = spec.get("leaderWorkerTemplate")
    template = groups["leaderTemplate"] if groups else spec["template"]
    pod: dict[str, Any] = template["spec"]
    return pod


def _mounts(pod: Mapping[str, Any], container: Mapping[str, Any]) -> list[Mount]:
    claims = {
        volume["name"]: volume["persistentVolumeClaim"]["claimName"]
        for volume in pod.get("volumes", ())
        if "persistentVolumeClaim" in volume
    }
    return [
        Mount(claims[mount["name"]], mount["mountPath"], mount.get("subPath", "").strip("/"))
        for mount in container.get("volumeMounts", ())
        if mount["name"] in claims
    ]
