"""
A prefill and a decode worker give what one worker gives: the same tokens, logprobs, ends and usage.

A real decoder with random weights in fp32. The prefill worker computes in chunks of one block, the single
worker in chunks of four, so that neither the way of the blocks nor the cuts may matter.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.cache import KVCache
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import create_model
from baton_engine.requests import FinishReason, Output, Request, SamplingParams
from tests.decode.pair import Pair, Side, open_pair, tokens
from tests.engine.models import VOCAB, make_model

BLOCK = 16
CPU = torch.device("cpu")

GREEDY: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "seed": 1234}
PENALISED: dict[str, Any] = {
    "temperature": 0.8,
    "seed": 2**63 + 5,
    "min_p": 0.01,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": ((7, 2.0), (9, -100.0)),
}
WAYS = {"greedy": GREEDY, "sampled": SAMPLED, "penalised": PENALISED}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder: Path = make_model(tmp_path_factory.mktemp("model"), "qwen3")
    return Checkpoint(folder, "tiny")


def side(name: str, checkpoint: Checkpoint, chunk_tokens: int) -> Side:
    spec = load_spec(checkpoint)
    model = create_model(spec, load_weights(checkpoint, spec, torch.float32), CPU, torch.float32)
    cache = KVCache(spec, 400, torch.float32, CPU)
    return Side.make(name, model, cache, chunk_tokens=chunk_tokens)


@dataclass
class Race:
    """The pair, and the one worker that it is compared with."""

    pair: Pair
    one: Side

    async def equal(self, prompt: list[int], **sampling: Any) -> list[Output]:
        """Give the prompt to both, compare all that a client can see, and return the pair's outputs."""
        request = self.pair.request(prompt, **{"max_tokens": 12, **sampling})
        alone = Request(request.id, request.prompt, request.sampling)
        ours, expected = await asyncio.gather(self.pair.decode.generate(request), self.one.generate(alone))
        assert tokens(ours) == tokens(expected)
        assert (ours[-1].finish, ours[-1].stop_id) == (expected[-1].finish, expected[-1].stop_id)
        for mine, theirs in zip(choices(ours), choices(expected), strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
            assert [p for _, p in mine.top] == pytest.approx([p for _, p in theirs.top], abs=1e-4)
        assert ours[0].relay is not None, "the prompt did not come from the prefill worker"
        return ours

    async def warm(self, prompt: list[int], *workers: Side) -> None:
        """Have the whole blocks of `prompt` in these workers' prefix caches."""
        for worker in workers:
            request = Request(f"warm-{worker.name}-{hash(tuple(prompt))}", tuple(prompt), SamplingParams())
            await worker.generate(request)


def choices(outputs: list[Output]) -> list[Any]:
    return [choice for output in outputs for choice in output.tokens]


@contextlib.asynccontextmanager
async def open_race(checkpoint: Checkpoint) -> AsyncIterator[Race]:
    one = side("one", checkpoint, 4 * BLOCK)
    await one.open()
    try:
        async with open_pair(side("prefill", checkpoint, BLOCK), side("decode", checkpoint, 64)) as pair:
            yield Race(pair, one)
    finally:
        await one.close()


def text(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCAB - 20), k=length)


LENGTHS = (1, 15, 16, 17, 47, 48, 49, 100, 145)


@pytest.mark.parametrize("way", WAYS)
async def test_every_length_of_prompt(checkpoint: Checkpoint, way: str) -> None:
    async with open_race(checkpoint) as race:
        for length in LENGTHS:
            outputs = await race.equal(text(length, length), **WAYS[way])
            assert outputs[0].cached_tokens == 0
        assert race.pair.prefills.outcomes == {"whole": len(LENGTHS)}
        assert race.pair.decode.now.totals.prompt_tokens_computed == 0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("length", [80, 81, 95])
async def test_every_length_of_prefix_that_the_decode_worker_holds(
    checkpoint: Checkpoint, way: str, length: int
) -> None:
    """Peers' defects 2, 7 and 28: hits of none to all blocks, each mapped by its position."""
    async with open_race(checkpoint) as race:
        for held in range(length // BLOCK + 1):
            prompt = text(1000 * length + held, length)
            if held:
                await race.warm(prompt[: held * BLOCK], race.pair.decode)
            relay = (await race.equal(prompt, **WAYS[way]))[0].relay
            assert relay is not None
            usable = min(held, (length - 1) // BLOCK)
            assert relay.local_tokens == usable * BLOCK
            assert relay.blocks == -(-length // BLOCK) - usable


async def test_usage_is_the_same_where_both_hold_the_same_prefix(checkpoint: Checkpoint) -> None:
    """Peers' defect 29: cached tokens are counted once, whoever held them."""
    async with open_race(checkpoint) as race:
        for held in range(6):
            prompt = text(7000 + held, 90)
            if held:
                await race.warm(prompt[: held * BLOCK], race.pair.decode, race.pair.prefill, race.one)
            request = race.pair.request(prompt)
            ours = await race.pair.decode.generate(request)
            alone = await race.one.generate(Request(request.id, request.prompt, request.sampling))
            assert ours[0].cached_tokens == alone[0].cached_tokens == held * BLOCK
            assert len(tokens(ours)) == len(tokens(alone)) == 4


async def test_a_prefix_that_only_the_prefill_worker_holds_counts_as_cached(checkpoint: Checkpoint) -> None:
    async with open_race(checkpoint) as race:
        prompt = text(1, 90)
        await race.warm(prompt[:48], race.pair.prefill)
        relay = (outputs := await race.equal(prompt))[0].relay
        assert relay is not None
        assert (outputs[0].cached_tokens, relay.computed_tokens, relay.blocks) == (48, 42, 6)


@pytest.mark.parametrize("way", WAYS)
async def test_max_tokens_of_one_and_two(checkpoint: Checkpoint, way: str) -> None:
    """Peers' defect 30: one token asked for is one token given."""
    async with open_race(checkpoint) as race:
        for count in (1, 2):
            outputs = await race.equal(text(count, 33), **{**WAYS[way], "max_tokens": count})
            assert len(tokens(outputs)) == count
            assert outputs[-1].finish is FinishReason.LENGTH


@pytest.mark.parametrize("way", WAYS)
async def test_a_stop_on_the_first_token(checkpoint: Checkpoint, way: str) -> None:
    """Peers' defect 30: the prefill worker's token is under the stop rules like any other."""
    async with open_race(checkpoint) as race:
        prompt = text(11, 40)
        first = tokens(await race.equal(prompt, **WAYS[way]))[0]
        outputs = await race.equal(prompt, **WAYS[way], stop_ids=frozenset({first}))
        assert tokens(outputs) == [first]
        assert (outputs[-1].finish, outputs[-1].stop_id) == (FinishReason.STOP, first)


@pytest.mark.parametrize("way", WAYS)
async def test_min_tokens_keeps_the_stop_from_the_first_token(checkpoint: Checkpoint, way: str) -> None:
    async with open_race(checkpoint) as race:
        prompt = text(12, 40)
        first = tokens(await race.equal(prompt, **WAYS[way]))[0]
        stop = {"stop_ids": frozenset({first}), "min_tokens": 3}
        outputs = await race.equal(prompt, **WAYS[way], **stop)
        assert tokens(outputs)[0] != first


@pytest.mark.parametrize("count", [0, 1, 5])
async def test_logprobs(checkpoint: Checkpoint, count: int) -> None:
    async with open_race(checkpoint) as race:
        outputs = await race.equal(text(13, 50), **SAMPLED, logprobs=count)
        assert all(choice.logprob is not None and len(choice.top) == count for choice in choices(outputs))


async def test_prompts_that_share_batches_on_both_sides(checkpoint: Checkpoint) -> None:
    async with open_race(checkpoint) as race:
        ways = list(WAYS.values())
        lengths = [random.Random(n).randint(1, 120) for n in range(18)]
        await asyncio.gather(
            *(race.equal(text(50 + n, length), **ways[n % 3]) for n, length in enumerate(lengths))
        )
        assert race.pair.prefills.outcomes == {"whole": 18}


async def test_what_broke_half_way_goes_on_from_the_good_prefix_with_the_same_tokens(
    checkpoint: Checkpoint,
) -> None:
    async with open_race(checkpoint) as race:
        race.pair.decode.transfer.damage = True
        prompt = text(21, 100)
        request = race.pair.request(prompt, **SAMPLED, max_tokens=12)
        ours = await race.pair.decode.generate(request)
        alone = await race.one.generate(Request(request.id, request.prompt, request.sampling))
        assert race.pair.prefills.outcomes == {"checksum": 1}
        assert tokens(ours) == tokens(alone)
