"""
Sampling state of one sequence, and the random numbers of its draws.

The state is updated token by token, so that a draw never scans the sequence; a retracted sequence keeps it.

Random numbers are a function of seed and position instead of a generator that advances: a sequence gets the
same tokens alone, in a batch, after a retraction, or on another worker, and no state is handed over.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from baton_api.sampling import SamplingParams
from baton_engine.requests import GrammarMatcher
from baton_engine.sampling.token_masks import TokenMask

GREEDY_BELOW = 1e-5
"""A lower temperature would overflow; the most likely token has all the mass by then."""


class SamplingState:
    """One request's side of the sampler."""

    __slots__ = (
        "adjusted",
        "drawn",
        "greedy",
        "params",
        "plain",
        "position",
        "seen",
        "suppresses",
        "token_mask",
        "truncated",
    )  # fmt: skip

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], matcher: GrammarMatcher | None = None
    ) -> None:
        """Raises as `TokenMask.push` if what was drawn before is not what may be."""
        self.params = params
        self.token_mask = TokenMask.of(params, matcher)
        """Which tokens may be drawn at all; None for a request that says nothing about it."""
        given = prompt[: len(prompt) - params.drawn]
        self.position = len(given)
        """Position in the sequence of the next token: what its random number is drawn for."""
        self.drawn = 0
        self.greedy = params.temperature < GREEDY_BELOW or params.top_p <= 0.0 or params.top_k == 1
        self.truncated = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        """Whether some tokens are out of the question for being unlikely."""
        penalised = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self.suppresses = params.min_tokens > 0 and self.token_mask is None
        """Whether stop ids have to be kept from being drawn at first; the token mask does it themselves."""
        self.adjusted = penalised or bool(params.logit_bias) or self.suppresses
        """Whether logits are changed before anything else."""
        self.plain = self.greedy and not self.adjusted and params.logprobs is None
        """Whether the token is the one with the highest logit, and nothing else is asked for."""
        self.seen = Seen(given if params.repetition_penalty != 1.0 else ()) if penalised else None
        for token in prompt[len(given) :]:
            self.push(token)

    def push(self, token: int) -> None:
        """The token was drawn, here or by the worker that computed the prompt. Raises as `TokenMask.push`."""
        self.position += 1
        self.drawn += 1
        if self.seen is not None:
            self.seen.push(token)
        if self.token_mask is not None:
            self.token_mask.push(token)


class Seen:
    """The distinct tokens that penalties concern, each with its count in the output."""

    __slots__ = ("_counts", "_ids", "_index")

    def __init__(self, prompt: Sequence[int]) -> None:
        distinct = sorted(set(prompt))
        self._index = {token: place for place, token in enumerate(distinct)}
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
        place = self._index.setdefault(token, len(self._index))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        self._counts[place] += 1


_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def uniform(seed: int, position: int) -> float:
    """
    A number in [0, 1) with 53 random bits.

    >>> uniform(1, 2) == uniform(1, 2) != uniform(2, 1)
    True
    """
    # The seed is mixed before the position is added, or neighbouring seeds would share their numbers.
    return (_mix(_mix(seed + _GOLDEN) + position * _GOLDEN) >> 11) * 2.0**-53


def _mix(value: int) -> int:
    """SplitMix64's finaliser: every bit of the input moves every bit of the result."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)
