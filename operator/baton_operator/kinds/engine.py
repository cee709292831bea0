"""What both roles of a service have in common, so that their KV caches cannot differ by accident."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from baton_operator.kinds.part import Anything, LabelKey, Part, Rule, rules

Argument = Annotated[str, Field(max_length=4096)]
Arguments = Annotated[list[Argument], Field(max_length=128)]
Image = Annotated[str, Field(min_length=1, max_length=512)]


class Variable(Part):
    """An environment variable of a container."""

    name: Annotated[str, Field(max_length=256, pattern=r"^[A-Za-z_][A-Za-z0-9_.-]*$")]
    """Name of the variable."""

    value: Annotated[str, Field(max_length=32_768)] | None = None
    """Its value."""

    value_from: Anything | None = None
    """Where its value comes from, as in a pod: secretKeyRef, configMapKeyRef, fieldRef or
    resourceFieldRef."""


Environment = Annotated[list[Variable], Field(max_length=64)]


class Engine(Part):
    """The engine of all workers."""

    image: Image | None = None
    """Image of the workers; the operator's own default if it is left out."""

    args: Arguments = []
    """Further flags of `baton prefill` and `baton decode`."""

    env: Environment = []
    """Environment of all workers."""

    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Type of weights and KV cache. auto: as the model's files say."""

    max_model_len: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Most tokens of a prompt and its answer; the model's own limit if it is left out."""

    kv_cache_memory: (
        Annotated[str, Field(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)? ?([kKMGT]i?)?B?$")] | None
    ) = None
    """Memory of each worker's KV cache, such as 4GiB; what is free if it is left out."""


@rules(
    Rule(
        "self.enforcement != 'Required' || has(self.domainKey)",
        "enforcement Required needs domainKey: the node label that says who is near whom",
        ".enforcement",
    ),
)
class Transfer(Part):
    """How KV blocks move from prefill to decode workers."""

    backend: Literal["UCX", "TCP"] = "UCX"
    """UCX: the fastest that UCX finds between two pods (RDMA, shared memory, TCP). TCP: nothing but TCP."""

    control_port: Annotated[int, Field(ge=1024, le=65_535)] = 5557
    """Port of the prefill workers on which decode workers ask for prompts."""

    timeout_seconds: Annotated[int, Field(ge=1, le=3600)] = 30
    """Seconds after which a transfer is given up, and the prompt computed by the decode worker."""

    domain_key: LabelKey | None = None
    """Node label whose equal values mean a fast network: a zone, a rack, a rail. Pods of one service are
    placed where it is equal."""

    enforcement: Literal["Preferred", "Required"] = "Preferred"
    """Whether pods may be placed in another domain if there is no room in one."""

    env: Environment = []
    """Environment of all workers for the transfer, such as UCX_NET_DEVICES."""
