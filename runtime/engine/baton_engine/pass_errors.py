"""Kinds of errors of forward passes: missing memory, errors that last, and others."""

from __future__ import annotations

import enum
import re

import torch

from baton_engine.model.group import RankFailed

_LIBRARIES = r"(cu|hip|roc)(blas|dnn|fft|rand|solver|sparse)[a-z]*"
DEVICE_ERRORS = re.compile(
    rf"\b((cuda|hip)( driver)?|triton|nvrtc|miopen|{_LIBRARIES}) error\b|\b{_LIBRARIES}_status", re.IGNORECASE
)
"""Texts of errors that torch and Triton raise for an accelerator and its libraries."""

COLLECTIVE_ERRORS = re.compile(r"\b[nr]ccl error\b", re.IGNORECASE)
"""Texts of errors after which the GPUs of a worker cannot communicate any more, whatever the cause."""

MEMORY_ERRORS = ("out of memory", "ALLOC_FAILED")
"""Texts among them that report missing memory, which does not damage the context."""


class FailureKind(enum.Enum):
    MEMORY = "memory"
    """The pass needs more memory than is free."""
    LASTING = "lasting"
    """Every later pass of this process would fail too."""
    OTHER = "other"


def failure_of(error: BaseException) -> FailureKind:
    """Return the kind of an error of a forward pass."""
    text = str(error)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return FailureKind.MEMORY
    if COLLECTIVE_ERRORS.search(text):
        return FailureKind.LASTING
    if isinstance(error, torch.AcceleratorError) or DEVICE_ERRORS.search(text):
        return FailureKind.MEMORY if any(words in text for words in MEMORY_ERRORS) else FailureKind.LASTING
    return FailureKind.LASTING if isinstance(error, RankFailed) else FailureKind.OTHER
