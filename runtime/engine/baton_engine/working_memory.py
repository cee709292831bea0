"""
Memory that forward passes need beside weights and KV cache, measured before the cache gets its size.

The largest passes run once, over a cache of two blocks. Block ids repeat, so a prompt may have the length of
the context. Its values are meaningless; shapes alone decide the memory.
"""

from __future__ import annotations

import gc
from typing import Any, Protocol

import torch

from baton_api.errors import SetupError
from baton_api.sampling import SamplingParams
from baton_api.setting_types import show_size
from baton_engine.batch import Batch, BatchRow
from baton_engine.kv.cache import BLOCK_SIZE, LEAST_BLOCKS, KVCache
from baton_engine.model.decoder import Model
from baton_engine.pass_errors import FailureKind, failure_of
from baton_engine.sampling import sampler
from baton_engine.sampling.state import SamplingState
from baton_engine.scheduling.limits import EngineLimits


class PeakMemory(Protocol):
    """Measures the memory of a device."""

    def start(self) -> None:
        """Release unused memory, and start to measure."""
        ...

    def peak(self) -> int:
        """Return by how many bytes the memory in use has exceeded that at the start. Releases it."""
        ...


class DevicePeak:
    """`PeakMemory` of torch's allocator. It counts what the device gave to it, lost pieces included."""

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device = device
        self._cuda = cuda
        self._before = 0

    def start(self) -> None:
        self._release()
        self._cuda.reset_peak_memory_stats(self._device)
        self._before = self._cuda.memory_reserved(self._device)

    def peak(self) -> int:
        self._cuda.synchronize(self._device)
        most = int(self._cuda.max_memory_reserved(self._device)) - self._before
        self._release()
        return most

    def _release(self) -> None:
        gc.collect()
        self._cuda.empty_cache()


def largest_passes(limits: EngineLimits) -> list[list[BatchRow]]:
    """
    Return the rows of the passes with the most memory: the longest chunk, alone and with all others.

    A pass without prompt tokens may have more results than these, with drafts or with more sequences than
    tokens.
    """
    generating = min(limits.max_running, max(1, limits.chunk_tokens - BLOCK_SIZE))
    others = [BatchRow([0], BLOCK_SIZE - 1, [1], 1) for _ in range(generating)]
    alone, shared = limits.prompt_tokens(0), limits.prompt_tokens(generating)
    if limits.whole_prompts:
        return [[_prompt(alone, limits)]]
    passes = [[_prompt(alone, limits)], [_prompt(max(shared, BLOCK_SIZE), limits), *others]]
    if limits.results > generating + 1:
        passes.append([BatchRow([0], BLOCK_SIZE - 1, [1], 1)] * limits.results)
    return passes


def _prompt(tokens: int, limits: EngineLimits) -> BatchRow:
    """Return the last chunk of `tokens` of the longest prompt. All its blocks are block 1."""
    tokens = min(tokens, limits.max_model_len)
    start = limits.max_model_len - tokens
    return BatchRow([0] * tokens, start, [1] * -(-limits.max_model_len // BLOCK_SIZE), 1)


def working_memory(
    model: Model,
    limits: EngineLimits,
    dtype: torch.dtype,
    device: torch.device,
    memory: PeakMemory,
    *,
    samples: bool = True,
) -> int:
    """
    Return the bytes that the largest pass needs beside weights and KV cache.

    Sampling is included if it `samples`. Raises SetupError if they exceed the free memory.
    """
    cache = KVCache(model.spec, LEAST_BLOCKS, dtype, device)
    sampling = SamplingParams(temperature=1.0, top_p=0.9)
    memory.start()
    text = ""
    try:
        for rows in largest_passes(limits):
            _compute(model, Batch(rows, BLOCK_SIZE, device), cache, sampling if samples else None)
    except Exception as error:
        if failure_of(error) is not FailureKind.MEMORY:
            raise
        text = str(error)
    most = memory.peak()
    if text:
        raise SetupError(
            f"A pass of --chunk-tokens {limits.chunk_tokens} and --max-running {limits.max_running} needs "
            f"more than the free memory ({show_size(most)} were in use): {text}. Reduce both."
        )
    return most


@torch.inference_mode()
def _compute(model: Model, batch: Batch, cache: KVCache, sampling: SamplingParams | None) -> None:
    if model.spec.headless:
        model.hidden_states(batch, cache)
        return
    logits = model.forward(batch, cache)
    if sampling is not None:
        sampler.sample(logits, [SamplingState(sampling, ()) for _ in range(len(logits))])
