"""
Resources of this machine that the process may use: processors and memory within cgroup limits, and folders.

In a container, the machine's totals exceed the container's limits; too many threads or too large a cache lead
to throttling or an out-of-memory kill. The folders hold files that a worker can build or download again: the
built-in model, the native library and tokenizers.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Folder of a container's own limits (cgroup version 2)."""

MEMINFO = Path("/proc/meminfo")

SMAPS = Path("/proc/self/smaps")
"""The mappings of this process (proc_pid_smaps(5))."""

SYSTEM = Path("/sys/devices/system")
"""Folder in which Linux describes processors (`cpu`) and memory (`node`)."""


def usable_cores(cgroup: Path = CGROUP, system: Path = SYSTEM) -> int:
    """
    Return the number of cores that this process may use, at least 1.

    Hyperthreads of one core count once, because they share its vector units.
    """
    processors = _usable_processors()
    siblings = (_read(system / f"cpu/cpu{number}/topology/thread_siblings_list") for number in processors)
    cores = len({listed or str(number) for number, listed in zip(processors, siblings, strict=True)})
    quota, _, period = _read(cgroup / "cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal() and int(period):
        cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def memory_nodes(system: Path = SYSTEM) -> int:
    """Return the NUMA nodes of this process's processors as a mask (bit n: node n, n < 63); 0 if unknown."""
    usable, mask = set(_usable_processors()), 0
    for number in range(63):
        if usable & _listed(_read(system / f"node/node{number}/cpulist")):
            mask |= 1 << number
    return mask


def _usable_processors() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def _listed(ranges: str) -> set[int]:
    """Parse a list of numbers in the kernel's format, such as `0-3,8`."""
    numbers: set[int] = set()
    for part in filter(None, ranges.split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def free_memory(cgroup: Path = CGROUP, meminfo: Path = MEMINFO) -> int | None:
    """Return the bytes that can be allocated without swapping or an out-of-memory kill; None if unknown."""
    limits = []
    for line in _read(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            limits.append(int(value.split()[0]) * 1024)
    limit, used = _read(cgroup / "memory.max"), _read(cgroup / "memory.current")
    if limit.isdecimal() and used.isdecimal():
        # Inactive file pages count as used, but the kernel reclaims them before it kills a process.
        idle = 0
        for line in _read(cgroup / "memory.stat").splitlines():
            name, _, value = line.partition(" ")
            if name == "inactive_file":
                idle = int(value)
        limits.append(max(0, int(limit) - int(used) + idle))
    return min(limits) if limits else None


def total_memory(meminfo: Path = MEMINFO) -> int | None:
    """Return the bytes of the machine's memory and swap; None if unknown."""
    sizes = [
        int(value.split()[0]) * 1024
        for name, _, value in (line.partition(":") for line in _read(meminfo).splitlines())
        if name in ("MemTotal", "SwapTotal")
    ]
    return sum(sizes) if sizes else None


def in_huge_pages(address: int, size: int, smaps: Path = SMAPS) -> bool:
    """Return whether most of the memory of a file that is mapped at `address` is in huge pages."""
    inside, mapped = False, 0
    for line in _read(smaps).splitlines():
        name, _, value = line.partition(":")
        if "-" in name.partition(" ")[0]:  # the first line of a mapping, such as 7f00-7f80 r--s
            first, _, last = name.partition(" ")[0].partition("-")
            inside = address <= int(first, 16) < int(last, 16) <= address + size + mmap.PAGESIZE
        elif inside and name == "FilePmdMapped":
            mapped += int(value.split()[0]) * 1024
    return mapped >= size // 2


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # another kernel, or no container
        return ""


def cache_folder(environment: Mapping[str, str]) -> Path:
    """
    Return BATON_CACHE, or Baton's folder in the user's cache.

    A user without a home directory gets a folder in the temporary directory that is named after the user id.
    Any local user can create that name first, so `owned` decides whether a library found there is loaded.
    """
    if chosen := environment.get("BATON_CACHE"):
        return Path(chosen).expanduser()
    if caches := environment.get("XDG_CACHE_HOME"):
        return Path(caches) / "baton"
    if home := environment.get("HOME"):
        return Path(home) / ".cache" / "baton"
    return Path(tempfile.gettempdir()) / f"baton-{os.getuid()}"


def owned(path: Path, *, user: int | None = None) -> bool:
    """
    Return whether only `user` (default: this process's) and root can change `path` itself.

    The parent folder is not checked, because Kubernetes volumes are often writable for all users. Raises
    OSError if the path cannot be read.
    """
    status = path.lstat()
    return status.st_uid in (os.getuid() if user is None else user, 0) and not status.st_mode & 0o022


def trusted(path: Path) -> bool:
    """
    Return whether this process's user or root owns the folder of `path` and, if it exists, `path` itself.

    A folder that is writable for all users is accepted, because volumes of Kubernetes are.
    """
    try:
        if path.parent.exists() and path.parent.stat().st_uid not in (os.getuid(), 0):
            return False
        return not os.path.lexists(path) or owned(path)
    except OSError:  # it vanished, or this user cannot search the folder
        return False


def bundled_folder(environment: Mapping[str, str]) -> Path | None:
    """Return BATON_BUNDLED, the read-only folder of the built-in models in a container image."""
    folder = environment.get("BATON_BUNDLED")
    return Path(folder) if folder else None
