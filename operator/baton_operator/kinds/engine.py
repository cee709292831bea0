"""Settings that prefill and decode workers share: the engine that they run, and the transfer of KV blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from baton_api.workers import ENGINE_TYPES
from baton_operator.kinds.part import Anything, Duration, LabelKey, Part, Quantity, Rule, between, rules

Argument = Annotated[str, Field(max_length=4096)]
Arguments = Annotated[list[Argument], Field(max_length=128)]
Image = Annotated[str, Field(min_length=1, max_length=512)]


class Variable(Part):
    """An environment variable of a container."""

    name: Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")]
    """Name of the variable."""

    value: Annotated[str, Field(max_length=32_768)] | None = None
    """Value of the variable. Empty if neither value nor valueFrom is set."""

    value_from: Anything | None = None
    """Source of the value, as in a pod: secretKeyRef, configMapKeyRef, fieldRef or resourceFieldRef."""


Environment = Annotated[list[Variable], Field(max_length=64)]


class Lora(Part):
    """LoRA adapters that workers can load while they run."""

    max_adapters: Annotated[int, Field(ge=1, le=256)] = 4
    """Maximum number of adapters. Baton: of loaded ones, which may all be in one batch. vLLM: in one batch of
    a worker; each takes accelerator memory. More LoraAdapters may exist in vLLM: the worker then loads the
    ones that a batch needs."""

    max_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] = 16
    """Maximum rank of an adapter. In vLLM, a larger value takes more accelerator memory."""


if TYPE_CHECKING:
    EngineType = str
else:
    EngineType = Literal[tuple(ENGINE_TYPES.values())]


@rules(
    Rule("self.type != 'Memory' || !has(self.volume)", "a tier of type Memory has no volume", ".volume"),
    Rule("self.type == 'SharedStore' || !has(self.url)", "url is for a tier of type SharedStore", ".url"),
    Rule(
        "self.type != 'SharedStore' || has(self.url) != has(self.volume)",
        "a tier of type SharedStore needs either url or volume",
        ".url",
    ),
)
class KvCacheTier(Part):
    """A place for KV blocks that the memory of the accelerator has no room for."""

    type: Literal["Memory", "Disk", "SharedStore"]
    """Memory: of the pod, which its limit must have room for. Disk: a volume. SharedStore: object storage, or
    a volume, that all workers share; type Baton only."""

    size: Quantity
    """Bytes of each worker, such as 64Gi; of SharedStore, those of all workers together. vLLM does not limit
    what it writes to a disk: there it is the size of the claim."""

    url: Annotated[str, Field(pattern="^(s3|gs|az)://[^/@?#]+(/[^?#]*)?$", max_length=1024)] | None = None
    """SharedStore: s3://BUCKET/PATH, gs://BUCKET/PATH or az://CONTAINER/PATH. Credentials are those of the
    pod's service account, or variables of `env` from a Secret, such as AWS_ACCESS_KEY_ID."""

    volume: Anything | None = None
    """Source of the volume, as in a pod, such as persistentVolumeClaim. SharedStore: one that all pods can
    mount to read and write, persistentVolumeClaim or nfs. Disk: what one worker stores in such a volume, all
    workers can restore; those of type Baton need a disk of their own. Default of Disk: each pod has a new
    claim of `size` in the default StorageClass, which is deleted with the pod."""


@rules(
    Rule(
        "self.type in ['Baton', 'vLLM'] || !has(self.kvCacheMemory)",
        "kvCacheMemory is for type Baton and vLLM: give other engines their own flag in args, "
        "such as --mem-fraction-static",
        ".kvCacheMemory",
    ),
    Rule(
        "self.type != 'Custom' || (!has(self.maxModelLen) && self.dtype == 'auto')",
        "maxModelLen and dtype are not for type Custom: give the engine its own flags in args",
        ".type",
    ),
    Rule("self.type in ['Baton', 'vLLM'] || !has(self.lora)", "lora is for type Baton and vLLM", ".lora"),
    Rule(
        "self.type in ['Baton', 'vLLM', 'SGLang'] || !has(self.kvCacheTiers) || size(self.kvCacheTiers) == 0",
        "kvCacheTiers is for type Baton, vLLM and SGLang: give other engines their own flags in args",
        ".kvCacheTiers",
    ),
    Rule(
        "!has(self.kvCacheTiers) || self.kvCacheTiers.all(one, "
        "self.kvCacheTiers.exists_one(other, other.type == one.type))",
        "kvCacheTiers has each type at most once",
        ".kvCacheTiers",
    ),
    Rule(
        "!has(self.kvCacheTiers) || !self.kvCacheTiers.exists(one, one.type != 'Memory') || "
        "self.kvCacheTiers.exists(one, one.type == 'Memory')",
        "a tier of type Disk or SharedStore needs one of type Memory, through which its blocks pass",
        ".kvCacheTiers",
    ),
    Rule(
        "self.type == 'Baton' || !has(self.kvCacheTiers) || "
        "!self.kvCacheTiers.exists(one, one.type == 'SharedStore')",
        "a tier of type SharedStore is for type Baton: others share a Disk, by a volume that pods share",
        ".kvCacheTiers",
    ),
)
class Engine(Part):
    """The inference engine in all workers. A change rolls out a new revision."""

    type: EngineType = "Baton"
    """Engine that the workers run. vLLM, SGLang and TensorRT-LLM need their own image; their prefill and
    decode workers exchange KV blocks by NIXL. Custom: any server of the OpenAI API on port 8000 with GET
    /health, without prefill workers."""

    image: Image | None = None
    """Container image of the workers. Default: the operator's image for the engine. Required for TensorRT-LLM
    and Custom."""

    args: Arguments = []
    """Additional flags of the engine, one per entry, after those that the operator sets. For vLLM, SGLang and
    TensorRT-LLM, the operator refuses flags that it sets itself: addresses, model, names, parallelism, KV
    transfer and KV events."""

    env: Environment = []
    """Environment variables of all workers."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Data type of weights and KV cache. auto: the type in the model's configuration."""

    max_model_len: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Maximum tokens of a prompt and its answer together. Longer prompts are rejected. Default: the context
    length of the model."""

    kv_cache_memory: (
        Annotated[str, Field(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)? ?([kKMGT]i?)?B?$")] | None
    ) = None
    """Memory for the KV cache of each worker, such as 4GiB. Default: the memory that is free after the
    weights are loaded."""

    kv_cache_tiers: Annotated[list[KvCacheTier], Field(max_length=3)] = []
    """Tiers of workers of type Baton, vLLM and SGLang, for KV blocks that leave the KV cache. A prompt whose
    blocks are there is restored instead of computed, by type Baton only where that is sooner. Baton: without
    tensor parallelism. SGLang: not for decode workers of a pair, which have no prefix cache."""

    lora: Lora | None = None
    """Lets workers of type Baton and vLLM load LoraAdapters. Without it, they load none. Adding a LoraAdapter
    then restarts no worker."""


class Topology(Part):
    """Placement of a service's pods within one network domain, such as a zone, a rack or a rail."""

    key: LabelKey | None = None
    """Node label whose value names the domain, such as topology.kubernetes.io/zone. Workers of one revision
    are placed on nodes with equal values. Without it, workers are placed anywhere."""

    policy: Literal["Preferred", "Required"] = "Preferred"
    """Preferred: workers run in another domain if one domain has no capacity. Required: workers stay pending
    instead. Required needs `key`."""


@rules(
    Rule(
        "self.topology.policy != 'Required' || has(self.topology.key)",
        "topology.policy Required needs topology.key, the node label that names the network domain",
        ".topology.policy",
    ),
)
class Transfer(Part):
    """Transfer of KV blocks from prefill to decode workers. A change rolls out a new revision."""

    backend: Literal["UCX", "TCP"] = "UCX"
    """Transport. UCX: the fastest that UCX finds between two pods (RDMA, shared memory or TCP). TCP: TCP
    only."""

    control_port: Annotated[int, Field(ge=1024, le=65_535)] = 5557
    """TCP port on which prefill and decode workers request blocks of each other."""

    timeout: Annotated[Duration, between("1s", "1h")] = Duration("30s")
    """Maximum duration of a transfer. After it, the decode worker computes the prompt itself."""

    topology: Topology = Topology()
    """Placement within one network domain."""

    env: Environment = []
    """Environment variables of all workers for the transfer, such as UCX_NET_DEVICES."""
