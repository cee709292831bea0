"""The kernels compile for accelerators, within their shared memory. No device is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

KIB = 1024

SHARED = {"sm_80": 99 * KIB, "sm_90": 227 * KIB, "gfx942": 64 * KIB}
"""Bytes per program. Of the devices that run sm_80's code, those of consumers have the least."""


@pytest.mark.slow
def test_kernels_compile_for_cuda_and_rocm(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    compiled = subprocess.run(
        [sys.executable, "-m", "tests.engine.kernels.compiling"],
        cwd=Path(__file__).parents[3],
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert compiled.returncode == 0, compiled.stderr
    kernels = [line.rsplit(" ", 3) for line in compiled.stdout.splitlines()]
    assert {name.split(" ", 1)[0] for name, *_ in kernels} == SHARED.keys()
    for name, kernel, shared, _ in kernels:
        assert int(shared) <= SHARED[name.split(" ", 1)[0]], f"{kernel}: {name}"
