"""Choice of the operations of a decoder: by its device, and by what is installed."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping

import torch

from baton_api.errors import SetupError
from baton_engine.model import native_decoder
from baton_engine.model.quantized import NATIVE_FORMATS, Format
from baton_engine.model.spec import ModelSpec, Quantize
from baton_engine.ops import Ops
from baton_engine.ops.cpu import CpuOps
from baton_engine.ops.native.library import disabled
from baton_engine.ops.plain import PlainOps

log = logging.getLogger(__name__)


def create_ops(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, environment: Mapping[str, str] = os.environ
) -> Ops:
    """Return the fastest operations for `device`, and log which parts of the model torch computes."""
    if device.type == "cpu":
        return CpuOps(spec, dtype)
    if reason := _missing(environment):
        log.warning("torch computes all operations, which is slow: %s", reason)
        return PlainOps(spec)
    from baton_engine.ops.accelerator import AcceleratorOps

    ops = AcceleratorOps(spec)
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
) -> tuple[Quantize, Collection[Format]]:
    """
    Return how to load the matrices, and the formats that the model keeps.

    That is `choice`, or "off" instead of "keep" if kernels do not run the model. Raises SetupError if it is a
    format that requires them.
    """
    on_cpu = device.type == "cpu"
    formats = NATIVE_FORMATS if on_cpu else frozenset(Format)
    if choice == "off":
        return choice, formats
    if spec.experts is not None:
        reason = "they expand the weights of models with experts"
    elif on_cpu:
        runs = native_decoder.supports(spec, dtype) and native_decoder.available(environment)
        reason = "" if runs else "a C compiler is missing, or they do not support the model"
    else:
        reason = _missing(environment)
    if reason and choice != "keep":
        raise SetupError(
            f"--quantize {choice} requires kernels, which do not run {spec.architecture} in {dtype} on "
            f"{device}: {reason}. Use --quantize off."
        )
    return "off" if reason else choice, formats


def _missing(environment: Mapping[str, str]) -> str:
    """Return why there are no kernels of accelerators, or an empty string."""
    if disabled(environment):
        return "BATON_KERNELS disables the kernels"
    try:
        import baton_engine.ops.accelerator  # noqa: F401
    except ImportError as error:
        return f"{error}; install triton"
    return ""
