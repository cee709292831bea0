"""The device of a worker, and its free memory."""

from __future__ import annotations

import logging

import torch

from baton_api.errors import SetupError
from baton_api.setting_types import show_size
from baton_engine import machine

log = logging.getLogger(__name__)

MEASURED = ("NVIDIA H200",)
"""Names of the GPUs on which workers have run and have been measured, one at a time (benchmarks/LOG.md)."""


def device_of(name: str, ranks: int) -> torch.device:
    """
    Return the device of --device `name`, the first one of `ranks`. Raises SetupError if one is missing.

    The device of a GPU always has a number: torch does not make "cuda" the current device of a thread.
    """
    try:
        device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)
    except RuntimeError as error:
        raise SetupError(f"Invalid --device {name!r}. Use cpu, cuda, cuda:N or auto.") from error
    if device.type not in ("cpu", "cuda"):
        raise SetupError(f"Unsupported --device {name!r}. Use cpu, cuda, cuda:N or auto.")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if (device.index or 0) + ranks > count:
            parallel = f" with --tensor-parallel-size {ranks}" if ranks > 1 else ""
            raise SetupError(
                f"--device {name}{parallel} is not available: torch finds {count} GPUs here. "
                "Use --device cpu."
            )
        device = torch.device("cuda", device.index or 0)
    return device


def has_bfloat16(capability: tuple[int, int], *, rocm: bool) -> bool:
    """
    Return whether a GPU with this compute capability multiplies in bfloat16.

    Older GPUs of NVIDIA do not. torch emulates it there, and counts it as supported.
    """
    return rocm or capability >= (8, 0)


def unmeasured(name: str, ranks: int, *, rocm: bool) -> str:
    """Return what is not known of workers with `ranks` GPUs called `name`. Empty: they have been measured."""
    if rocm:
        where = f"with ROCm, nor on {name}"
    elif name not in MEASURED:
        where = f"on {name}"
    elif ranks > 1:
        where = "on several GPUs"
    else:
        return ""
    return (
        f"Baton's own workers have never been measured {where}, only on one {' or '.join(MEASURED)}: compare "
        'their answers and their speed with vLLM\'s first, see the guide "RDMA and GPUs"'
    )


def warn_if_unmeasured(device: torch.device, ranks: int) -> None:
    """Log `unmeasured` of a GPU."""
    if device.type == "cuda" and (
        unknown := unmeasured(torch.cuda.get_device_name(device), ranks, rocm=torch.version.hip is not None)
    ):
        log.warning("%s", unknown)


def free_bytes(device: torch.device) -> int | None:
    """Return the free memory of `device` in bytes. None: unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return machine.free_memory()


def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that a GPU has for a program; 0 if `device` is no GPU here."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0
    return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)


def taken_bytes(device: torch.device) -> int:
    """Return the bytes of a GPU that torch's allocator has in this process. 0 on a CPU."""
    return int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else 0


def release_memory(device: torch.device) -> None:
    """Return unused memory of torch's allocator to `device`. Memory in pieces then serves larger tensors."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def show_free(device: torch.device) -> str:
    free = free_bytes(device)
    return "unknown" if free is None else show_size(free)


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
