"""
Selection of tokens from logits, by inverse transform sampling with one uniform number per token.

The vocabulary is processed in blocks and usually not sorted. The highest logit is searched in the block with
the highest maximum. A uniform number is searched in the block where the cumulative sums exceed it. Top-k,
top-p and min-p each determine a least weight to keep. The 64th highest block maximum limits the search for it
to a few likely tokens in nearly all cases.

The token of a row depends only on its logits, parameters and position, not on other rows. Weights and their
sums are exact integers (`baton_engine.ops.token_weights`), so kernels on an accelerator select the same
token.

Order of the steps: token mask, repetition penalty, frequency and presence penalty, logit bias, suppressed
stop ids, temperature, min-p, top-k, and top-p of the remaining tokens. Tokens with the same weight as the
least kept one are kept too. Logprobs are those of the model's unmodified logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_api.messages import TokenChoice
from baton_api.sampling import SamplingParams
from baton_engine.ops.choice import selection as kernels_of
from baton_engine.ops.token_weights import BLOCK, GREEDY, TokenRule, weigh
from baton_engine.sampling import token_masks
from baton_engine.sampling.logprobs import Logprobs
from baton_engine.sampling.state import SamplingState, TokenCounts, rule_of
from baton_engine.streams import copied, finish, to_host

CANDIDATES = (64, 512)
"""Minimum numbers of likely tokens in which the least kept one is searched, before all tokens are."""


def sample(
    logits: Tensor, states: Sequence[SamplingState], masks: Sequence[NDArray[np.int32] | None] = ()
) -> list[TokenChoice | None]:
    """Wait for the choices of `select`, and return them."""
    selection = select(logits, states, masks)
    finish(logits.device)
    return selection.read()


def select(
    logits: Tensor, states: Sequence[SamplingState], masks: Sequence[NDArray[np.int32] | None] = ()
) -> Selection:
    """
    Select one token for each row of `logits` [S, V] fp32, which may be overwritten.

    `masks` has a bit for each allowed token, or None for a row without a mask. With kernels, this does not
    wait for the device.
    """
    if len(states) != len(logits):
        raise ValueError(
            f"Invalid number of states: {len(states)}. Expected {len(logits)}, one for each row."
        )
    logits = logits.contiguous()
    masked = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
    reported = Logprobs(logits, states)
    token_masks.apply(logits, masked)
    _adjust(logits, states)
    rules = [GREEDY if state.greedy else rule_of(state, logits.shape[1]) for state in states]
    by_kernels = kernels_of(logits.device.type)
    selected = select_on_host(logits, rules) if by_kernels is None else by_kernels(logits, rules)
    return Selection(selected, logits.device, reported)


class Selection:
    """The selected tokens of S rows, before the host has read them."""

    def __init__(self, selected: Tensor | list[int | None], device: torch.device, reported: Logprobs) -> None:
        """`selected`: see `tokens`, or the tokens on the host."""
        self._selected = selected
        self._device = device
        self._reported = reported
        if reported.rows:
            reported.gather(self.tokens)
        self._on_host = to_host(selected) if isinstance(selected, Tensor) else None

    @cached_property
    def tokens(self) -> Tensor:
        """[S] on the device, -1 for a row with NaN or infinity in its logits, or without an allowed token."""
        if isinstance(self._selected, Tensor):
            return self._selected
        numbers = [-1 if token is None else token for token in self._selected]
        return copied(np.array(numbers, dtype=np.int32), self._device)

    def read(self) -> list[TokenChoice | None]:
        """Return the choices, None for -1. Wait for an event behind the selection first, on a device."""
        tokens = self._selected
        if isinstance(tokens, Tensor):
            assert self._on_host is not None
            tokens = [None if token < 0 else token for token in self._on_host.tolist()]
        if not self._reported.rows:
            return [None if token is None else TokenChoice(token=token) for token in tokens]
        return [
            None if token is None else self._reported.choice(row, token) for row, token in enumerate(tokens)
        ]


def select_on_host(logits: Tensor, rules: Sequence[TokenRule]) -> list[int | None]:
    """Return the token of each row of `logits`, which may be overwritten; None for a row with bad logits."""
    likeliest, healthy = _most_likely(logits)
    tokens = [token if good else None for token, good in zip(likeliest, healthy, strict=True)]
    chance = [row for row, rule in enumerate(rules) if rule.factor and healthy[row]]
    if chance:
        peaks = logits[chance, [likeliest[row] for row in chance]]
        drawn = _draw(_select(logits, chance), peaks, [rules[row] for row in chance])
        for row, token in zip(chance, drawn, strict=True):
            tokens[row] = token
    return tokens


def _most_likely(logits: Tensor) -> tuple[list[int], list[bool]]:
    """Return the first token with the highest logit of each row, and whether this logit is finite."""
    rows, vocab = logits.shape
    if vocab % BLOCK:  # padding the last block would cost as much
        tokens = logits.argmax(-1, keepdim=True)
    else:
        blocks = logits.view(rows, -1, BLOCK)
        block = blocks.amax(-1).argmax(-1, keepdim=True)
        inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)
        tokens = block * BLOCK + inside.argmax(-1, keepdim=True)
    healthy = logits.gather(1, tokens).isfinite()
    return tokens.squeeze(1).tolist(), healthy.squeeze(1).tolist()


def _adjust(logits: Tensor, states: Sequence[SamplingState]) -> None:
    """Apply penalties, bias and suppressed ids to contiguous logits, in place."""
    vocab, flat = logits.shape[1], logits.view(-1)
    rows = [(row * vocab, state) for row, state in enumerate(states) if state.adjusted]
    if not rows:
        return
    if penalized := [(start, state.params, state.seen) for start, state in rows if state.seen is not None]:
        _penalize(flat, penalized)
    if biased := [(start + token, bias) for start, state in rows for token, bias in state.params.logit_bias]:
        indices, biases = zip(*biased, strict=True)
        flat.index_add_(0, _moved(np.array(indices), flat), _moved(np.array(biases, dtype=np.float32), flat))
    early = [
        (start, state.params)
        for start, state in rows
        if state.suppresses and state.drawn < state.params.min_tokens
    ]
    # The tokenizer may have more ids than the model.
    stops = [start + token for start, params in early for token in params.stop_ids if token < vocab]
    if stops:
        flat.index_fill_(0, _moved(np.array(stops), flat), float("-inf"))


def _penalize(flat: Tensor, rows: Sequence[tuple[int, SamplingParams, TokenCounts]]) -> None:
    """Apply penalties to rows that start at these places."""
    indices = _moved(np.concatenate([start + seen.ids for start, _, seen in rows]), flat)
    counts = _moved(np.concatenate([seen.counts for _, _, seen in rows]), flat)
    factors = np.array(
        [(p.repetition_penalty, p.frequency_penalty, p.presence_penalty) for _, p, _ in rows],
        dtype=np.float32,
    )
    sizes = [len(seen.ids) for _, _, seen in rows]
    repetition, frequency, presence = _moved(factors.repeat(sizes, 0).T, flat)
    values = flat[indices]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[indices] = values - (frequency * counts + presence * (counts > 0))


def _moved(values: NDArray[Any], logits: Tensor) -> Tensor:
    return copied(values, logits.device)


def _draw(logits: Tensor, peaks: Tensor, rules: Sequence[TokenRule]) -> list[int]:
    """Sample a token for each row. `peaks` are the highest logits. May overwrite the logits."""
    weights = weigh(logits, peaks, rules)
    tokens = [0] * len(rules)
    untruncated = [row for row, rule in enumerate(rules) if not _truncates(rule)]
    if untruncated:
        numbers = np.array([rules[row].number for row in untruncated])
        picked = _from_all(_select(weights.values, untruncated), weights.sums[untruncated], numbers)
        for row, token in zip(untruncated, picked, strict=True):
            tokens[row] = token
    if len(untruncated) < len(rules):
        values, totals = weights.values.cpu().numpy(), weights.sums.sum(1)
        for row, rule in enumerate(rules):
            if _truncates(rule):
                likely = _Likely(values[row], weights.maxima[row])
                least = _least_kept(likely, totals[row], rule)
                tokens[row] = _from_kept(likely, least, rule.number)
    return tokens


def _truncates(rule: TokenRule) -> bool:
    """Return whether unlikely tokens are excluded, apart from those with the weight 0."""
    return rule.top_k > 0 or rule.top_p < 1.0 or rule.floor > 1.0


def _select(values: Tensor, rows: list[int]) -> Tensor:
    return values if len(rows) == len(values) else values[rows]


def _from_all(blocks: Tensor, sums: NDArray[np.float64], numbers: NDArray[np.float64]) -> list[int]:
    """Sample tokens of rows without truncation, in vocabulary order."""
    ends = sums.cumsum(1)
    every = np.arange(len(sums))
    target = _below(numbers * ends[:, -1], ends[:, -1])[:, None]
    block = (ends <= target).sum(1)
    inside = blocks[torch.from_numpy(every), torch.from_numpy(block)].cpu().numpy()
    before = (ends - sums)[every, block]
    ends = before[:, None] + inside.cumsum(1, dtype=np.float64)
    tokens: list[int] = (block * BLOCK + (ends <= target).sum(1)).tolist()
    return tokens


def _below(target: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
    """Limit `target` to values below `end`, which rounding may exceed, so that a token is always found."""
    return np.minimum(target, np.nextafter(end, 0.0))


class _Likely:
    """The likely tokens of one row [C, BLOCK]. Reads only blocks that contain such tokens."""

    def __init__(self, values: NDArray[np.float32], maxima: NDArray[np.float32]) -> None:
        self._values = values
        self._maxima = maxima
        self.peak = maxima.max()

    def above(self, bound: np.float32) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return tokens with at least this weight (> 0) in vocabulary order, and their weights."""
        blocks = np.flatnonzero(self._maxima >= bound)
        values = self._values[blocks]
        row, column = np.nonzero(values >= bound)
        return blocks[row] * BLOCK + column, values[row, column]

    def bounds(self) -> Iterator[np.float32]:
        """
        Yield decreasing weights; the last one is below all tokens.

        At least as many tokens as block maxima reach a bound.
        """
        for count in CANDIDATES:
            if count < len(self._maxima):
                yield np.partition(self._maxima, -count)[-count]
        if len(self._maxima) > CANDIDATES[0]:
            yield self._maxima.min()
        yield np.float32(0.0)


def _least_kept(likely: _Likely, total: np.float64, rule: TokenRule) -> np.float32:
    """Return the least weight that min-p, top-k and top-p keep; always positive."""
    floor = np.float32(rule.floor)
    # Without min-p and top-k, the total mass of top-p is known in advance.
    uncut = rule.floor == 1.0 and not rule.top_k
    least = likely.peak
    for bound in likely.bounds():
        complete = bool(bound <= floor)
        descending = -np.sort(-likely.above(max(bound, floor))[1])
        if 0 < rule.top_k <= len(descending):
            descending = descending[: rule.top_k]
            complete = True
        if rule.top_p < 1.0 and (complete or uncut):
            ends = descending.cumsum(dtype=np.float64)
            reached = int(ends.searchsorted(rule.top_p * (ends[-1] if complete else total)))
            if reached < len(descending):
                return np.float32(descending[reached])
        least = descending[-1]
        if complete:
            break
    return np.float32(least)


def _from_kept(likely: _Likely, least: np.float32, number: float) -> int:
    """Sample a token from those with at least the weight `least`, in vocabulary order."""
    tokens, weights = likely.above(least)
    ends = weights.cumsum(dtype=np.float64)
    return int(tokens[ends.searchsorted(_below(number * ends[-1], ends[-1]), side="right")])
