"""A machine on which all is well, to be made wrong in one way at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

from baton_api.workers import EngineKind
from baton_cli.doctor.environment import ROUTERS_SECRET, WORKERS_SECRET
from baton_cli.doctor.machine import (
    Crd,
    EngineWorker,
    Gpus,
    Machine,
    RdmaDevice,
    SelfTest,
    Space,
)

GIB = 1024**3

WELL = Machine(
    name="well",
    environment={"BATON_CACHE": "/cache"},
    known_variables=frozenset({"BATON_CACHE", "BATON_KV_CACHE_MEMORY", ROUTERS_SECRET, WORKERS_SECRET}),
    shm=Space(8 * GIB, 8 * GIB),
    open_files=1_048_576,
    locked=None,
    rdma=(RdmaDevice("mlx5_0", {1: "ACTIVE"}),),
    gpus=Gpus(devices=1, driver="NVIDIA 580.95.05 open", platform="cuda", direct="DMA-BUF", gdrcopy=True),
    interfaces=frozenset({"lo", "eth0"}),
    copies=SelfTest("process_vm_readv"),
    kernels=SelfTest("compiled"),
    nixl=SelfTest("NIXL 1.5.1 with UCX"),
    clock_synchronised=True,
    clock_apart={"http://router": 0.4},
    workers=(
        EngineWorker(
            url="http://vllm",
            engine=EngineKind.VLLM,
            version="0.32.0",
            connector=True,
            kv_events=True,
            prompt_tokens_details=True,
        ),
    ),
)

CRD = Crd("inferenceservices.baton.dev", ("v1alpha1",))


def but(**fields: Any) -> Machine:
    """The same machine with something else about it."""
    return dataclasses.replace(WELL, **fields)
