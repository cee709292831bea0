"""
From a `Machine` to findings: every check there is.

Each is a function of one subject, which says at least one thing of it, unless nobody asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from baton_cli.doctor import limits, software, surroundings, transport
from baton_cli.doctor.findings import Finding
from baton_cli.doctor.machine import Machine

CHECKS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    limits.shared_memory,
    limits.memory,
    limits.open_files,
    limits.processes,
    transport.rdma,
    transport.locked_memory,
    transport.copies,
    transport.nixl,
    transport.network,
    software.kernels,
    software.versions,
    software.variables,
    surroundings.ports,
    surroundings.clock,
    surroundings.places,
    surroundings.cluster,
)


def examine(machine: Machine) -> list[Finding]:
    """Everything that there is to say of it."""
    return [finding for check in CHECKS for finding in check(machine)]
