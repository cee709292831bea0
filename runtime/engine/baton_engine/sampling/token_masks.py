"""
Which tokens a request may draw next: its guide, allowed ids, bad words and minimum, made into one mask.

The guide is law. The others are wishes: one that would leave nothing at all to be drawn, such as a minimum
of tokens after the answer is complete, is passed over for that token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from baton_api.errors import INVALID_VALUE, InvalidRequest
from baton_engine.requests import Guide, SamplingParams

WORD = 32
"""Tokens whose bits share a word."""


class Permits:
    """Kept up to date token by token."""

    __slots__ = ("_drawn", "_guide", "_params", "_recent", "_wishes")

    def __init__(self, params: SamplingParams, guide: Guide | None) -> None:
        self._params = params
        self._guide = guide
        self._drawn = 0
        self._wishes: _Wishes | None = None
        longest = max(map(len, params.bad_words), default=1)
        self._recent: tuple[int, ...] = (-1,) * (longest - 1)
        """The last tokens, as many as a bad word has before its own last."""

    @classmethod
    def of(cls, params: SamplingParams, guide: Guide | None) -> Permits | None:
        """None for a request that may draw all tokens, but for stop ids before its minimum."""
        if guide is None and not params.allowed_ids and not params.bad_words:
            return None
        return cls(params, guide)

    @property
    def finished(self) -> bool:
        return self._guide is not None and self._guide.finished

    def push(self, token: int) -> None:
        """The token was drawn. Raises a BatonError if the guide does not allow it."""
        self._drawn += 1
        if self._recent:
            self._recent = (*self._recent[1:], token)
        if self._guide is not None and token not in self._params.stop_ids:
            self._guide.push(token)

    def fill(self, mask: NDArray[np.int32], vocab: int) -> bool:
        """
        Set the bit of every token that may be drawn, of at least one; False if all may.

        Raises a BatonError if the guide cannot go on.
        """
        bits = mask.view(np.uint32)
        narrowed = self._guide is not None and self._guide.fill(mask)
        if narrowed:
            _trim(bits, vocab)
            if not bits.any():
                raise InvalidRequest(
                    "The answer cannot go on: no token of this model continues it as its constraint wants.",
                    code=INVALID_VALUE,
                )
        for wish in self._wanted(vocab):
            if not narrowed:
                bits.fill(0xFFFFFFFF)
                _trim(bits, vocab)
                narrowed = True
            left = bits & wish
            if left.any():
                bits[:] = left
        return narrowed

    def _wanted(self, vocab: int) -> Iterator[NDArray[np.uint32]]:
        if self._wishes is None:
            self._wishes = _Wishes(self._params, () if self._guide is None else self._guide.ends, vocab)
        wishes = self._wishes
        if wishes.allowed is not None:
            yield wishes.allowed
        bad = [word[-1] for word in self._params.bad_words if self._ends_with(word[:-1])]
        if bad:
            yield ~_bits(bad, vocab)
        last = wishes.early if self._drawn < self._params.min_tokens else wishes.late
        if last is not None:
            yield last

    def _ends_with(self, tokens: Sequence[int]) -> bool:
        return not tokens or self._recent[-len(tokens) :] == tuple(tokens)


class _Wishes:
    """What does not change from token to token; made where masks are filled."""

    __slots__ = ("allowed", "early", "late")

    def __init__(self, params: SamplingParams, ends: Sequence[int], vocab: int) -> None:
        self.allowed = _bits(params.allowed_ids, vocab) if params.allowed_ids else None
        endless = [end for end in ends if end not in params.stop_ids]
        self.late = ~_bits(endless, vocab) if endless else None
        """Without ends that would complete the answer and not end it, as `ignore_eos` wants it."""
        early = {*ends, *params.stop_ids}
        self.early = ~_bits(early, vocab) if early else None
        """As long as the request may not end."""


def mask_words(vocab: int) -> int:
    return -(-vocab // WORD)


def _bits(tokens: Iterable[int], vocab: int) -> NDArray[np.uint32]:
    bits = np.zeros(mask_words(vocab) * WORD, dtype=np.uint8)
    bits[[token for token in tokens if token < vocab]] = 1  # a tokenizer may know more
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _trim(bits: NDArray[np.uint32], vocab: int) -> None:
    """Forget bits beyond the vocabulary."""
    rest = vocab % WORD
    if rest:
        bits[-1] &= np.uint32((1 << rest) - 1)
