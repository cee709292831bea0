"""
Sampling state of one sequence, and its random numbers.

The state is updated token by token, so that sampling never scans the sequence. A retracted sequence keeps it.

Random numbers are a function of seed and position, not the output of a stateful generator. A sequence
therefore gets the same tokens in any batch, after a retraction, and on another worker.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import copy
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from baton_api.sampling import SamplingParams
from baton_engine.ops.token_weights import GREEDY, TokenRule, scale
from baton_engine.requests import GrammarMatcher
from baton_engine.sampling.token_masks import TokenMask

GREEDY_BELOW = 1e-5
"""Lower temperatures would overflow, and the most likely token has all the mass."""


class SamplingState:
    """The sampler's state of one request."""

    __slots__ = (
        "adjusted",
        "drawn",
        "greedy",
        "params",
        "position",
        "seen",
        "suppresses",
        "token_mask",
    )  # fmt: skip

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], matcher: GrammarMatcher | None = None
    ) -> None:
        """Create the state after `prompt`. Raises as `TokenMask.push` for tokens of a resumed answer."""
        self.params = params
        self.token_mask = TokenMask.of(params, matcher)
        """Mask of the allowed tokens; None if the request does not restrict tokens."""
        given = prompt[: len(prompt) - params.drawn]
        self.position = len(given)
        """Position of the next token in the sequence, the input of its random number."""
        self.drawn = 0
        self.greedy = params.temperature < GREEDY_BELOW or params.top_p <= 0.0 or params.top_k == 1
        penalized = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self.suppresses = params.min_tokens > 0 and self.token_mask is None
        """Whether the sampler suppresses stop ids before the minimum length. A token mask does it
        otherwise."""
        self.adjusted = penalized or bool(params.logit_bias) or self.suppresses
        """Whether logits are modified before the selection."""
        self.seen = TokenCounts(given if params.repetition_penalty != 1.0 else ()) if penalized else None
        for token in prompt[len(given) :]:
            self.push(token)

    def ahead(self, tokens: int) -> SamplingState:
        """
        Return a state for the draft token `tokens` positions later.

        It has the random number of that position. The draft tokens before it are not penalized, and token
        masks do not apply.
        """
        state = copy(self)
        state.position += tokens
        state.drawn += tokens
        state.token_mask = None
        state.params = (
            replace(self.params, logprobs=None) if self.params.logprobs is not None else self.params
        )
        return state

    @property
    def needs_tokens(self) -> bool:
        """Whether the selection of a token depends on the tokens before it."""
        return self.token_mask is not None or self.seen is not None

    def next(self) -> SamplingState:
        """Return a state for the token after the next one, which does not need the next one."""
        state = copy(self)
        state.position += 1
        state.drawn += 1
        return state

    def push(self, token: int) -> None:
        """Add a token sampled by this worker or by the prefill worker. Raises as `TokenMask.push`."""
        self.position += 1
        self.drawn += 1
        if self.seen is not None:
            self.seen.push(token)
        if self.token_mask is not None:
            self.token_mask.push(token)


class TokenCounts:
    """The distinct tokens to penalize, with their counts in the output."""

    __slots__ = ("_counts", "_ids", "_index")

    def __init__(self, prompt: Sequence[int]) -> None:
        distinct = sorted(set(prompt))
        self._index = {token: position for position, token in enumerate(distinct)}
        self._ids = np.zeros(max(64, 2 * len(distinct)), dtype=np.int64)
        self._ids[: len(distinct)] = distinct
        self._counts = np.zeros(len(self._ids), dtype=np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._index)]

    def push(self, token: int) -> None:
        position = self._index.setdefault(token, len(self._index))
        if position == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[position] = token
        self._counts[position] += 1


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """
    Return a number in [0, 1) with 53 random bits.

    >>> uniform(1, 2) == uniform(1, 2) != uniform(2, 1)
    True
    """
    # The seed is mixed before the position is added. Otherwise adjacent seeds would share numbers.
    return (_mix(_mix(seed + _GOLDEN) + position * _GOLDEN) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """Apply SplitMix64's finalizer: every bit of the input affects every bit of the result."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def rule_of(state: SamplingState, vocab: int) -> TokenRule:
    """Return the parameters of the next token."""
    if state.greedy:
        return GREEDY
    params = state.params
    floor = np.float32(2.0 ** scale(vocab)) * np.float32(params.min_p)
    return TokenRule(
        factor=float(np.float32(math.log2(math.e) / params.temperature)),
        floor=max(float(floor), 1.0),
        top_k=params.top_k if params.top_k < vocab else 0,
        top_p=params.top_p,
        number=uniform(params.seed, state.position),
    )
