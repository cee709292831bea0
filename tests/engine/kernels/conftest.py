"""
For the tests of accelerators' kernels: the device that runs them, else Triton's interpreter.

Triton decides while a kernel is defined whether it is interpreted. So the variable is set while the kernels
are imported and no longer: other tests of this process do not see it. Builds of torch for CPUs only come
without Triton: then these tests are not collected.
"""

from __future__ import annotations

import os
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent

with pytest.MonkeyPatch.context() as patch:
    if not torch.cuda.is_available():
        patch.setenv("TRITON_INTERPRET", "1")
    try:
        # Triton's interpreter imports this module at the first launch, when the variable is no longer set.
        import_module("triton.experimental.gluon")
        import_module("baton_engine.ops.accelerator")
        import_module("baton_engine.ops.kernels.checksums")
        import_module("baton_engine.ops.kernels.sampling")
        if not torch.cuda.is_available():
            import_module("tests.engine.kernels.interpreter").install()
    except ImportError:
        collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """For whole models. Tests of single products have as many outputs to a program as on a device."""
    if not torch.cuda.is_available():
        from tests.engine.kernels.interpreter import ROW_OUTPUTS

        monkeypatch.setattr("baton_engine.ops.kernels.quantized.ROW_OUTPUTS", ROW_OUTPUTS)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch, few_programs: None) -> None:
    """
    Workers on the CPU compute with the kernels, in this process and in those that it starts.

    Not where a device runs them. The interpreter keeps the state of a launch in global variables, so the
    engines of a process take turns.
    """
    if torch.cuda.is_available():
        return
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(HERE / "started"), str(HERE.parents[2]))))
    run, lock = InterpretedFunction.run, threading.Lock()

    def run_locked(*args: Any, **kwargs: Any) -> None:
        with lock:
            run(*args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", run_locked)
