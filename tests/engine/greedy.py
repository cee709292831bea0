"""Greedy tokens with their log-probabilities, by us and by transformers, the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from baton_engine.batch import Batch, BatchRow
from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.model.decoder import Model

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Greedy:
    tokens: list[int]
    logprobs: list[float]


@torch.inference_mode()
def by_transformers(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> Greedy:
    """
    Return what `model` draws after `prompt` and after each token of `answer` but the last, in one pass.

    If it draws `answer` itself, then generating step by step would have drawn it too.
    """
    result = model(torch.tensor([[*prompt, *answer[:-1]]]), use_cache=False)
    scores = result.logits[0, len(prompt) - 1 :].float().log_softmax(-1)
    best = scores.max(-1)
    return Greedy(best.indices.tolist(), best.values.tolist())


def by_baton(
    model: Model,
    prompts: Sequence[Sequence[int]],
    count: int,
    chunk: int,
    dtype: torch.dtype = torch.float32,
    adapters: Sequence[Any] = (),
) -> list[Greedy]:
    """The same for prompts in one batch with their adapters, each prefilled `chunk` tokens at a time."""
    width = -(-(max(len(prompt) for prompt in prompts) + count) // BLOCK_SIZE)
    cache = KVCache(model.spec, 1 + width * len(prompts), dtype, CPU)
    # The blocks of the prompts are interleaved: nothing may rely on their order.
    blocks = [[1 + i * len(prompts) + r for i in range(width)] for r in range(len(prompts))]
    sequences = [list(prompt) for prompt in prompts]
    results = [Greedy([], []) for _ in prompts]
    computed = [0] * len(prompts)
    while live := [r for r, result in enumerate(results) if len(result.tokens) < count]:
        rows = []
        for r in live:
            pending = sequences[r][computed[r] : computed[r] + chunk]
            computed[r] += len(pending)
            start, ends = computed[r] - len(pending), computed[r] == len(sequences[r])
            adapter = adapters[r] if adapters else None
            rows.append(BatchRow(pending, start, blocks[r], ends, adapter=adapter))
        logits = model.forward(Batch(rows, BLOCK_SIZE, CPU), cache)
        drawn = [r for r, row in zip(live, rows, strict=True) if row.wanted]
        for r, scores in zip(drawn, logits.log_softmax(-1), strict=True):
            token = int(scores.argmax())
            results[r].tokens.append(token)
            results[r].logprobs.append(float(scores[token]))
            sequences[r].append(token)
    return results
