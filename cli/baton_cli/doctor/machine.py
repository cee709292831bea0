"""The inputs of the checks, which `probes`, `selftests` and `cluster` collect, and their findings."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from baton_api.workers import EngineKind


@dataclass(frozen=True, slots=True)
class Space:
    """The size of a file system in bytes."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """An RDMA device of the kernel."""

    name: str
    ports: Mapping[int, str]
    """The state of each port, such as ACTIVE or DOWN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpus:
    """The GPUs of a machine, and what transfers from their memory need."""

    devices: int = 0
    driver: str = ""
    """Such as `NVIDIA 580.95.05 open`."""
    platform: str = ""
    """`cuda` or `rocm`, as UCX names its plugin."""
    direct: str = ""
    """How RDMA devices read the memory of GPUs, such as nvidia_peermem or DMA-BUF. Empty if they cannot."""
    gdrcopy: bool = False
    """Whether the module gdrdrv is loaded."""
    plugins: frozenset[str] | None = None
    """Of UCX, such as cuda and ib. None if they are unknown."""


@dataclass(frozen=True, slots=True)
class SelfTest:
    """The result of a self-test, which runs in its own process."""

    means: str
    """The means that the test used, such as a compiler. Empty if it is missing."""
    trouble: str = ""
    """The error. Empty if the test passed."""
    installed: bool = True
    """Whether the required packages are installed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorker:
    """A worker of another engine, as it reports its settings. None means unknown."""

    url: str
    role: str = ""
    """As its router lists it; empty without a router."""
    engine: EngineKind
    version: str | None = None
    connector: bool | None = None
    """Whether it moves KV blocks to or from other workers."""
    side_channel: str = ""
    """`host:port` at which other workers ask for its blocks; empty without one, or if it does not
    report it."""
    side_channel_trouble: str = ""
    """Why this machine cannot connect to it."""
    kv_events: bool | None = None
    prompt_tokens_details: bool | None = None
    """Whether answers report the cached tokens of a prompt."""
    block_size: int | None = None
    """Tokens of a KV block."""


@dataclass(frozen=True, slots=True)
class Crd:
    """A custom resource definition of a cluster."""

    name: str
    versions: tuple[str, ...]
    """Served versions. Empty if the resource is not installed."""
    missing: tuple[str, ...] = ()
    """Fields of this version of Baton that the cluster's definition lacks."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """The permissions of an account and the custom resources of a cluster."""

    server: str
    trouble: str = ""
    """Why the cluster could not be inspected."""
    denied: tuple[str, ...] = ()
    """Missing permissions, such as `create inferenceservices`."""
    crds: tuple[Crd, ...] | None = ()
    """None if the account may not read them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The properties of a machine. A limit of None means unlimited."""

    name: str
    environment: Mapping[str, str]
    """Variables that Baton, UCX or NIXL read."""
    known_variables: frozenset[str]
    """Names of all variables of Baton."""
    shm: Space | None
    """/dev/shm."""
    open_files: int | None
    """The hard limit per process. A router raises its soft limit to it."""
    locked: int | None
    """Bytes that a process may lock in memory."""
    rdma: tuple[RdmaDevice, ...] = ()
    verbs: str = ""
    """Why /dev/infiniband is not usable. Empty if it is."""
    gpus: Gpus = Gpus()
    interfaces: frozenset[str] = frozenset()
    """Network interfaces."""
    copies: SelfTest
    """Reading the memory of a process that is not a child."""
    kernels: SelfTest
    """The native kernels, compiled for this processor."""
    nixl: SelfTest
    clock_synchronised: bool | None
    """None if the kernel does not report it."""
    clock_apart: Mapping[str, float] = field(default_factory=dict)
    """By URL of a router or worker: how far its clock is ahead of this machine's, in seconds."""
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """By URL: why the server did not answer."""
    workers: tuple[EngineWorker, ...] = ()
    """Workers of other engines."""
    cluster: Cluster | None = None
    """None if no cluster was inspected."""


class Level(enum.StrEnum):
    GOOD = "good"
    NOTE = "note"
    """Information; no action is needed."""
    WARNING = "warning"
    """Baton works, but slowly or with little capacity."""
    ERROR = "error"
    """Baton does not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check."""

    check: str
    """A short name, such as `open files`."""
    level: Level
    measured: str
    """The measured value with its unit."""
    limit: str = ""
    """The required value."""
    why: str = ""
    """The consequence, as a sentence."""
    remedy: str = ""
    """The solution, as a sentence. Empty for findings that need no action."""


def good(check: str, measured: str) -> Finding:
    return Finding(check, Level.GOOD, measured)


def note(check: str, measured: str, why: str) -> Finding:
    return Finding(check, Level.NOTE, measured, why=why)
