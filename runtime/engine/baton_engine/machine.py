"""
What of this machine the process may use: processors and memory, cgroup limits included.

In a container the machine's own figures are wrong by the container's limits, and a thread too many or
a cache too large is found out by being throttled or killed. So both are asked for here, and nowhere else.
"""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where a process in a container finds its own limits (cgroup version 2)."""

MEMINFO = Path("/proc/meminfo")


def usable_cores(cgroup: Path = CGROUP) -> int:
    """Processors that this process may keep busy, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period):
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def free_memory(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> int | None:
    """Bytes that this process could still take without anything being swapped or killed; None if unknown."""
    known = []
    for line in _read(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            known.append(int(value.split()[0]) * 1024)
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit.isdecimal() and used.isdecimal():
        # File pages that nobody used lately count as used, but the kernel gives them up before it kills.
        idle = 0
        for line in _read(cgroup / "memory.stat").splitlines():
            name, _, value = line.partition(" ")
            if name == "inactive_file":
                idle = int(value)
        known.append(max(0, int(limit) - int(used) + idle))
    return min(known) if known else None


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # not this kernel, or not in a container
        return ""
