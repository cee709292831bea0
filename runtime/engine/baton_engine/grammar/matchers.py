"""
Grammar matchers of the engine: for a grammar, and for reasoning before an answer.

`LLGuidanceMatcher` wraps a matcher of llguidance. `ThinkingMatcher` has three phases:

    opening -> thinking -> answering

If reasoning is optional, the matcher starts in `opening`: the next token begins the start mark or the answer.
Reasoning may contain any token except an end of sequence, which would leave the constraint unmet. When the
budget is used up, the end mark is forced token by token. The constraint applies after the end mark.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from baton_api.errors import INVALID_VALUE, ConstraintBroken, InvalidRequest
from baton_api.sampling import Thinking
from baton_engine.requests import GrammarMatcher

SLOW_MASK_S = 0.5
"""Maximum processor seconds for one mask. A slower mask ends the answer, because all requests wait for it.
Validation does not detect every such constraint."""

FORBIDDEN = "doesn't satisfy the grammar"
"""Part of llguidance's error for a token that the grammar does not allow. Other errors are exceeded
limits."""


class LLGuidanceMatcher:
    """Allows tokens that continue a text of the grammar, and an end of sequence after a complete text."""

    def __init__(self, compiled: LLMatcher, ends: tuple[int, ...]) -> None:
        """`compiled` is shared and stays at its start. Each matcher copies it."""
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
        # Copied at the first use on an engine thread, because the event loop may create many matchers.
        if self._matcher is None:
            self._matcher = self._compiled.deep_copy()
        return self._matcher


def _too_complex() -> InvalidRequest:
    return InvalidRequest(
        "The answer cannot continue: its constraint became too complex for this worker. Simplify it.",
        code=INVALID_VALUE,
    )


class ThinkingPhase(enum.Enum):
    OPENING = enum.auto()
    THINKING = enum.auto()
    ANSWERING = enum.auto()


class ThinkingMatcher:
    """Allows reasoning, then applies the matcher of the answer, if there is one."""

    def __init__(self, thinking: Thinking, answer: Callable[[], GrammarMatcher] | None) -> None:
        """`answer` creates the matcher of the answer, which starts after the reasoning."""
        self._thinking = thinking
        self._fresh = answer
        self._answer = None if answer is None else answer()
        self.ends: tuple[int, ...] = () if self._answer is None else self._answer.ends
        self._phase = ThinkingPhase.OPENING if thinking.start else ThinkingPhase.THINKING
        self._opened = 0
        """Number of tokens of the start mark that were generated."""
        self._spent = 0
        """Number of reasoning tokens."""
        self._closed = 0
        """Number of tokens at the end that match the start of the end mark."""

    @property
    def finished(self) -> bool:
        return self._phase is ThinkingPhase.ANSWERING and self._answer is not None and self._answer.finished

    def fill(self, mask: NDArray[np.int32]) -> bool:
        match self._phase:
            case ThinkingPhase.OPENING:
                if self._fresh is None:
                    return False
                if self._answer is None:  # the text so far matches only the start mark
                    mask.fill(0)
                elif not self._answer.fill(mask):
                    return False
                allow(mask, self._thinking.start[self._opened])
                return True
            case ThinkingPhase.THINKING:
                if self._overdue:
                    mask.fill(0)
                    allow(mask, self._thinking.end[self._closed])
                    return True
                if not self.ends:
                    return False
                mask.fill(-1)
                for end in self.ends:
                    forbid(mask, end)
                return True
            case ThinkingPhase.ANSWERING:
                return self._answer is not None and self._answer.fill(mask)

    def push(self, token: int) -> None:
        match self._phase:
            case ThinkingPhase.OPENING:
                self._open(token)
            case ThinkingPhase.THINKING:
                self._think(token)
            case ThinkingPhase.ANSWERING:
                if self._answer is not None:
                    self._answer.push(token)

    @property
    def _overdue(self) -> bool:
        budget = self._thinking.budget
        # Tokens of an incomplete end mark count as reasoning.
        return budget is not None and self._spent + self._closed >= budget

    def _open(self, token: int) -> None:
        opens = token == self._thinking.start[self._opened]
        if self._answer is not None:
            try:
                self._answer.push(token)
            except ConstraintBroken:
                if not opens:
                    raise
                self._answer = None
        elif self._fresh is not None and not opens:
            raise ConstraintBroken(token)
        if not opens:
            self._phase = ThinkingPhase.ANSWERING
            return
        self._opened += 1
        if self._opened == len(self._thinking.start):
            self._phase = ThinkingPhase.THINKING

    def _think(self, token: int) -> None:
        if self._overdue and token != self._thinking.end[self._closed]:
            raise ConstraintBroken(token)
        before = self._closed
        self._closed = matched(self._thinking.end, before, token)
        self._spent += before + 1 - self._closed
        if self._closed == len(self._thinking.end):
            self._phase = ThinkingPhase.ANSWERING
            self._answer = None if self._fresh is None else self._fresh()


def matched(pattern: Sequence[int], count: int, token: int) -> int:
    """Return how many tokens of `pattern` match after `count` matching ones and then `token`."""
    text = (*pattern[:count], token)
    return next(
        length
        for length in range(min(len(text), len(pattern)), -1, -1)
        if text[len(text) - length :] == tuple(pattern[:length])
    )


def allow(mask: NDArray[np.int32], token: int) -> None:
    mask.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))


def forbid(mask: NDArray[np.int32], token: int) -> None:
    mask.view(np.uint32)[token >> 5] &= np.uint32(0xFFFFFFFF ^ (1 << (token & 31)))
