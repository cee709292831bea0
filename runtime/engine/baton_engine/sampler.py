"""
Logits to tokens: one uniform number per token, looked up in the cumulated probabilities.

The vocabulary is never sorted in the usual case. It is read by blocks: the highest logit is looked for in
the block with the highest maximum, a number's place in the block where the cumulated sums pass it. Top-k,
top-p and min-p all come down to the least probability that is kept, and the 256th highest block maximum
bounds the few likely tokens among which that least one is nearly always found.

A row's token depends on its own logits, parameters and position alone, never on its neighbours.

The order of what is applied: repetition penalty, frequency and presence penalty, logit bias,
suppressed stop ids, temperature, min-p, top-k, top-p over what those two left. Tokens as likely as the
least one kept are kept too. Logprobs are of the logits as the model gave them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_api.messages import TokenChoice
from baton_engine.draws import Draw, Seen
from baton_engine.randomness import uniform
from baton_engine.requests import SamplingParams

BLOCK = 128
"""Tokens whose maximum or sum is taken together: a pass over blocks costs a fifth of torch's argmax."""

CANDIDATES = 256
"""Likely tokens, at least, among which the least one kept is looked for first."""

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
    if vocab % BLOCK:  # a copy to fill up the last block would cost as much
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
        stops = [token for token in params.stop_ids if token < len(row)]  # a tokenizer may know more
        row[_ids(stops, row)] = float("-inf")


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
    temperatures = torch.tensor([draw.params.temperature for draw in chosen], device=logits.device)
    probabilities = _blocks((_select(logits, rows) / temperatures[:, None]).softmax(-1))
    numbers = np.array([uniform(draw.params.seed, draw.position) for draw in chosen])
    whole = [place for place, draw in enumerate(chosen) if not draw.truncated]
    if whole:
        picked = _from_all(_select(probabilities, whole), numbers[whole])
        for place, token in zip(whole, picked, strict=True):
            tokens[rows[place]] = token
    if len(whole) == len(rows):
        return
    peaks = probabilities.amax(-1).cpu().numpy()
    values = probabilities.flatten(1).cpu().numpy()
    for place, draw in enumerate(chosen):
        if draw.truncated:
            tokens[rows[place]] = _from_kept(values[place], peaks[place], draw.params, numbers[place])


def _select(values: Tensor, rows: list[int]) -> Tensor:
    return values if len(rows) == len(values) else values[rows]


def _blocks(values: Tensor) -> Tensor:
    """[S, V] as [S, C, BLOCK], the last block filled up with zeros."""
    rows, vocab = values.shape
    if vocab % BLOCK:
        values = torch.nn.functional.pad(values, (0, BLOCK - vocab % BLOCK))
    return values.view(rows, -1, BLOCK)


def _from_all(blocks: Tensor, numbers: NDArray[np.float64]) -> list[int]:
    """Tokens of rows that leave none out, by inverse cumulated probability in vocabulary order."""
    sums = blocks.sum(-1).cpu().numpy().astype(np.float64)
    ends = sums.cumsum(1)
    every = np.arange(len(sums))
    target = _below(numbers * ends[:, -1], ends[:, -1])
    block = (ends <= target[:, None]).sum(1)
    # What is left of the number is stretched over the block, whose sum above was rounded differently.
    left = (target - ends[every, block] + sums[every, block]) / sums[every, block]
    inside = blocks[torch.from_numpy(every), torch.from_numpy(block)].cpu().numpy()
    ends = inside.cumsum(1, dtype=np.float64)
    target = _below(left.clip(0.0) * ends[:, -1], ends[:, -1])
    tokens: list[int] = (block * BLOCK + (ends <= target[:, None]).sum(1)).tolist()
    return tokens


def _below(target: NDArray[np.float64], end: NDArray[np.float64]) -> NDArray[np.float64]:
    """`target`, but less than `end`, which rounding may have made it: a token with mass is found."""
    return np.minimum(target, np.nextafter(end, 0.0))


def _from_kept(
    values: NDArray[np.float32], peaks: NDArray[np.float32], params: SamplingParams, number: np.float64
) -> int:
    """The token of one row by inverse cumulated probability over what truncation keeps."""
    tokens = np.flatnonzero(values >= _least_kept(values, peaks, params))
    ends = values[tokens].cumsum(dtype=np.float64)
    return int(tokens[ends.searchsorted(_below(number * ends[-1], ends[-1]), side="right")])


def _least_kept(
    values: NDArray[np.float32], peaks: NDArray[np.float32], params: SamplingParams
) -> np.float32:
    """The least probability that min-p, top-k and top-p keep; always positive."""
    floor = peaks.max() * np.float32(params.min_p)
    descending = values[:0]
    for bound in _bounds(peaks):
        kept = values[(values >= max(bound, floor)) & (values > 0)]
        descending = np.sort(kept)[::-1]
        complete = bound <= floor
        if 0 < params.top_k <= len(descending):
            descending = descending[: params.top_k]
            complete = True
        if params.top_p < 1.0 and (complete or not params.min_p):
            ends = descending.cumsum(dtype=np.float64)
            reached = int(ends.searchsorted(params.top_p * (ends[-1] if complete else 1.0)))
            if reached < len(descending):
                return np.float32(descending[reached])
        if complete:
            break
    return np.float32(descending[-1])


def _bounds(peaks: NDArray[np.float32]) -> Iterator[np.float32]:
    """
    Ever lower bounds, the last one below all tokens.

    As many tokens as there are block maxima at or above a bound are at or above it themselves, and they
    are the likeliest ones.
    """
    if len(peaks) > CANDIDATES:
        yield np.partition(peaks, -CANDIDATES)[-CANDIDATES]
    yield peaks.min()
    yield np.float32(0.0)


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
