"""
What the operator knows of one engine, in one value: its containers, and the flags that are the operator's.

Each engine's module ends with its `SPEC`, and the package lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from baton_api.workers import EngineKind
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.manifests.engines.container import EngineContainer, WorkerPod

NODES = "parallelism.nodes of the role"
TRANSFER = "the roles of the spec, spec.transfer and the pod's address"
TENSOR, PIPELINE = "parallelism.tensor of the role", "parallelism.pipeline of the role"
MODEL, NAMES = "spec.model.uri", "spec.model.name and spec.model.aliases"

ADDRESS = dict.fromkeys(("--host", "--port"), "the ports and the Service of the pods")
"""Flags of any engine's address, with what determines their value."""

OF_VLLM_AND_SGLANG = {
    **ADDRESS,
    "--model": MODEL,
    "--served-model-name": NAMES,
    "--kv-events-config": "the ports that routers read",
    "--tensor-parallel-size": TENSOR,
    "--pipeline-parallel-size": PIPELINE,
    **dict.fromkeys(("--nnodes", "--node-rank"), NODES),
}

DTYPE = "--dtype"
"""The flag of `spec.engine.dtype`."""


@dataclass(frozen=True, slots=True)
class Slots:
    """Batch slots of a decode worker, of an engine that does not report them."""

    flag: str
    default: Callable[[InferenceServiceSpec, Sequence[str]], int]
    """Returns the engine's smallest default, by the arguments of the worker."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """One engine."""

    kind: EngineKind
    """As routers name it."""
    container: Callable[[WorkerPod], EngineContainer]
    """Returns the container of a worker, or of another node of it."""
    owned_flags: Mapping[str, str] = field(default_factory=dict)
    """Flags that the operator sets, with what determines their value."""
    owned_variables: Sequence[str] = ()
    """Variables that the operator sets to an address or a port of its side channel."""
    layout_flags: Mapping[str, str] = field(default_factory=dict)
    """Flags that decide how KV blocks are stored, with their defaults; empty: depends on the platform."""
    image_flag: str = ""
    """Setting of the operator with the default image; empty: there is none."""
    slots: Slots | None = None
