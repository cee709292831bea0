"""
Grammar matchers of the engine: one for a grammar, one for thoughts before an answer.

`LLGuidanceMatcher` follows one llguidance matcher. `ThinkingMatcher` passes through three phases:

    opening -> thinking -> answering

A model that may skip thinking starts in `opening`: the next token is the first of the thought's start mark,
or of the answer. A thought may hold any token except an end of sequence, which would leave the constraint
unmet. Once the budget is used up, the end mark is forced, id by id. The constraint holds from there on.
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


class ThinkingPhase(enum.Enum):
    OPENING = enum.auto()
    THINKING = enum.auto()
    ANSWERING = enum.auto()


class ThinkingMatcher:
    """Lets the model think, and then keeps to `answer`, if there is one."""

    def __init__(self, thinking: Thinking, answer: Callable[[], GrammarMatcher] | None) -> None:
        """`answer` gives a guide that stands at its start; thoughts that came to nothing do not count."""
        self._thinking = thinking
        self._fresh = answer
        self._answer = None if answer is None else answer()
        self.ends: tuple[int, ...] = () if self._answer is None else self._answer.ends
        self._phase = ThinkingPhase.OPENING if thinking.start else ThinkingPhase.THINKING
        self._opened = 0
        """Ids of the start that were written."""
        self._spent = 0
        """Tokens of thought."""
        self._closed = 0
        """Ids of the end that were written, if they turn out to be it."""

    @property
    def finished(self) -> bool:
        return self._phase is ThinkingPhase.ANSWERING and self._answer is not None and self._answer.finished

    def fill(self, mask: NDArray[np.int32]) -> bool:
        match self._phase:
            case ThinkingPhase.OPENING:
                if self._fresh is None:
                    return False
                if self._answer is None:  # only the thought goes on as the text has begun
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
        # An end that has begun is thought as long as it may turn out to be none.
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
    """How many ids of `pattern` the text ends with, after `count` of them and then `token`."""
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
