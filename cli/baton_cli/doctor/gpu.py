"""Checks of GPUs and of transfers from their memory, by the rules of UCX. Not yet tried on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

from baton_cli.doctor.machine import Finding, Level, Machine, good, note


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
