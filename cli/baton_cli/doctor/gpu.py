"""
GPUs and transfers from their memory: what the system says of them, and checks by the rules of UCX.

No driver's library is needed. Not yet tried on a GPU.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from baton_cli.doctor.machine import Finding, Gpus, Level, Machine, good, note

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


def devices(machine: Machine) -> Iterator[Finding]:
    """Check that UCX can register the memory of the devices, without which no worker of a pair starts."""
    gpus = machine.gpus
    if not gpus.devices:
        yield note("GPU", "no device", "Workers run on the CPU. Transfers from GPU memory were not checked.")
        return
    measured = f"{gpus.devices} with {gpus.driver}"
    tls = machine.environment.get("UCX_TLS", "")
    if gpus.plugins is not None and gpus.platform not in gpus.plugins:
        yield Finding(
            "GPU",
            Level.ERROR,
            f"{measured}; UCX has {', '.join(sorted(gpus.plugins))}",
            limit=f"UCX's plugin {gpus.platform}",
            why="NIXL cannot register GPU memory, so prefill and decode workers do not start.",
            remedy=f"Install a build of NIXL whose UCX supports {gpus.platform}, or use --role both.",
        )
    elif _excludes(tls, gpus.platform):
        yield Finding(
            "GPU",
            Level.ERROR,
            f"{measured}; UCX_TLS={tls}",
            limit=f"{gpus.platform} in UCX_TLS",
            why="NIXL cannot register GPU memory, so prefill and decode workers do not start.",
            remedy=f"Set UCX_TLS={tls},{gpus.platform}, or unset it.",
        )
    else:
        yield good("GPU", measured)


def direct(machine: Machine) -> Iterator[Finding]:
    """Check that RDMA devices read GPU memory without a copy in host memory."""
    gpus, check = machine.gpus, "GPUDirect RDMA"
    if not gpus.devices:
        return
    if not machine.rdma:
        yield note(check, "no RDMA device", "KV transfers to other machines copy GPU memory and use TCP.")
        return
    switch = machine.environment.get("UCX_IB_GPU_DIRECT_RDMA", "")
    if switch in ("n", "no", "0", "off"):
        yield Finding(
            check,
            Level.WARNING,
            f"UCX_IB_GPU_DIRECT_RDMA={switch}",
            limit="unset, or try",
            why="KV transfers copy GPU memory through host memory.",
            remedy="Unset UCX_IB_GPU_DIRECT_RDMA.",
        )
    elif gpus.direct:
        yield good(check, f"by {gpus.direct}")
    else:
        yield Finding(
            check,
            Level.WARNING,
            "nvidia_peermem is not loaded",
            limit="nvidia_peermem, or the open kernel modules on Linux 5.12",
            why="KV transfers copy GPU memory through host memory.",
            remedy="Run modprobe nvidia_peermem on the node, or install NVIDIA's open kernel modules "
            "(DMA-BUF).",
        )


def peers(machine: Machine) -> Iterator[Finding]:
    """Report what decides the speed of small transfers, and of transfers between GPUs of this machine."""
    gpus = machine.gpus
    if gpus.platform != "cuda":
        return
    plugin = gpus.plugins is None or any("gdrcopy" in name for name in gpus.plugins)
    missing = [
        what
        for what, present in (("gdrdrv is not loaded", gpus.gdrcopy), ("UCX has no plugin for it", plugin))
        if not present
    ]
    if missing:
        yield note("GDRCopy", ", ".join(missing), "It speeds up messages of a few KiB. KV blocks are larger.")
    else:
        yield good("GDRCopy", "available")
    name = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
    switch = machine.environment.get(name, "on")  # workers set it
    if gpus.devices > 1 and switch not in ("y", "yes", "1", "on"):
        yield note(
            "CUDA IPC",
            f"{name}={switch}",
            "Without NVLink, UCX then reads other GPUs of this machine over TCP. Unset it. Pods need a "
            "common PID namespace.",
        )


def _excludes(tls: str, platform: str) -> bool:
    """Return whether UCX_TLS excludes all transports of the platform, such as cuda_copy."""
    names = tls.lstrip("^").split(",") if tls else []
    if tls.startswith("^"):
        return platform in names or f"{platform}_copy" in names
    return bool(names) and "all" not in names and not any(name.startswith(platform) for name in names)
