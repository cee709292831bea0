"""A pair whose model has a draft head: the prefill worker computes the head's part of each block too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_engine.kv.cache import KVCache
from tests.decode.pair import Pair, Side, eventually, open_pair, slow_clock, tokens
from tests.engine.draft_heads import Folders, decoder_of, make_heads
from tests.engine.greedy import CPU
from tests.engine.models import VOCAB


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return make_heads(tmp_path_factory.mktemp("heads"))


def side(name: str, model: Path, head: Path | None, drafted: int, blocks: int = 64, **how: Any) -> Side:
    decoder = decoder_of(model, head)
    clock = (lambda: float(decoder.passes)) if drafted else slow_clock()
    cache = KVCache(decoder.spec, blocks, torch.float32, CPU)
    return Side.make(name, decoder, cache, chunk_tokens=24, speculation_tokens=drafted, clock=clock, **how)


def blocks_of(one: Side) -> dict[bytes, Tensor]:
    """Return the contents of all cached blocks by their hashes."""
    blocks, _ = one.client.engine._pool.published()
    return {name: one.cache.kv[block].clone() for name, block in blocks.items()}


async def turns(pair: Pair) -> list[list[int]]:
    """Two answers to prompts that end inside a block; the second one continues a part of the first."""
    prompt = [(3 + 7 * at + at * at) % VOCAB for at in range(53)]
    answer = tokens(await pair.generate(prompt, max_tokens=30))
    return [answer, tokens(await pair.generate([*prompt, *answer[:20], 5, 6, 7], max_tokens=20))]


@pytest.mark.parametrize("kind", ["mtp", "eagle3"])
@pytest.mark.parametrize("peers", [False, True], ids=["transferred", "and read from the decode worker"])
async def test_pair_with_a_draft_head_has_the_blocks_of_one_worker(
    kind: str, peers: bool, folders: Folders
) -> None:
    """Its drafts then are those of one worker too, also right after a transfer that ends inside a block."""
    model, head = folders[kind]
    decode = side("decode", model, head, 3)
    async with open_pair(side("prefill", model, head, 0), decode, peers=peers) as pair:
        answers, ours = await turns(pair), blocks_of(decode)
        assert pair.prefill.now.totals.drafts == 0
        drafted = decode.now.totals
        if peers:
            assert pair.prefill.now.totals.prompt_tokens_peer > 0
    one = side("one", model, head, 3, local_prefill_tokens=10_000)
    async with open_pair(side("unused", model, head, 0), one) as pair:
        assert await turns(pair) == answers
        expected = blocks_of(one)
        assert one.now.totals.prompt_tokens_remote == 0 < drafted.prompt_tokens_remote
        assert (one.now.totals.draft_tokens, one.now.totals.accepted_tokens) == (
            drafted.draft_tokens,
            drafted.accepted_tokens,
        )
    assert drafted.draft_tokens > 0
    assert ours.keys() == expected.keys() and len(ours) >= 6
    for name, block in expected.items():
        torch.testing.assert_close(ours[name], block, rtol=1e-3, atol=1e-3)


async def test_tier_restores_the_heads_part(folders: Folders) -> None:
    """A prompt returns after the pool has evicted it. Its blocks are those of the first time."""
    model, head = folders["eagle3"]
    one = side("one", model, head, 3, blocks=12, tier_slots=64)
    prompt = [(3 + 7 * at + at * at) % VOCAB for at in range(53)]
    async with open_pair(side("unused", model, head, 0), one) as pair:
        await pair.generate([7] * 17, remote=False, max_tokens=1)  # tells how long computing takes
        warm = blocks_of(one)
        answer = tokens(await pair.generate(prompt, remote=False, max_tokens=30))
        before = {name: block for name, block in blocks_of(one).items() if name not in warm}
        await eventually(lambda: one.tier is not None and one.tier.snapshot().blocks >= 5)
        for seed in (1, 2, 3):
            other = [(seed * 13 + 5 * each) % 97 for each in range(150)]
            await pair.generate(other, remote=False, max_tokens=1)
        assert not before.keys() & blocks_of(one).keys()
        assert tokens(await pair.generate(prompt, remote=False, max_tokens=30)) == answer
        assert one.now.totals.prompt_tokens_restored["memory"] == 48
        after = blocks_of(one)
    for name, block in before.items():
        torch.testing.assert_close(after[name], block, rtol=1e-3, atol=1e-3)
