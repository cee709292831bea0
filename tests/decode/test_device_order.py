"""
A pair on devices that run nothing before something waits for it.

Without the events, these tests fail: blocks are announced before they are written, or written by an ended
request after they have been fetched.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from baton_engine.batch import Batch
from baton_engine.kv.cache import KVCache
from baton_engine.transfer import Peer, Transfer
from baton_engine.transfer.kinds import create_transfer
from baton_engine.transfer.loopback import LoopbackTransfer
from baton_engine.transfer.reads import PullFuture
from tests.decode.pair import TIMEOUT_S, Pair, Side, eventually, fake_side, open_pair, tokens
from tests.decode.test_pair_equals_one import WITHOUT_NIXL
from tests.engine.fake_model import FakeModel, make_cache
from tests.engine.fake_streams import FakeCuda, LateModel, on_device
from tests.engine.faulty_transfer import FaultyTransfer

PROMPT = [(7 * at + at * at) % 97 for at in range(30)]
BLOCKS = 8
"""Of PROMPT, at 4 tokens each."""


class Watching(LoopbackTransfer):
    """A transfer that looks at the peer's blocks when it is to read them."""

    def __init__(self, cache: KVCache, peer: KVCache) -> None:
        super().__init__(cache, "decode")
        self._peer = peer
        self.written: list[bool] = []

    def pull(self, peer: Peer, remote: Sequence[int], local: Sequence[int]) -> PullFuture:
        for block in remote:
            tokens, positions = self._peer.kv[block, 0, 0, 0].T.int().tolist()
            expected = [PROMPT[position] for position in positions]  # 0 at position 0 is also an unused slot
            self.written.append(tokens == expected and max(positions) > 0)
        return super().pull(peer, remote, local)


def late_side(name: str, cuda: FakeCuda, blocks: int = 64, **how: Any) -> Side:
    return Side.make(name, LateModel(cuda), on_device(make_cache(blocks), cuda), **how)


async def fetched(pair: Pair, prompt: list[int] = PROMPT) -> None:
    """Generate from a fetched prompt, and compare with the model."""
    assert tokens(await pair.generate(prompt)) == FakeModel().greedy(prompt, 4)


async def test_blocks_are_announced_after_their_event() -> None:
    cuda = FakeCuda()
    prefill, decode = late_side("prefill", cuda), fake_side("decode")
    decode.faulty.inner = watching = Watching(decode.cache, prefill.cache)
    async with open_pair(prefill, decode) as pair:
        await fetched(pair)
        assert pair.prefills.outcomes == {"whole": 1}
    assert watching.written == [True] * BLOCKS
    passes = -(-len(PROMPT) // 8)
    assert cuda.counts["record"] == passes + 1, "one for each pass, and one at admission"
    assert 0 < cuda.counts["synchronize"] <= passes


async def test_overlapped_blocks_are_announced_after_their_event() -> None:
    """
    The next pass may have been launched already, so the event is that of the launch.

    The host has read a pass before it announces its blocks, so here the event alone protects nothing.
    """
    cuda = FakeCuda()
    prefill, decode = late_side("prefill", cuda, overlap=True), late_side("decode", FakeCuda(), overlap=True)
    decode.faulty.inner = watching = Watching(decode.cache, prefill.cache)
    async with open_pair(prefill, decode) as pair:
        await fetched(pair)
        assert pair.prefills.outcomes == {"whole": 1}
    assert watching.written == [True] * BLOCKS


class HeldModel(LateModel):
    """A model whose passes can be held before they use the device, whose queue they would empty."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(cuda)
        self.held_until = threading.Event()
        self.held_until.set()

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        assert self.held_until.wait(TIMEOUT_S)
        return super().forward(batch, cache)


async def test_cached_blocks_are_announced_after_an_event() -> None:
    """A prefix that another request has just computed may not be written yet."""
    cuda, decode = FakeCuda(), fake_side("decode")
    model = HeldModel(cuda)
    prefill = Side.make("prefill", model, on_device(make_cache(64), cuda), chunk_tokens=64)
    decode.faulty.inner = watching = Watching(decode.cache, prefill.cache)
    async with open_pair(prefill, decode) as pair:
        await pair.prefill.generate(pair.request(PROMPT, remote=False, max_tokens=1))
        assert cuda.default.ended < len(cuda.default.queued)
        model.held_until.clear()
        try:
            fetching = asyncio.create_task(fetched(pair))
            await eventually(lambda: len(watching.written) == BLOCKS - 1)
        finally:
            model.held_until.set()
        await fetching
        assert pair.prefills.outcomes == {"whole": 1}
    assert watching.written == [True] * BLOCKS


class HeldSums(FaultyTransfer):
    """A transfer that computes checksums once it may, and counts the blocks that it has read."""

    def __init__(self, inner: Transfer, cache: KVCache) -> None:
        super().__init__(inner, cache)
        self.held_until = threading.Event()
        self.read = 0

    def pull(self, peer: Peer, remote: Sequence[int], local: Sequence[int]) -> Any:
        pulling = super().pull(peer, remote, local)

        def ended(read: asyncio.Future[Any]) -> None:
            self.read += len(remote) if read.exception() is None else 0

        pulling.settled().add_done_callback(ended)
        return pulling

    def checksums(self, blocks: Sequence[int], sums: bool) -> list[int]:
        assert self.held_until.wait(TIMEOUT_S)
        return super().checksums(blocks, sums)


@pytest.mark.parametrize("kind", ["loopback", pytest.param("nixl", marks=[pytest.mark.nixl, WITHOUT_NIXL])])
@pytest.mark.parametrize("holds", ["prefill", "decode", "both"])
async def test_blocks_are_read_before_their_checksums_are_computed(kind: str, holds: str) -> None:
    """On each side: no read waits for a checksum, and no token comes before all of them."""
    sides = {"prefill": fake_side("prefill"), "decode": fake_side("decode")}
    transfers = {}
    for name, side in sides.items():
        await side.transfer.close()
        inner = await create_transfer(kind, side.cache, f"{name}-sums")
        side.transfer = transfers[name] = HeldSums(inner, side.cache)
        if holds not in (name, "both"):
            transfers[name].held_until.set()
    async with open_pair(sides["prefill"], sides["decode"]) as pair:
        fetching = asyncio.create_task(pair.generate(PROMPT))
        try:
            await eventually(lambda: transfers["decode"].read == BLOCKS)
            assert pair.decode.now.fetching == 1
            assert not fetching.done()
        finally:
            for transfer in transfers.values():
                transfer.held_until.set()
        assert tokens(await fetching) == FakeModel().greedy(PROMPT, 4)
        assert pair.prefills.outcomes == {"whole": 1}


async def test_blocks_are_fetched_after_their_last_user() -> None:
    """The last pass of an ended request may still write to blocks that a fetch has got."""
    cuda = FakeCuda()
    async with open_pair(decode=late_side("decode", cuda, blocks=14, local_prefill_tokens=16)) as pair:
        short = [(5 * at) % 97 for at in range(6)]
        assert tokens(await pair.generate(short)) == FakeModel().greedy(short, 4)
        assert cuda.default.ended < len(cuda.default.queued), "its last pass has not run"
        await fetched(pair)
        assert pair.prefills.outcomes == {"whole": 1}


async def test_failed_device_announces_nothing() -> None:
    cuda = FakeCuda()
    async with open_pair(prefill=late_side("prefill", cuda)) as pair:
        cuda.broken = True
        await fetched(pair)
        assert pair.prefills.outcomes == {"failed": 1}
