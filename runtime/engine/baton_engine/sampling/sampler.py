"""
Selection of tokens from logits, by inverse transform sampling with one uniform number per token.

The vocabulary is processed in blocks and usually not sorted. The highest logit is searched in the block with
the highest maximum. A uniform number is searched in the block where the cumulative sums exceed it. Top-k,
top-p and min-p each determine a least weight to keep. The 64th highest block maximum limits the search for it
to a few likely tokens in nearly all cases.

The token of a row depends only on its logits, parameters and position, not on other rows.

Order of the steps: token mask, repetition penalty, frequency and presence penalty, logit bias, suppressed
stop ids, temperature, min-p, top-k, and top-p of the remaining tokens. Tokens with the same weight as the
least kept one are kept too. Logprobs are those of the model's unmodified logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_api.messages import TokenChoice
from baton_api.sampling import SamplingParams
from baton_engine.sampling import token_masks
from baton_engine.sampling.state import SamplingState, Seen, uniform

BLOCK = 128
"""Number of tokens per block. A pass over blocks costs a fifth of torch's argmax."""

CANDIDATES = (64, 512)
"""Minimum numbers of likely tokens in which the least kept one is searched, before all tokens are."""

TINY = np.finfo(np.float32).smallest_subnormal
"""The smallest positive weight. Tokens with weight 0 are never kept."""

ALTERNATIVES = 20
"""Number of alternatives from which logprobs are selected, so that ties have the same order for any
number."""


def sample(
    logits: Tensor, states: Sequence[SamplingState], masks: Sequence[NDArray[np.int32] | None] = ()
) -> list[TokenChoice | None]:
    """
    Sample one token for each row of `logits` [S, V] fp32, which may be overwritten.

    `masks` has a bit for each allowed token, or None for a row without a mask. Returns None for a row with
    NaN or infinity in its logits, or without an allowed token.
    """
    masked = [(row, mask) for row, mask in enumerate(masks) if mask is not None]
    if all(state.plain for state in states):
        token_masks.apply(logits, masked)
        tokens, healthy = _most_likely(logits)
        return [
            TokenChoice(token=token) if good else None for token, good in zip(tokens, healthy, strict=True)
        ]
    reported = _Logprobs(logits, states)
    token_masks.apply(logits, masked)
    for row, state in zip(logits, states, strict=True):
        if state.adjusted:
            _adjust(row, state)
    tokens, healthy = _most_likely(logits)
    chance = [row for row, state in enumerate(states) if not state.greedy and healthy[row]]
    if chance:
        peaks = logits[chance, [tokens[row] for row in chance]]
        drawn = _draw(_select(logits, chance), peaks, [states[row] for row in chance])
        for row, token in zip(chance, drawn, strict=True):
            tokens[row] = token
    return [
        reported.choice(row, token) if good else None
        for row, (token, good) in enumerate(zip(tokens, healthy, strict=True))
    ]


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


def _adjust(row: Tensor, state: SamplingState) -> None:
    """Apply penalties, bias and suppressed ids to one row, in place."""
    params = state.params
    if state.seen is not None:
        _penalize(row, state, state.seen)
    if params.logit_bias:
        ids = [token for token, _ in params.logit_bias]
        bias = [value for _, value in params.logit_bias]
        row.index_add_(0, _ids(ids, row), torch.tensor(bias, dtype=row.dtype, device=row.device))
    if state.suppresses and state.drawn < params.min_tokens and params.stop_ids:
        stops = [token for token in params.stop_ids if token < len(row)]  # the tokenizer may have more ids
        row[_ids(stops, row)] = float("-inf")


def _penalize(row: Tensor, state: SamplingState, seen: Seen) -> None:
    params = state.params
    ids = torch.from_numpy(seen.ids).to(row.device)
    counts = torch.from_numpy(seen.counts).to(row.device)
    values = row[ids]
    if params.repetition_penalty != 1.0:
        penalty = params.repetition_penalty
        values = torch.where(values > 0, values / penalty, values * penalty)
    values -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
    row[ids] = values


def _ids(tokens: Sequence[int], row: Tensor) -> Tensor:
    return torch.tensor(tokens, dtype=torch.int64, device=row.device)


def _draw(logits: Tensor, peaks: Tensor, states: Sequence[SamplingState]) -> list[int]:
    """Sample a token for each row. `peaks` are the highest logits. Overwrites the logits."""
    temperatures = torch.tensor([state.params.temperature for state in states], device=logits.device)
    # Unnormalized probabilities. In place, because temporaries of this size are slow.
    weights = _blocks(logits.sub_(peaks[:, None]).div_(temperatures[:, None]).exp_())
    sums = weights.sum(-1).cpu().numpy().astype(np.float64)
    numbers = np.array([uniform(state.params.seed, state.position) for state in states])
    tokens = [0] * len(states)
    whole = [row for row, state in enumerate(states) if not state.truncated]
    if whole:
        picked = _from_all(_select(weights, whole), sums[whole], numbers[whole])
        for row, token in zip(whole, picked, strict=True):
            tokens[row] = token
    if len(whole) < len(states):
        maxima, values, totals = weights.amax(-1).cpu().numpy(), weights.cpu().numpy(), sums.sum(1)
        for row, state in enumerate(states):
            if state.truncated:
                likely = _Likely(values[row], maxima[row])
                least = _least_kept(likely, totals[row], state.params)
                tokens[row] = _from_kept(likely, least, numbers[row])
    return tokens


def _select(values: Tensor, rows: list[int]) -> Tensor:
    return values if len(rows) == len(values) else values[rows]


def _blocks(values: Tensor) -> Tensor:
    """Reshape [S, V] to [S, C, BLOCK], with zeros at the end of the last block."""
    rows, vocab = values.shape
    if vocab % BLOCK:
        values = torch.nn.functional.pad(values, (0, BLOCK - vocab % BLOCK))
    return values.view(rows, -1, BLOCK)


def _from_all(blocks: Tensor, sums: NDArray[np.float64], numbers: NDArray[np.float64]) -> list[int]:
    """Sample tokens of rows without truncation, in vocabulary order."""
    ends = sums.cumsum(1)
    every = np.arange(len(sums))
    target = _below(numbers * ends[:, -1], ends[:, -1])
    block = (ends <= target[:, None]).sum(1)
    # The remainder is scaled to the block, because its sum above was rounded differently.
    left = (target - ends[every, block] + sums[every, block]) / sums[every, block]
    inside = blocks[torch.from_numpy(every), torch.from_numpy(block)].cpu().numpy()
    ends = inside.cumsum(1, dtype=np.float64)
    target = _below(left.clip(0.0) * ends[:, -1], ends[:, -1])
    tokens: list[int] = (block * BLOCK + (ends <= target[:, None]).sum(1)).tolist()
    return tokens


def _below(target: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
    """Limit `target` to values below `end`, which rounding may exceed, so that a token is always found."""
    return np.minimum(target, np.nextafter(end, 0.0))


class _Likely:
    """The likely tokens of one row [C, BLOCK]. Reads only blocks that contain such tokens."""

    def __init__(self, values: NDArray[np.float32], maxima: NDArray[np.float32]) -> None:
        self._values = values
        self._maxima = maxima
        self.size = values.size
        """Number of tokens, including the padding of the last block."""
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


def _least_kept(likely: _Likely, total: np.float64, params: SamplingParams) -> np.float32:
    """Return the least weight that min-p, top-k and top-p keep; always positive."""
    floor = max(likely.peak * np.float32(params.min_p), TINY)
    # Without min-p and top-k, the total mass of top-p is known in advance.
    uncut = not params.min_p and not 0 < params.top_k < likely.size
    least = likely.peak
    for bound in likely.bounds():
        complete = bool(bound <= floor)
        descending = -np.sort(-likely.above(max(bound, floor))[1])
        if 0 < params.top_k <= len(descending):
            descending = descending[: params.top_k]
            complete = True
        if params.top_p < 1.0 and (complete or uncut):
            ends = descending.cumsum(dtype=np.float64)
            reached = int(ends.searchsorted(params.top_p * (ends[-1] if complete else total)))
            if reached < len(descending):
                return np.float32(descending[reached])
        least = descending[-1]
        if complete:
            break
    return np.float32(least)


def _from_kept(likely: _Likely, least: np.float32, number: np.float64) -> int:
    """Sample a token from those with at least the weight `least`, in vocabulary order."""
    tokens, weights = likely.above(least)
    ends = weights.cumsum(dtype=np.float64)
    return int(tokens[ends.searchsorted(_below(number * ends[-1], ends[-1]), side="right")])


class _Logprobs:
    """Logprobs of the rows that request them, computed before logits are modified."""

    def __init__(self, logits: Tensor, states: Sequence[SamplingState]) -> None:
        self._states = states
        rows = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        self._place = {row: place for place, row in enumerate(rows)}
        if not rows:
            return
        self._values = _select(logits, rows).log_softmax(-1)
        if any(states[row].params.logprobs for row in rows):
            top, ids = self._values.topk(min(ALTERNATIVES, logits.shape[1]))
            self._top: list[list[float]] = top.tolist()
            self._ids: list[list[int]] = ids.tolist()

    def choice(self, row: int, token: int) -> TokenChoice:
        count = self._states[row].params.logprobs
        if count is None:
            return TokenChoice(token=token)
        place = self._place[row]
        top: list[tuple[int, float]] = []
        if named_ids := self._states[row].params.logprob_ids:
            top = list(zip(named_ids, self._values[place, list(named_ids)].tolist(), strict=True))
        elif count:
            top = list(zip(self._ids[place][:count], self._top[place][:count], strict=True))
        return TokenChoice(token=token, logprob=self._values[place, token].item(), top=top)
