"""Tiers of both workers of a pair: a conversation returns after both pools have evicted it."""

from __future__ import annotations

import pytest

from baton_api.sampling import SamplingParams
from baton_engine.requests import Output, Request
from tests.decode.pair import Pair, Side, eventually, fake_side, open_pair, slow_clock, tokens
from tests.engine.fake_model import FakeModel

PROMPT = list(range(30))
ANSWERED = 20
"""With the prompt they fill 12 blocks of 4; the last token has no KV."""
NEW = [90, 91, 92, 93, 94, 95]
BLOCKS = 21
"""Of each pool, of which 20 are for prompts: more than a second turn needs, less than two conversations."""


def side(name: str, tier_slots: int) -> Side:
    return fake_side(name, BLOCKS, clock=slow_clock(), tier_slots=tier_slots)


async def turns(pair: Pair) -> list[Output]:
    """The second turn of a conversation that both pools have evicted."""
    # A pass with prompt tokens tells the decode worker how long computing takes, as the warm-up does.
    await pair.generate([7] * 17, remote=False, max_tokens=1)
    answer = tokens(await pair.generate(PROMPT, max_tokens=ANSWERED))
    for one in (pair.prefill, pair.decode):
        wanted = (len(PROMPT) if one is pair.prefill else len(PROMPT) + ANSWERED - 1) // 4
        await eventually(lambda one=one, wanted=wanted: _copied(one) >= wanted)  # type: ignore[misc]
    for seed in (1, 2, 3):
        await pair.generate([(seed * 13 + 5 * each) % 97 for each in range(60)], max_tokens=1)
    prompt = [*PROMPT, *answer, *NEW]
    outputs = await pair.generate(prompt)
    assert tokens(outputs) == FakeModel().greedy(prompt, 4)
    return outputs


def _copied(one: Side) -> int:
    return 99 if one.tier is None else one.tier.snapshot().blocks


async def test_tiers_of_a_pair_restore_what_each_worker_had() -> None:
    """The decode worker restores what it generated, and the prefill worker reads that from it."""
    async with open_pair(side("prefill", 64), side("decode", 64), peers=True) as pair:
        first = (await turns(pair))[0]
        assert (first.cached_tokens, first.tier_tokens, first.peer_tokens) == (48, (("memory", 28),), 20)
        assert pair.decode.now.totals.prompt_tokens_restored["memory"] == 48
        assert first.relay is not None
        assert (first.relay.local_tokens, first.relay.blocks) == (48, 2)


@pytest.mark.parametrize("tiered", ["prefill", "decode"])
async def test_tier_of_one_worker_of_a_pair_is_enough(tiered: str) -> None:
    sides = {name: side(name, 64 if name == tiered else 0) for name in ("prefill", "decode")}
    async with open_pair(sides["prefill"], sides["decode"]) as pair:
        first = (await turns(pair))[0]
        restored = {one.name: one.now.totals.prompt_tokens_restored["memory"] for one in sides.values()}
        if tiered == "prefill":
            assert (first.cached_tokens, first.tier_tokens) == (28, (("memory", 28),))
            assert restored == {"prefill": 28, "decode": 0}
        else:
            assert (first.cached_tokens, first.tier_tokens) == (0, ())
            assert restored == {"prefill": 0, "decode": 48}


async def test_tier_restores_a_retracted_sequence() -> None:
    """It continues with its own answer, whose blocks have been evicted meanwhile or not."""
    one = side("alone", 64)
    await one.open()
    requests = []
    for seed in range(3):
        prompt = tuple((seed * 13 + 5 * each) % 97 for each in range(17))
        requests.append(Request(str(seed), prompt, SamplingParams(temperature=0.0, max_tokens=60)))
    generations = [one.client.generate(request) for request in requests]
    for request, generation in zip(requests, generations, strict=True):
        outputs = [output async for output in generation]
        assert tokens(outputs) == FakeModel().greedy(list(request.prompt), 60)
    assert one.now.totals.retractions > 0
    await one.close()
