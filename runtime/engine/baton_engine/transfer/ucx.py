"""
UCX, the library under NIXL: its environment variables, and the transports that it selects.

UCX reads the environment when it is loaded and when an agent is created. This module sets variables only if
the user has not set them, and only during the creation of the agent, so that child processes do not inherit
them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SEGMENTS: Mapping[str, str] = {"UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
"""Segment sizes of reads over TCP. UCX's default of 8 KiB is much slower, see benchmarks/LOG.md. Different
values at both ends break the connection or the process, so `wire` compares them."""

DEFAULTS: Mapping[str, str] = {
    "UCX_LOG_FILE": "stderr",  # the default is stdout, which has the command's output
    "UCX_RCACHE_MAX_UNRELEASED": "1024",  # limits cached registrations of freed memory
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on",  # otherwise GPUs without NVLink are read over TCP
    **SEGMENTS,
}

COPYING = frozenset({"all", "sm", "shm", "cma", "knem", "xpmem"})
"""Values of UCX_TLS that allow copies between processes."""

INFINIBAND = Path("/sys/class/infiniband")


_changing = threading.Lock()


@contextmanager
def environment() -> Iterator[None]:
    """
    Set `DEFAULTS` in the environment during the context, except for variables that the user has set.

    One thread at a time has such a context.
    """
    with _changing:
        added = {name: value for name, value in DEFAULTS.items() if name not in os.environ}
        os.environ.update(added)
        try:
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)


def wire() -> str:
    """Return the settings that both ends of a connection must share. Call it within `environment`."""
    return " ".join(f"{name}={os.environ.get(name, '')}" for name in SEGMENTS)


def has_rdma() -> bool:
    """Return whether this machine has an RDMA device."""
    return INFINIBAND.is_dir() and any(INFINIBAND.iterdir())


def host_id() -> str:
    """
    Return an id of the machine and namespaces, which processes must share for direct memory copies by UCX.

    Empty if UCX_TLS excludes such copies. The condition is necessary but not sufficient: the kernel may
    forbid access to another process (ptrace scope, seccomp).
    """
    allowed = os.environ.get("UCX_TLS", "all").split(",")
    if not allowed[0].startswith("^") and not COPYING.intersection(allowed):
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/pid').st_ino} {os.stat('/proc/self/ns/user').st_ino}"


def transport(on_device: bool, copied: bool, rdma: bool) -> str:
    """
    Return the transport of reads from a peer, as far as it can be observed, because NIXL does not report it.

    `copied` means that both ends have the same `host_id` and reads complete in the posting call: the kernel
    copies between processes (`shm`, process_vm_readv). Other reads use a network: TCP without an RDMA device,
    otherwise an unknown one (`network`). For GPU memory the transport is unknown, because copies between GPUs
    are asynchronous too.
    """
    if on_device:
        return "nixl/ucx"
    if copied:
        return "nixl/ucx shm"
    return "nixl/ucx network" if rdma else "nixl/ucx tcp"
