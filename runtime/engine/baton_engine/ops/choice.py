"""
Choice of the operations of a decoder, and of its dtype: by its device, and by what is installed.

Triton compiles its launchers, the part of a kernel on the host, in C before the first kernel. It finds `$CC`,
gcc and clang only. Images of workers have none of them, but the clang in the `ziglang` wheel; `build.impl`, a
setting of Triton, replaces the command.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.devices import has_bfloat16, shared_memory
from baton_engine.kv.cache import FLOAT8_CACHE
from baton_engine.ops import Ops
from baton_engine.ops.native import support
from baton_engine.ops.native.library import Unavailable, disabled, find_compiler
from baton_engine.ops.plain import CpuOps, PlainOps, preferred_dtype
from baton_engine.quantized import NATIVE_FORMATS, Format
from baton_engine.spec import ModelSpec, Quantize

if TYPE_CHECKING:
    from baton_engine.ops.token_weights import TokenRule

log = logging.getLogger(__name__)


def interpreted(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether Triton's interpreter runs the kernels of accelerators on CPUs, which is for tests."""
    return environment.get("TRITON_INTERPRET") == "1"


def create_ops(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, environment: Mapping[str, str] = os.environ
) -> Ops:
    """Return the fastest operations for `device`, and log which parts of the model torch computes."""
    if _computes_itself(device.type, environment):
        return CpuOps(spec, dtype)
    if reason := _missing(environment):
        log.warning("torch computes all operations, which is slow: %s", reason)
        return PlainOps(spec)
    from baton_engine.ops.accelerator import AcceleratorOps

    if device.type == "cpu":
        log.warning("TRITON_INTERPRET is set: an interpreter runs Triton kernels, for tests only")
    ops = AcceleratorOps(spec, shared_memory(device))
    if ops.unsupported:
        log.warning("Triton kernels compute all but attention, which torch computes: %s", ops.unsupported)
    else:
        log.info("Triton kernels compute norms, activations, rotation and attention")
    return ops


def kept_formats(
    choice: Quantize,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    environment: Mapping[str, str] = os.environ,
    ranks: int = 1,
) -> tuple[Quantize, Collection[Format]]:
    """
    Return how to load the matrices, and the formats that the model keeps in each of its ranks.

    That is `choice`, or "off" instead of "keep" if kernels do not run the model. Raises SetupError if it is a
    format that requires them.
    """
    on_cpu = _computes_itself(device.type, environment)
    formats = NATIVE_FORMATS if on_cpu else frozenset(Format)
    if choice == "off":
        return choice, formats
    if on_cpu and spec.latent is not None:
        reason = "those of CPUs expand the weights of models with latent attention"
    elif on_cpu and ranks > 1:
        reason = "ranks on a CPU compute with torch operations"
    elif on_cpu:
        runs = support.supports(spec, dtype) and support.available(environment)
        reason = "" if runs else "a C compiler is missing, or they do not support the model"
    else:
        reason = _missing(environment)
    if reason and choice != "keep":
        raise SetupError(
            f"--quantize {choice} requires kernels, which do not run {spec.architecture} in {dtype} on "
            f"{device}: {reason}. Use --quantize off."
        )
    if reason:
        log.info("Weights of %s that are quantized are expanded on %s: %s", spec.architecture, device, reason)
    return "off" if reason else choice, formats


def kv_dtype(
    choice: Literal["auto", "fp8"],
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    environment: Mapping[str, str] = os.environ,
) -> torch.dtype:
    """Return the data type of the KV cache. Raises SetupError if the operations of the model lack it."""
    if choice == "auto":
        return dtype
    reason: str | None = "the kernels of CPUs do not read it"
    if not _computes_itself(device.type, environment) and not (reason := _missing(environment)):
        from baton_engine.ops.accelerator import AcceleratorOps

        reason = AcceleratorOps(spec).unsupported
    if reason:
        raise SetupError(
            f"--kv-cache-dtype {choice} does not work for {spec.architecture} on {device}: {reason}. Use "
            "--kv-cache-dtype auto."
        )
    return FLOAT8_CACHE


def _computes_itself(device_type: str, environment: Mapping[str, str]) -> bool:
    """Return whether a CPU computes with its own operations, not with an accelerator's kernels."""
    return device_type == "cpu" and not interpreted(environment)


def _missing(environment: Mapping[str, str]) -> str:
    """Return why there are no kernels of accelerators, or an empty string."""
    return "BATON_KERNELS disables the kernels" if disabled(environment) else _unusable(environment)


def _unusable(environment: Mapping[str, str]) -> str:
    """Return why kernels cannot run on this machine, or an empty string."""
    try:
        import baton_engine.ops.accelerator  # noqa: F401
    except ImportError as error:
        return f"{error}; install triton"
    if not torch.cuda.is_available():
        return ""
    capability = torch.cuda.get_device_capability()
    if not has_bfloat16(capability, rocm=torch.version.hip is not None):
        return f"Triton does not support GPUs with compute capability {capability[0]}.{capability[1]}"
    return prepare_launchers(environment)


def selection(
    device_type: str, environment: Mapping[str, str] = os.environ
) -> Callable[[Tensor, Sequence[TokenRule]], Tensor] | None:
    """Return the kernels that select tokens [S] on this type of device; None if the host selects them."""
    if not runs_kernels(device_type, environment):
        return None
    from baton_engine.ops.kernels.sampling import select_on_device

    return select_on_device


def runs_kernels(device_type: str, environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether kernels of accelerators run on this type of device. `create_ops` logs the reason."""
    return not (_computes_itself(device_type, environment) or disabled(environment) or _unusable_here())


@cache
def _unusable_here() -> str:
    return _unusable(os.environ)


def dtype_of(name: str, device: torch.device) -> torch.dtype:
    """Return the data type of --dtype `name`."""
    match name:
        case "float32":
            return torch.float32
        case "bfloat16":
            return torch.bfloat16
        case _ if device.type == "cpu":
            return preferred_dtype(torch.cpu.get_capabilities(), support.available())
        case _:
            capability = torch.cuda.get_device_capability(device)
            if has_bfloat16(capability, rocm=torch.version.hip is not None):
                return torch.bfloat16
            log.warning(
                "%s (compute capability %d.%d) has no products of bfloat16: weights and KV cache are in "
                "float32, twice the size",
                torch.cuda.get_device_name(device),
                *capability,
            )
            return torch.float32


LAUNCHER_FLAGS = ("-O3", "-shared", "-fPIC", "-Wno-psabi")
"""Those of Triton."""

PYTHON_HEADERS = Path(sysconfig.get_paths()["include"])
"""Folder of Python's headers."""

Build = Callable[[str, str, str, list[str], list[str], list[str]], str]
"""Compiles a module of Python. Returns its path."""


def prepare_launchers(environment: Mapping[str, str], headers: Path = PYTHON_HEADERS) -> str:
    """Give Triton a compiler where it does not find one. Returns why it cannot compile launchers, or ""."""
    if not (headers / "Python.h").is_file():
        return f"{headers} has no Python.h, with which Triton compiles its launchers; install python3-dev"
    path = environment.get("PATH", "")
    if environment.get("CC") or any(shutil.which(name, path=path) for name in ("gcc", "clang")):
        return ""
    try:
        compiler = find_compiler(environment)
    except Unavailable as error:
        return f"Triton compiles its launchers, but {error}"
    import triton

    triton.knobs.build.impl = build_with(compiler, headers)
    return ""


def build_with(compiler: Sequence[str], headers: Path) -> Build:
    """Return a function that compiles with the command `compiler`, as Triton itself does with gcc."""

    def build(
        name: str,
        source: str,
        folder: str,
        library_dirs: list[str],
        include_dirs: list[str],
        libraries: list[str],
    ) -> str:
        built = Path(folder) / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
        command = [*compiler, source, *LAUNCHER_FLAGS, "-o", str(built)]
        # A colon precedes the name of a file. Other libraries have a name without prefix and ending.
        command += [f"-l:{library}" if ".so" in library else f"-l{library}" for library in libraries]
        command += [f"-L{path}" for path in library_dirs]
        command += [f"-I{path}" for path in (*include_dirs, folder, headers)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"Triton's launcher {name} cannot be compiled: {done.stderr.strip()[-1000:]}")
        return str(built)

    return build
