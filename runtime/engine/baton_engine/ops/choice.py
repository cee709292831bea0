"""Choice of the operations of a decoder, and of its dtype: by its device, and by what is installed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.devices import has_bfloat16, shared_memory
from baton_engine.kv.cache import FLOAT8_CACHE
from baton_engine.ops import Ops, launchers
from baton_engine.ops.cpu import CpuOps, preferred_dtype
from baton_engine.ops.native import support
from baton_engine.ops.native.library import disabled
from baton_engine.ops.plain import PlainOps
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
    if spec.latent is not None:
        reason = "they expand the weights of models with latent attention"
    elif on_cpu and spec.experts is not None:
        reason = "those of CPUs expand the weights of models with experts"
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
    return launchers.prepare(environment)


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
