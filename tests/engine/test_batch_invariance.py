"""
A real model gives a request the same tokens whatever happens around it, in fp32.

Alone, in batches of 7 and 32, in chunks of 16, 64 and whole, after forced retractions, with a prefix
from the cache: greedy and sampled.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton_api.sampling import SamplingParams
from baton_engine.client import AsyncEngine
from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.metrics.counters import EngineSnapshot
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Model, create_model
from baton_engine.ops.native.support import runs
from baton_engine.requests import Request
from baton_engine.scheduling.limits import EngineLimits
from tests.engine.models import VOCAB, make_model

CPU = torch.device("cpu")
COUNT = 32
"""Requests that are compared; each is asked for in every company."""
NEW_TOKENS = 12


def make_requests() -> list[Request]:
    """Prompts of 1 to 150 tokens, every other one greedy; some share a prefix."""
    requests = []
    for number in range(COUNT):
        length = 1 + number * 37 % 150
        prompt = tuple((3 + position * (7 + number % 5) + position**2) % VOCAB for position in range(length))
        requests.append(
            Request(
                f"{number}",
                prompt,
                SamplingParams(
                    seed=number,
                    temperature=0.0 if number % 2 else 1.0,
                    top_p=0.9 if number % 4 == 0 else 1.0,
                    top_k=40 if number % 8 == 2 else 0,
                    repetition_penalty=1.1 if number % 3 == 0 else 1.0,
                    max_tokens=NEW_TOKENS,
                ),
            )
        )
    return requests


async def generate(
    model: Model, requests: list[Request], company: int, chunk_tokens: int = 512, blocks: int = 512
) -> tuple[list[list[int]], EngineSnapshot]:
    """The tokens of all requests, `company` of them at once."""
    limits = EngineLimits(max_model_len=512, chunk_tokens=chunk_tokens, max_running=32)
    client = AsyncEngine(model, KVCache(model.spec, blocks, torch.float32, CPU), limits)
    client.start()
    results = []
    for start in range(0, len(requests), company):
        generations = [client.generate(request) for request in requests[start : start + company]]
        for generation in generations:
            results.append([choice.token async for output in generation for choice in output.tokens])
    await client.close()
    snapshot = client.snapshot()
    assert snapshot.available_blocks == snapshot.total_blocks
    return results, snapshot


@pytest.fixture(scope="module")
def single(model: Model) -> list[list[int]]:
    """Each request by itself, computed whole, with a cache of its own."""

    async def one_by_one() -> list[list[int]]:
        results = []
        for request in make_requests():
            limits = EngineLimits(max_model_len=512, chunk_tokens=512)
            client = AsyncEngine(model, KVCache(model.spec, 32, torch.float32, CPU), limits)
            client.start()
            results.append(
                [choice.token async for output in client.generate(request) for choice in output.tokens]
            )
            await client.close()
        return results

    return asyncio.run(one_by_one())


def test_batch_invariance_requests_differ(single: list[list[int]]) -> None:
    assert all(len(tokens) == NEW_TOKENS for tokens in single)
    assert len({tuple(tokens) for tokens in single}) > COUNT * 3 // 4


@pytest.mark.parametrize("chunk_tokens", [16, 64, 512], ids=["chunks of 16", "chunks of 64", "whole"])
@pytest.mark.parametrize("company", [1, 7, 32], ids=["alone", "batch of 7", "batch of 32"])
async def test_tokens_do_not_depend_on_batch_or_chunks(
    model: Model, single: list[list[int]], company: int, chunk_tokens: int
) -> None:
    results, _ = await generate(model, make_requests(), company, chunk_tokens)
    assert results == single


async def test_tokens_of_quantized_experts_do_not_depend_on_batch_or_chunks(tmp_path: Path) -> None:
    checkpoint = Checkpoint(make_model(tmp_path, "mixtral", intermediate_size=64), "mixtral")
    spec = load_spec(checkpoint)
    if not runs(spec, torch.float32):
        pytest.skip("the native kernels are unavailable: no C compiler is installed")
    weights = load_weights(checkpoint, spec, torch.float32, quantize="q4_0")
    model = create_model(spec, weights, CPU, torch.float32)
    requests = make_requests()[: COUNT // 2]
    alone, _ = await generate(model, requests, 1)
    assert len({tuple(tokens) for tokens in alone}) > len(requests) * 3 // 4
    for company, chunk_tokens in ((7, 16), (16, 64), (16, 512)):
        results, _ = await generate(model, requests, company, chunk_tokens)
        assert results == alone


async def test_tokens_do_not_depend_on_retractions(model: Model) -> None:
    def requests() -> list[Request]:
        """Short prompts and long answers: each grows by four blocks, and three of them fill the cache."""
        long = [replace(request.sampling, max_tokens=64) for request in make_requests()]
        return [
            Request(request.id, request.prompt[:20], sampling)
            for request, sampling in zip(make_requests(), long, strict=True)
        ][:10]

    roomy, snapshot = await generate(model, requests(), 1)
    assert snapshot.totals.retractions == 0
    tight, snapshot = await generate(model, requests(), 10, 64, blocks=16)
    assert snapshot.totals.retractions > 3
    assert tight == roomy


@pytest.mark.parametrize("cached", [1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 70])
async def test_tokens_do_not_depend_on_what_the_prefix_cache_has(model: Model, cached: int) -> None:
    prompt = tuple((5 + position * 11) % VOCAB for position in range(70))
    sampling = SamplingParams(seed=3, temperature=0.8, max_tokens=NEW_TOKENS)
    results = []
    for prefix in (0, cached):
        limits = EngineLimits(max_model_len=512)
        client = AsyncEngine(model, KVCache(model.spec, 32, torch.float32, CPU), limits)
        client.start()
        if prefix:
            first = Request("before", prompt[:prefix], SamplingParams(max_tokens=1))
            assert len([output async for output in client.generate(first)]) == 1
        outputs = [output async for output in client.generate(Request("a", prompt, sampling))]
        assert outputs[0].cached_tokens == min(prefix, 69) // BLOCK_SIZE * BLOCK_SIZE
        results.append([choice.token for output in outputs for choice in output.tokens])
        await client.close()
    assert results[0] == results[1]
