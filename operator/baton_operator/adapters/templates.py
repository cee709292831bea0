"""
The pod template of one role and revision, as far as it concerns adapters.

It is read from the object that creates the pods.

The `lora_path` of the workers' API is a folder in the container, or a repository of the Hugging Face Hub
that the worker downloads itself. Pods keep running when an adapter is added, so its files have to be where a
running pod can read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton_operator import names
from baton_operator.kinds.lora_adapter import LoraAdapterSpec
from baton_operator.manifests.engines.arguments import ENABLE_LORA, MAX_LORA_RANK, last_value
from baton_operator.manifests.objects import Manifest

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
        args = [str(one) for one in container.get("args", ())]
        rank = last_value(args, MAX_LORA_RANK)
        ports = {one.get("name"): int(one["containerPort"]) for one in container.get("ports", ())}
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
        one["name"]: one["persistentVolumeClaim"]["claimName"]
        for one in pod.get("volumes", ())
        if "persistentVolumeClaim" in one
    }
    return [
        Mount(claims[one["name"]], one["mountPath"], one.get("subPath", "").strip("/"))
        for one in container.get("volumeMounts", ())
        if one["name"] in claims
    ]
