"""A compiled grammar as the engine asks it: one llguidance matcher for each answer."""

from __future__ import annotations

import time

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from baton_api.errors import INVALID_VALUE, ConstraintBroken, InvalidRequest

SLOW_MASK_S = 0.5
"""Processor time for one mask after which an answer ends: the trial could not foresee it, and all wait."""

FORBIDDEN = "doesn't satisfy the grammar"
"""What llguidance says of a token that is not one of those that could come; all else are limits."""


class LLGuidanceMatcher:
    """Allows what continues a text of the grammar, and an end of sequence where one is whole."""

    def __init__(self, compiled: LLMatcher, ends: tuple[int, ...]) -> None:
        """`compiled` stands at the start and is never moved: whoever begins copies it."""
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self.ends = ends
        self.finished = False

    def fill(self, mask: NDArray[np.int32]) -> bool:
        matcher = self._started()
        began = time.thread_time()
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error() or time.thread_time() - began > SLOW_MASK_S:
            raise _too_complex()
        return True

    def push(self, token: int) -> None:
        matcher = self._started()
        if not matcher.consume_token(token):
            raise ConstraintBroken(token) if FORBIDDEN in matcher.get_error() else _too_complex()
        self.finished = matcher.is_stopped()

    def _started(self) -> LLMatcher:
        # Copied at the first use, which is on the engine's threads, not where a hundred choices are made.
        if self._matcher is None:
            self._matcher = self._compiled.deep_copy()
        return self._matcher


def _too_complex() -> InvalidRequest:
    return InvalidRequest(
        "The answer cannot go on: its constraint became too complex for this worker. Simplify it.",
        code=INVALID_VALUE,
    )
