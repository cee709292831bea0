"""
Logits to tokens: one uniform number per token, looked up in the cumulated probabilities.

The vocabulary is never sorted in the usual case. Greedy rows take the highest logit, found by blocks.
Rows that leave no token out are looked up in vocabulary order. Rows with top-k, top-p or min-p take
their few most likely tokens and work on those; only a row whose cut lies beyond them is sorted.

A row's token depends on its own logits, parameters and position alone, never on its neighbours: each
operation below works row by row, and how many candidates a row gets is decided by its own parameters.

The order of what is applied: repetition penalty, frequency and presence penalty, logit bias,
suppressed stop ids, temperature, min-p, top-k, top-p over what top-k left. Logprobs are of the logits
as the model gave them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_api.messages import TokenChoice
from baton_engine.draws import Draw, Seen
from baton_engine.randomness import uniform

BLOCK = 128
"""Tokens whose maximum or sum is taken together: a pass over blocks costs a fifth of torch's argmax."""

CANDIDATES = 256
"""Most likely tokens that truncation looks at before it sorts them all."""

FEW_CANDIDATES = 64
"""Enough for a top-k up to this."""

ALTERNATIVES = 20
"""Logprobs are always picked from this many, so that ties come out the same at any number."""


def sample(logits: Tensor, draws: Sequence[Draw]) -> list[TokenChoice | None]:
    """
    One token for each row of `logits` [S, V] fp32, which may be overwritten.

    None for a row that has no most likely token: NaN or infinity among its logits, or nothing allowed.
    """
    if all(draw.plain for draw in draws):
        tokens, healthy = _most_likely(logits)
        return [
            TokenChoice(token=token) if good else None for token, good in zip(tokens, healthy, strict=True)
        ]
    reported = _Logprobs(logits, draws)
    for row, draw in zip(logits, draws, strict=True):
        if draw.adjusted:
            _adjust(row, draw)
    tokens, healthy = _most_likely(logits)
    chance = [row for row, draw in enumerate(draws) if not draw.greedy and healthy[row]]
    if chance:
        _draw(logits, draws, chance, tokens)
    return [
        reported.choice(row, token) if good else None
        for row, (token, good) in enumerate(zip(tokens, healthy, strict=True))
    ]


def _most_likely(logits: Tensor) -> tuple[list[int], list[bool]]:
    """The first token with the highest logit of each row, and whether that logit is a finite number."""
    rows, vocab = logits.shape
    if vocab % BLOCK:
        tokens = logits.argmax(-1, keepdim=True)
    else:
        blocks = logits.view(rows, -1, BLOCK)
        block = blocks.amax(-1).argmax(-1, keepdim=True)
        inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK)).squeeze(1)
        tokens = block * BLOCK + inside.argmax(-1, keepdim=True)
    healthy = logits.gather(1, tokens).isfinite()
    return tokens.squeeze(1).tolist(), healthy.squeeze(1).tolist()


def _adjust(row: Tensor, draw: Draw) -> None:
    """Penalties, bias and suppressed ids of one row, in place."""
    params = draw.params
    if draw.seen is not None:
        _penalise(row, draw, draw.seen)
    if params.logit_bias:
        ids = [token for token, _ in params.logit_bias]
        bias = [value for _, value in params.logit_bias]
        row.index_add_(0, _ids(ids, row), torch.tensor(bias, dtype=row.dtype, device=row.device))
    if draw.drawn < params.min_tokens and params.stop_ids:
        row[_ids(sorted(params.stop_ids), row)] = float("-inf")


def _penalise(row: Tensor, draw: Draw, seen: Seen) -> None:
    params = draw.params
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


def _draw(logits: Tensor, draws: Sequence[Draw], rows: list[int], tokens: list[int]) -> None:
    """Replace the tokens of `rows` by drawn ones."""
    chosen = [draws[row] for row in rows]
    temperature = torch.tensor([draw.params.temperature for draw in chosen], dtype=torch.float32)
    # Against the peak, so that a small temperature cannot overflow.
    scaled = logits if len(rows) == len(logits) else logits[rows]
    scaled = (scaled - scaled.amax(-1, keepdim=True)) / temperature.to(logits.device)[:, None]
    probabilities = scaled.softmax(-1)
    numbers = np.array([uniform(draw.params.seed, draw.position) for draw in chosen])
    whole = [place for place, draw in enumerate(chosen) if not draw.truncated]
    few = [place for place, draw in enumerate(chosen) if 0 < draw.params.top_k <= FEW_CANDIDATES]
    many = [
        place
        for place, draw in enumerate(chosen)
        if draw.truncated and not 0 < draw.params.top_k <= FEW_CANDIDATES
    ]
    if whole:
        picked = _from_all(_select(probabilities, whole), numbers[whole])
        for place, token in zip(whole, picked, strict=True):
            tokens[rows[place]] = token
    for places, count in ((few, FEW_CANDIDATES), (many, CANDIDATES)):
        if places:
            drawn = _from_candidates(
                _select(probabilities, places), [chosen[place] for place in places], numbers[places], count
            )
            for place, token in zip(places, drawn, strict=True):
                tokens[rows[place]] = token


def _select(values: Tensor, places: list[int]) -> Tensor:
    return values if len(places) == len(values) else values[places]


def _from_all(probabilities: Tensor, numbers: NDArray[np.float64]) -> list[int]:
    """Tokens by inverse cumulated probability in vocabulary order: the block first, then inside it."""
    rows, vocab = probabilities.shape
    if vocab % BLOCK:
        probabilities = torch.nn.functional.pad(probabilities, (0, BLOCK - vocab % BLOCK))
    blocks = probabilities.view(rows, -1, BLOCK)
    sums = blocks.sum(-1).cpu().numpy().astype(np.float64)
    ends = sums.cumsum(1)
    every = np.arange(rows)
    target = _below(numbers * ends[:, -1], ends[:, -1])
    block = (ends <= target[:, None]).sum(1)
    # What is left of the number is stretched over the block: its sum above was rounded differently.
    left = (target - ends[every, block] + sums[every, block]) / sums[every, block]
    inside = blocks[torch.from_numpy(every), torch.from_numpy(block)].cpu().numpy().astype(np.float64)
    ends = inside.cumsum(1)
    target = _below(left.clip(0.0) * ends[:, -1], ends[:, -1])
    tokens: list[int] = (block * BLOCK + (ends <= target[:, None]).sum(1)).tolist()
    return tokens


def _below(target: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
    """`target`, but less than `end`, which rounding may have made it: the last token with mass is found."""
    return np.minimum(target, np.nextafter(end, 0.0))


def _from_candidates(
    probabilities: Tensor, draws: Sequence[Draw], numbers: NDArray[np.float64], count: int
) -> list[int]:
    """Tokens from the most likely ones; rows for which these do not suffice are sorted whole."""
    vocab = probabilities.shape[1]
    top, ids = probabilities.topk(min(count, vocab))
    picked, enough = _from_descending(top.cpu().numpy(), draws, numbers, whole=count >= vocab)
    tokens: list[int] = ids.gather(1, torch.from_numpy(picked)[:, None].to(ids.device)).squeeze(1).tolist()
    for row in np.flatnonzero(~enough).tolist():
        ordered, ids = probabilities[row].sort(descending=True, stable=True)
        picked, _ = _from_descending(
            ordered[None].cpu().numpy(), [draws[row]], numbers[row : row + 1], whole=True
        )
        tokens[row] = int(ids[picked[0]])
    return tokens


def _from_descending(
    values: NDArray[np.float32], draws: Sequence[Draw], numbers: NDArray[np.float64], *, whole: bool
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """
    The place drawn in each row of descending probabilities, and whether the row could be decided.

    It cannot if tokens beyond the row's end (there are none if `whole`) may belong to those kept.
    """
    rows, width = values.shape
    every = np.arange(rows)
    min_p = np.array([draw.params.min_p for draw in draws])
    top_k = np.array([draw.params.top_k for draw in draws])
    top_p = np.array([draw.params.top_p for draw in draws])
    ends = values.cumsum(1, dtype=np.float64)
    keep = (values >= min_p[:, None] * values[:, :1]).sum(1)
    bounded = (keep < width) | whole
    cut = (top_k > 0) & (top_k <= width)
    keep = np.where(cut, np.minimum(keep, top_k), keep)
    bounded |= cut
    mass = np.where(bounded, ends[every, keep - 1], 1.0)
    reached = (ends < (top_p * mass)[:, None]).sum(1) + 1
    nucleus = top_p < 1.0
    bounded |= nucleus & (reached <= width)
    keep = np.where(nucleus, np.minimum(keep, reached), keep)
    mass = ends[every, keep - 1]
    place = (ends <= _below(numbers * mass, mass)[:, None]).sum(1)
    return place, bounded


class _Logprobs:
    """The logprobs of the rows that want them, taken before anything is changed."""

    def __init__(self, logits: Tensor, draws: Sequence[Draw]) -> None:
        self._draws = draws
        rows = [row for row, draw in enumerate(draws) if draw.params.logprobs is not None]
        self._place = {row: place for place, row in enumerate(rows)}
        if not rows:
            return
        self._values = _select(logits, rows).log_softmax(-1)
        if any(draws[row].params.logprobs for row in rows):
            top, ids = self._values.topk(min(ALTERNATIVES, logits.shape[1]))
            self._top: list[list[float]] = top.tolist()
            self._ids: list[list[int]] = ids.tolist()

    def choice(self, row: int, token: int) -> TokenChoice:
        count = self._draws[row].params.logprobs
        if count is None:
            return TokenChoice(token=token)
        place = self._place[row]
        top: list[tuple[int, float]] = []
        if count:
            top = list(zip(self._ids[place][:count], self._top[place][:count], strict=True))
        return TokenChoice(token=token, logprob=self._values[place, token].item(), top=top)
