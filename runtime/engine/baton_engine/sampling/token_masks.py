"""
Masks of the tokens that a request may generate next: one bit per token, and their application to logits.

A `TokenMask` combines a request's grammar matcher, allowed ids, bad words and minimum length. The grammar is
mandatory. The others are preferences: one that would leave no token, such as a minimum length after the
answer is complete, is ignored for that token.

A `MaskFiller` fills the masks of a batch on separate threads during the forward pass. Grammar matchers
release the interpreter lock. A mask that cannot be filled ends only its own request.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from baton_api.errors import INVALID_VALUE, BatonError, InternalError, InvalidRequest
from baton_api.sampling import SamplingParams
from baton_engine import machine
from baton_engine.requests import GrammarMatcher
from baton_engine.streams import copied

log = logging.getLogger(__name__)

WORD = 32
"""Number of tokens per word."""

THREADS_LIMIT = 4
ROWS_PER_THREAD = 8
"""Minimum number of rows per thread."""

Mask = NDArray[np.int32] | BatonError | None
"""Mask of one batch row: a bit for each allowed token, the error of its computation, or None for no limit."""


class TokenMask:
    """The mask of one request, updated token by token."""

    __slots__ = ("_generated", "_matcher", "_params", "_preferences", "_recent")

    def __init__(self, params: SamplingParams, matcher: GrammarMatcher | None) -> None:
        self._params = params
        self._matcher = matcher
        self._generated = 0
        self._preferences: _Preferences | None = None
        longest = max(map(len, params.bad_words), default=1)
        self._recent: tuple[int, ...] = (-1,) * (longest - 1)
        """The last tokens, for comparison with bad words."""

    @classmethod
    def of(cls, params: SamplingParams, matcher: GrammarMatcher | None) -> TokenMask | None:
        """Create the mask of a request; None if it restricts at most stop ids before its minimum length."""
        if matcher is None and not params.allowed_ids and not params.bad_words:
            return None
        return cls(params, matcher)

    @property
    def finished(self) -> bool:
        return self._matcher is not None and self._matcher.finished

    def push(self, token: int) -> None:
        """Add a generated token. Raises a BatonError if the grammar does not allow it."""
        self._generated += 1
        if self._recent:
            self._recent = (*self._recent[1:], token)
        if self._matcher is not None and token not in self._params.stop_ids:
            self._matcher.push(token)

    def fill(self, mask: NDArray[np.int32], vocab: int) -> bool:
        """
        Set the bits of the allowed tokens, at least one. Returns False if all tokens are allowed.

        Raises a BatonError if the grammar does not allow any token.
        """
        bits = mask.view(np.uint32)
        narrowed = self._matcher is not None and self._matcher.fill(mask)
        if narrowed:
            _trim(bits, vocab)
            if not bits.any():
                raise InvalidRequest(
                    "The answer cannot continue: its constraint allows no token of this model.",
                    code=INVALID_VALUE,
                )
        for preferred in self._preferred(vocab):
            if not narrowed:
                bits.fill(0xFFFFFFFF)
                _trim(bits, vocab)
                narrowed = True
            left = bits & preferred
            if left.any():
                bits[:] = left
        return narrowed

    def _preferred(self, vocab: int) -> Iterator[NDArray[np.uint32]]:
        if self._preferences is None:
            ends = () if self._matcher is None else self._matcher.ends
            self._preferences = _Preferences(self._params, ends, vocab)
        preferences = self._preferences
        if preferences.allowed is not None:
            yield preferences.allowed
        bad = [word[-1] for word in self._params.bad_words if self._ends_with(word[:-1])]
        if bad:
            yield ~_bits(bad, vocab)
        last = preferences.early if self._generated < self._params.min_tokens else preferences.late
        if last is not None:
            yield last

    def _ends_with(self, tokens: Sequence[int]) -> bool:
        return not tokens or self._recent[-len(tokens) :] == tuple(tokens)


class _Preferences:
    """Masks that do not depend on the position. Created on a filler thread."""

    __slots__ = ("allowed", "early", "late")

    def __init__(self, params: SamplingParams, ends: Sequence[int], vocab: int) -> None:
        self.allowed = _bits(params.allowed_ids, vocab) if params.allowed_ids else None
        endless = [end for end in ends if end not in params.stop_ids]
        self.late = ~_bits(endless, vocab) if endless else None
        """Excludes ends that would complete the answer without stopping it, for `ignore_eos`."""
        early = {*ends, *params.stop_ids}
        self.early = ~_bits(early, vocab) if early else None
        """Mask before the minimum length."""


class MaskFiller:
    """Fills the masks of an engine. Used on its thread; each `begin` requires a `PendingMasks.wait`."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._threads = max(1, min(THREADS_LIMIT, machine.usable_cores() // 2))
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="masks")
        self._space = np.zeros((0, mask_words(vocab)), dtype=np.int32)

    def begin(self, token_masks: Sequence[TokenMask | None]) -> PendingMasks:
        """Start to fill the masks of a batch's rows."""
        wanted = [(row, token_mask) for row, token_mask in enumerate(token_masks) if token_mask is not None]
        if len(wanted) > len(self._space):
            self._space = np.zeros((2 * len(wanted), self._space.shape[1]), dtype=np.int32)
        masks: list[Mask] = [None] * len(token_masks)
        rows = [(row, token_mask, self._space[position]) for position, (row, token_mask) in enumerate(wanted)]
        parts = min(self._threads, -(-len(rows) // ROWS_PER_THREAD))
        filling = [self._pool.submit(self._fill, rows[part::parts], masks) for part in range(parts)]
        return PendingMasks(masks, filling)

    def close(self) -> None:
        self._pool.shutdown()

    def _fill(self, rows: Sequence[tuple[int, TokenMask, NDArray[np.int32]]], masks: list[Mask]) -> None:
        for row, token_mask, mask in rows:
            try:
                masks[row] = mask if token_mask.fill(mask, self._vocab) else None
            except BatonError as error:
                masks[row] = error
            except Exception:  # a defect in one request's matcher must not end the other requests
                log.exception("Cannot fill a token mask.")
                masks[row] = InternalError()


class PendingMasks:
    """Masks that are being filled."""

    def __init__(self, masks: list[Mask], parts: Sequence[Future[None]]) -> None:
        self._masks = masks
        self._parts = parts

    def wait(self) -> list[Mask]:
        """Return the masks by row, valid until the next `begin`."""
        for part in self._parts:
            part.result()
        return self._masks


# A table maps each byte of the mask to eight numbers, 0 or minus infinity, which are added to the logits. The
# cost does not depend on the number of bits, and is a quarter of that of unpacked bits and a masked copy.
_BITS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
ADDENDS: NDArray[np.float32] = np.where(_BITS == 1, np.float32(0.0), np.float32(-np.inf)).astype(np.float32)
"""[256, 8]"""


def apply(logits: Tensor, masks: Sequence[tuple[int, NDArray[np.int32]]]) -> None:
    """Set logits [S, V] fp32 to minus infinity where the mask [ceil(V / 32)] of their row has no bit."""
    if not masks:
        return
    if logits.device.type == "cpu":
        apply_on_cpu(logits.numpy(), masks)
    else:
        apply_on_device(logits, masks)


def apply_on_cpu(logits: NDArray[np.float32], masks: Sequence[tuple[int, NDArray[np.int32]]]) -> None:
    space = np.empty((masks[0][1].nbytes, 8), dtype=np.float32)  # shared by all rows
    vocab = logits.shape[1]
    for row, mask in masks:
        np.take(ADDENDS, mask.view(np.uint8), axis=0, out=space, mode="clip")  # other modes copy again
        np.add(logits[row], space.reshape(-1)[:vocab], out=logits[row])


def apply_on_device(logits: Tensor, masks: Sequence[tuple[int, NDArray[np.int32]]]) -> None:
    device, vocab = logits.device, logits.shape[1]
    rows = copied(np.array([row for row, _ in masks]), device)
    octets = copied(np.stack([mask for _, mask in masks]).view(np.uint8), device)
    addends = copied(ADDENDS, device)[octets.long()]  # [rows, octets, 8]
    logits.index_add_(0, rows, addends.flatten(1)[:, :vocab])


def mask_words(vocab: int) -> int:
    """Return the number of words of a mask over `vocab` tokens."""
    return -(-vocab // WORD)


def _bits(tokens: Iterable[int], vocab: int) -> NDArray[np.uint32]:
    bits = np.zeros(mask_words(vocab) * WORD, dtype=np.uint8)
    bits[[token for token in tokens if token < vocab]] = 1  # the tokenizer may have more ids than the model
    return np.packbits(bits, bitorder="little").view(np.uint32)


def _trim(bits: NDArray[np.uint32], vocab: int) -> None:
    """Clear bits beyond the vocabulary."""
    rest = vocab % WORD
    if rest:
        bits[-1] &= np.uint32((1 << rest) - 1)
