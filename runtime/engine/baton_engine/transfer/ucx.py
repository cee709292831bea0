"""
UCX, the library under NIXL: its settings in the environment, and the transports that it chose.

UCX reads its environment when it is loaded and when an agent is made. What is set here is set only where
the user has set nothing, and only while the agent is made, so that child processes inherit nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SEGMENTS: Mapping[str, str] = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
"""A READ over TCP is answered in segments, and with 8 KiB, UCX's default, it is much slower: see
benchmarks/LOG.md. Two ends that differ here break the connection, or the process: hence `wire`."""

DEFAULTS: Mapping[str, str] = {
    "UCX_LOG_FILE": "stderr",  # its default is stdout, where a command's own output goes
    "UCX_RCACHE_MAX_UNRELEASED": "1024",  # bounds the registrations that are kept of freed memory
    **SEGMENTS,
}

COPYING = frozenset({"all", "sm", "shm", "cma", "knem", "xpmem"})
"""Values of UCX_TLS that allow copies from process to process."""

INFINIBAND = Path("/sys/class/infiniband")


@contextmanager
def environment() -> Iterator[None]:
    """Holds `DEFAULTS` in the process's environment, save what the user has set."""
    added = {name: value for name, value in DEFAULTS.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def wire() -> str:
    """The settings that both ends of a connection must share, as they stand inside `environment`."""
    return " ".join(f"{name}={os.environ.get(name, '')}" for name in SEGMENTS)


def has_rdma() -> bool:
    """Whether this machine has a device over which UCX could speak RDMA."""
    return INFINIBAND.is_dir() and any(INFINIBAND.iterdir())


def place() -> str:
    """
    Names what two processes must share for UCX to copy straight from one's memory into the other's.

    Empty if UCX_TLS leaves no transport that does. This is a condition and no proof: the kernel may still
    forbid one process to read another (ptrace scope, seccomp).
    """
    allowed = os.environ.get("UCX_TLS", "all").split(",")
    if not allowed[0].startswith("^") and not COPYING.intersection(allowed):
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {os.stat('/proc/self/ns/user').st_ino}"


def transport(memory: str, copied: bool, rdma: bool) -> str:
    """
    The name of the means by which UCX reads from a peer, as far as it shows, for NIXL does not tell.

    `copied` says that both ends are in one `place`, and that reads are done when the call that posts them
    returns: that is a copy from process to process (`shm`: the kernel's process_vm_readv). Other reads
    went over a network. Where there is no RDMA device, that is TCP; where there is one, `network` is all
    that is known. Of a GPU's memory nothing is said, as copies between GPUs are asynchronous too.
    """
    if memory == "VRAM":
        return "nixl/ucx"
    if copied:
        return "nixl/ucx shm"
    return "nixl/ucx network" if rdma else "nixl/ucx tcp"
