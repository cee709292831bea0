"""Read what the system says of its GPUs, and of transfers from their memory. Without a driver's library."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from baton_cli.doctor.machine import Gpus

ROOT = Path("/")
PEER_MODULES = ("nvidia_peermem", "nv_peer_mem")
"""Modules by which RDMA devices read NVIDIA's memory. UCX looks for the same ones."""

DMA_BUF_KERNEL = (5, 12)
"""The first Linux whose RDMA devices read the memory of other devices by DMA-BUF."""


def gpus(root: Path = ROOT) -> Gpus:
    """Return the GPUs that this process may use. `root` is another root folder, in tests."""
    nvidia = [
        device for device in (root / "dev").glob("nvidia*") if device.name.removeprefix("nvidia").isdecimal()
    ]
    if nvidia:
        release = _read(root / "proc/driver/nvidia/version").partition("\n")[0]
        version = re.search(r"\d+(\.\d+)+", release)
        is_open = "Open Kernel Module" in release
        modules = [name for name in PEER_MODULES if (root / "sys/module" / name).exists()]
        kernel = re.match(r"(\d+)\.(\d+)", _read(root / "proc/sys/kernel/osrelease"))
        recent = kernel is not None and (int(kernel[1]), int(kernel[2])) >= DMA_BUF_KERNEL
        return Gpus(
            devices=len(nvidia),
            driver=" ".join(filter(None, ("NVIDIA", version and version[0], "open" if is_open else ""))),
            platform="cuda",
            direct=modules[0] if modules else "DMA-BUF" if is_open and recent else "",
            gdrcopy=(root / "dev/gdrdrv").exists(),
            plugins=plugins(),
        )
    nodes = (root / "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    amd = [node for node in nodes if _read(node).strip() not in ("", "0")]
    if amd and (root / "dev/kfd").exists():
        return Gpus(devices=len(amd), driver="amdgpu", platform="rocm", direct="amdgpu", plugins=plugins())
    return Gpus()


def plugins() -> frozenset[str] | None:
    """Return the names of the plugins of the UCX that NIXL's package brings; None if it brings none."""
    nixl = importlib.util.find_spec("nixl")
    if nixl is None or nixl.origin is None:
        return None
    libraries = Path(nixl.origin).parents[1].glob("nixl_*.libs/ucx/libuct_*.so*")
    return frozenset(library.name.removeprefix("libuct_").partition(".")[0] for library in libraries) or None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
