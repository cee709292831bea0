"""GPUs, and transfers from their memory, as the files of the system and the settings of UCX describe them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from baton_cli.doctor import gpu
from baton_cli.doctor.command import CHECKS, examine
from baton_cli.doctor.machine import Gpus, Level, Machine
from tests.cli.doctor.machines import but

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\nGCC version: 12\n"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19\n"
TWO = {"dev/nvidia0": "", "dev/nvidia1": "", "dev/nvidiactl": "", "dev/nvidia-uvm": ""}
NODE = "sys/class/kfd/kfd/topology/nodes"

SYSTEMS: dict[str, tuple[Mapping[str, str], tuple[int, str, str, str, bool]]] = {
    "no GPU": ({"dev/null": ""}, (0, "", "", "", False)),
    "a driver without devices": ({"proc/driver/nvidia/version": OPEN}, (0, "", "", "", False)),
    "open modules": (
        {**TWO, "proc/driver/nvidia/version": OPEN, "proc/sys/kernel/osrelease": "6.8.0-45-generic\n"},
        (2, "NVIDIA 580.95.05 open", "cuda", "DMA-BUF", False),
    ),
    "open modules on an old kernel": (
        {**TWO, "proc/driver/nvidia/version": OPEN, "proc/sys/kernel/osrelease": "5.4.0\n"},
        (2, "NVIDIA 580.95.05 open", "cuda", "", False),
    ),
    "closed modules": (
        {**TWO, "proc/driver/nvidia/version": CLOSED, "proc/sys/kernel/osrelease": "6.8.0\n"},
        (2, "NVIDIA 535.104.05", "cuda", "", False),
    ),
    "all modules": (
        {
            **TWO,
            "proc/driver/nvidia/version": CLOSED,
            "sys/module/nvidia_peermem/version": "1",
            "dev/gdrdrv": "",
        },
        (2, "NVIDIA 535.104.05", "cuda", "nvidia_peermem", True),
    ),
    "a container without the driver's files": (TWO, (2, "NVIDIA", "cuda", "", False)),
    "AMD": (
        {"dev/kfd": "", f"{NODE}/0/gpu_id": "0\n", f"{NODE}/1/gpu_id": "4098\n"},
        (1, "amdgpu", "rocm", "amdgpu", False),
    ),
}


@pytest.mark.parametrize(("files", "expected"), SYSTEMS.values(), ids=SYSTEMS)
def test_gpus_of_a_system_are_found_by_its_files(
    files: Mapping[str, str], expected: tuple[int, str, str, str, bool], tmp_path: Path
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    gpus = gpu.gpus(tmp_path)
    assert (gpus.devices, gpus.driver, gpus.platform, gpus.direct, gpus.gdrcopy) == expected


def test_plugins_are_those_of_the_installed_ucx() -> None:
    pytest.importorskip("nixl")
    assert {"cuda", "ib", "cma"} <= (gpu.plugins() or set())


PLUGINS = frozenset({"cuda", "ib", "cma"})
EIGHT = Gpus(devices=8, driver="NVIDIA 580", platform="cuda", direct="DMA-BUF", plugins=PLUGINS)
BARE = Gpus(devices=1, driver="NVIDIA 535", platform="cuda")
AMD = Gpus(devices=1, driver="amdgpu", platform="rocm", direct="amdgpu", plugins=PLUGINS)

FINDINGS: dict[str, tuple[Machine, str, Level, str]] = {
    "no GPU": (but(gpus=Gpus()), "GPU", Level.NOTE, "no device"),
    "eight": (but(gpus=EIGHT), "GPU", Level.GOOD, "8 with NVIDIA 580"),
    "UCX without ROCm": (but(gpus=AMD), "GPU", Level.ERROR, "UCX has cma, cuda, ib"),
    "UCX_TLS without cuda": (
        but(gpus=EIGHT, environment={"UCX_TLS": "rc,sm"}),
        "GPU",
        Level.ERROR,
        "UCX_TLS=rc,sm",
    ),
    "UCX_TLS that excludes cuda": (
        but(gpus=EIGHT, environment={"UCX_TLS": "^cuda_copy"}),
        "GPU",
        Level.ERROR,
        "^cuda_copy",
    ),
    "UCX_TLS with cuda_copy": (
        but(gpus=EIGHT, environment={"UCX_TLS": "rc,cuda_copy"}),
        "GPU",
        Level.GOOD,
        "8 with",
    ),
    "direct": (but(gpus=EIGHT), "GPUDirect RDMA", Level.GOOD, "by DMA-BUF"),
    "not direct": (but(gpus=BARE), "GPUDirect RDMA", Level.WARNING, "nvidia_peermem is not loaded"),
    "switched off": (
        but(gpus=EIGHT, environment={"UCX_IB_GPU_DIRECT_RDMA": "n"}),
        "GPUDirect RDMA",
        Level.WARNING,
        "UCX_IB_GPU_DIRECT_RDMA=n",
    ),
    "no fabric": (but(gpus=EIGHT, rdma=()), "GPUDirect RDMA", Level.NOTE, "no RDMA device"),
    "no GDRCopy": (
        but(gpus=EIGHT),
        "GDRCopy",
        Level.NOTE,
        "gdrdrv is not loaded, UCX has no plugin for it",
    ),
    "GDRCopy": (
        but(gpus=Gpus(devices=1, platform="cuda", gdrcopy=True)),
        "GDRCopy",
        Level.GOOD,
        "available",
    ),
    "IPC switched off": (
        but(gpus=EIGHT, environment={"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "auto"}),
        "CUDA IPC",
        Level.NOTE,
        "UCX_CUDA_IPC_ENABLE_GET_ZCOPY=auto",
    ),
}


@pytest.mark.parametrize(("machine", "check", "level", "measured"), FINDINGS.values(), ids=FINDINGS)
def test_findings_about_gpus(machine: Machine, check: str, level: Level, measured: str) -> None:
    (finding,) = [one for one in examine(machine) if one.check == check]
    assert finding.level is level
    assert measured in finding.measured
    assert bool(finding.remedy) == (level in (Level.WARNING, Level.ERROR))


def test_doctor_one_gpu_has_no_finding_about_peers() -> None:
    assert {gpu.devices, gpu.direct, gpu.peers} <= set(CHECKS)
    checks = {one.check for one in examine(but(gpus=BARE))}
    assert "CUDA IPC" not in checks
    assert not {one.check for one in examine(but(gpus=Gpus()))} & {"GDRCopy", "GPUDirect RDMA", "CUDA IPC"}
