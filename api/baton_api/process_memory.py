"""Memory that this process may use: that of the machine, or the limit of its container if that is lower."""

from __future__ import annotations

from pathlib import Path

CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""A container's own limit (cgroup version 2)."""

MEMINFO = Path("/proc/meminfo")


def memory_limit(cgroup: Path = CGROUP_LIMIT, meminfo: Path = MEMINFO) -> int | None:
    """Return bytes; None if the system does not say."""
    limits = [int(text) for text in (_read(cgroup), _total(_read(meminfo))) if text.isdigit()]
    return min(limits, default=None)


def _total(meminfo: str) -> str:
    for line in meminfo.splitlines():
        name, _, value = line.partition(":")
        if name == "MemTotal":
            return str(1024 * int(value.removesuffix("kB")))
    return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
