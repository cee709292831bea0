"""The kernels compile for accelerators, within their shared memory and registers. No device is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine.kernels.compiling import SHARED, SPILLS


@pytest.mark.slow
def test_kernels_compile_for_cuda_and_rocm() -> None:
    """One process per target. Triton's cache has what an earlier run compiled from the same sources."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    processes = {
        target: subprocess.Popen(
            [sys.executable, "-m", "tests.engine.kernels.compiling", target],
            cwd=Path(__file__).parents[3],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for target in SHARED
    }
    ended = {target: (process.communicate(), process.returncode) for target, process in processes.items()}
    for target, ((output, errors), status) in ended.items():
        assert status == 0, errors
        assert output
        assert "UserWarning" not in errors
        for name, kernel, shared, spilled in [line.rsplit(" ", 3) for line in output.splitlines()]:
            assert int(shared) <= SHARED[target], f"{kernel}: {name}, {target}"
            assert int(spilled) <= SPILLS.get((name, kernel), 0), f"{kernel}: {name}, {target}"
