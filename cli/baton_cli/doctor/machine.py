"""All that the checks know of a machine: values, gathered once (`gathering`, `trials`, `cluster`)."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Space:
    """A file system, in bytes."""

    total: int
    free: int


@dataclass(frozen=True, slots=True)
class DataFolder:
    """A folder that Baton writes to."""

    what: str
    path: str
    free: int
    """Bytes."""
    trouble: str = ""
    """Why nothing can be written there; empty if it can."""
    setting: str = ""
    """The variable that names another one."""


@dataclass(frozen=True, slots=True)
class RdmaDevice:
    """As the kernel lists it."""

    name: str
    ports: Mapping[int, str]
    """Each port's state, such as ACTIVE or DOWN."""


@dataclass(frozen=True, slots=True)
class Port:
    """A TCP port of 127.0.0.1 that a process of Baton takes unless told otherwise."""

    number: int
    what: str
    holder: str = ""
    """Who listens there: a command line, or `another program`; empty if nobody does."""


@dataclass(frozen=True, slots=True)
class Installed:
    """A package that Baton's own metadata has something to say of."""

    name: str
    version: str
    """Empty if it is not installed."""
    wanted: str
    """Such as `>=0.20`."""
    fits: bool


@dataclass(frozen=True, slots=True)
class SelfTest:
    """Something that was tried out in a process of its own."""

    means: str
    """What it found to work with, such as a compiler; empty if it was not to be had."""
    trouble: str = ""
    """Empty if it works."""
    installed: bool = True
    """Whether the packages are there that it takes."""


@dataclass(frozen=True, slots=True)
class Crd:
    """A custom resource as a cluster has it."""

    name: str
    versions: tuple[str, ...]
    """That are served; none if the resource is not installed."""
    missing: tuple[str, ...] = ()
    """Fields that this version of Baton has and the cluster's definition has not."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """What this account may do and what the cluster has."""

    server: str
    trouble: str = ""
    """Why nothing is known of it."""
    denied: tuple[str, ...] = ()
    """What a user of Baton has to be allowed and this account is not, such as `create inferenceservices`."""
    crds: tuple[Crd, ...] | None = ()
    """None if this account may not see them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Limits are None where there is none."""

    name: str
    environment: Mapping[str, str]
    """Variables that Baton, UCX or NIXL read."""
    known: frozenset[str]
    """Variables of Baton's."""
    shm: Space | None
    """/dev/shm."""
    memory: int | None
    """Bytes that a process could still take."""
    open_files: int | None
    """That a process may have at most: the hard limit, to which a router raises its own."""
    processes: int | None
    """And threads of this user, or of this container, whichever are fewer."""
    locked: int | None
    """Bytes that a process may lock into memory."""
    rdma: tuple[RdmaDevice, ...] = ()
    verbs: str = ""
    """Why /dev/infiniband cannot be used; empty if it can."""
    interfaces: frozenset[str] = frozenset()
    """Of the network."""
    copies: SelfTest
    """Of memory from one process to another that is not its child."""
    kernels: SelfTest
    """Compiled for this processor."""
    nixl: SelfTest
    packages: tuple[Installed, ...] = ()
    ports: tuple[Port, ...] = ()
    places: tuple[DataFolder, ...] = ()
    clock_synchronised: bool | None
    """None if the kernel does not say."""
    clock_apart: Mapping[str, float] = field(default_factory=dict)
    """By URL of a router or worker, seconds that its clock is ahead of this machine's."""
    unreachable: Mapping[str, str] = field(default_factory=dict)
    """By URL, why it did not answer."""
    cluster: Cluster | None = None
    """None if nobody asked about one."""


class Level(enum.StrEnum):
    GOOD = "good"
    NOTE = "note"
    """Worth knowing; nothing has to be done."""
    WARNING = "warning"
    """It works, and slowly, or not for much."""
    ERROR = "error"
    """Something will not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """In a word or two, such as `open files`."""
    level: Level
    measured: str
    """What was found, with its unit."""
    limit: str = ""
    """What it should be."""
    why: str = ""
    """What it leads to; a sentence."""
    way_out: str = ""
    """What to do; a sentence. Empty only for what is good, or a note."""


def good(check: str, measured: str) -> Finding:
    return Finding(check, Level.GOOD, measured)


def note(check: str, measured: str, why: str) -> Finding:
    return Finding(check, Level.NOTE, measured, why=why)
