"""Choice of the operations of a decoder: by its device, and by what is installed."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

import torch

from baton_engine.model.spec import ModelSpec
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
    if disabled(environment):
        log.warning("torch computes all operations, which is slow: BATON_KERNELS disables the kernels")
        return PlainOps(spec)
    try:
        from baton_engine.ops.accelerator import AcceleratorOps
    except ImportError as error:
        log.warning("torch computes all operations, which is slow: %s. Install triton.", error)
        return PlainOps(spec)
    ops = AcceleratorOps(spec)
    if ops.unsupported:
        log.warning("Triton kernels compute all but attention, which torch computes: %s", ops.unsupported)
    else:
        log.info("Triton kernels compute norms, activations, rotation and attention")
    return ops
