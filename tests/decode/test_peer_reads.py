"""A prefill worker that reads what the decode worker has cached, and what happens when it cannot."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from baton_api import tickets
from baton_api.errors import TransferFailed
from baton_api.hashing import block_hashes, root_hash
from baton_api.messages import Chunk, Drained, Failed, ReadCached, Welcome
from baton_api.sampling import SamplingParams
from baton_decode.fetching import FetchRequest
from baton_engine.kv.events import KvEvents, events_of
from baton_engine.requests import Fetch, Output, Request
from baton_engine.streams import HostEvent
from baton_engine.tiers.peers import _Read
from baton_engine.tiers.policy import PAUSE_S
from baton_engine.transfer import control
from baton_engine.transfer.integrity import block_checksums
from tests.decode.pair import (
    PACE,
    TIMEOUT_S,
    Pair,
    Side,
    ask,
    eventually,
    fake_side,
    lend,
    open_pair,
    slow_clock,
    tokens,
)
from tests.engine.fake_model import FakeModel
from tests.engine.test_kv_events import Heard, Tree, apply
from tests.ports import steady_port

PROMPT = list(range(30))
NEW = [90, 91, 92, 93, 94, 95]
ANSWERED = 20
"""Tokens of the first answer. With the prompt they fill 12 blocks of 4; the last token has no KV."""
READ = 20
"""Of them, tokens that only the decode worker has: the prefill worker has the prompt's 7 whole blocks."""
SECRET = b"secret"


def slow_side(step_s: float = 1000.0, blocks: int = 64, **how: object) -> Side:
    return fake_side("prefill", blocks, clock=slow_clock(step_s), **how)


def answer(prompt: list[int], length: int = 4) -> list[int]:
    return FakeModel().greedy(prompt, length)


async def first_turn(pair: Pair) -> list[int]:
    """Return the prompt of the conversation's second turn."""
    return [*PROMPT, *tokens(await pair.generate(PROMPT, max_tokens=ANSWERED)), *NEW]


@asynccontextmanager
async def lending(other: Side) -> AsyncIterator[str]:
    """Run this worker; yields the address where it announces what it has cached."""
    lender = lend(other)
    await other.open()
    await lender.start()
    try:
        yield lender.address
    finally:
        await lender.close()
        await other.close()


def reads(pair: Pair) -> dict[str, int]:
    return dict(pair.prefill.now.totals.peer_reads)


def assert_computed(pair: Pair, prompt: list[int], outputs: list[Output], reads_: dict[str, int]) -> None:
    """The prefill worker computed what it could not read: the answer is right, and the reason is counted."""
    assert tokens(outputs) == answer(prompt)
    assert pair.prefills.outcomes == {"whole": 2}
    assert reads(pair) == reads_
    totals = pair.prefill.now.totals
    assert totals.prompt_tokens_peer == 0
    assert totals.prompt_tokens_computed == len(PROMPT) + len(prompt) - 28
    assert (outputs[0].cached_tokens, outputs[0].peer_tokens) == (28, 0)


async def test_peer_read_brings_what_the_decode_worker_generated() -> None:
    async with open_pair(slow_side(), peers=True) as pair:
        prompt = await first_turn(pair)
        outputs = await pair.generate(prompt)
        assert tokens(outputs) == answer(prompt)
        totals = pair.prefill.now.totals
        assert (totals.prompt_tokens_cached, totals.prompt_tokens_peer) == (28, READ)
        assert totals.prompt_tokens_peer_looked_up == READ
        assert totals.prompt_tokens_computed == 30 + len(prompt) - 48
        assert (outputs[0].cached_tokens, outputs[0].peer_tokens) == (48, READ)
        relay = outputs[0].relay
        assert relay is not None and relay.computed_tokens == len(prompt) - 48
        assert relay.compute_s > 5 * 1000, "with the time of reading"
        # The other way, only blocks move that the decode worker does not have.
        assert (relay.local_tokens, relay.blocks) == (48, 2)
        assert reads(pair) == {"read": 1}


async def test_peer_read_blocks_are_cached_for_the_next_turn() -> None:
    async with open_pair(slow_side(), peers=True) as pair:
        prompt = await first_turn(pair)
        await pair.generate(prompt)
        again = [*prompt[:-6], 80, 81, 82]
        outputs = await pair.generate(again)
        assert tokens(outputs) == answer(again)
        assert (outputs[0].cached_tokens, outputs[0].peer_tokens) == (48, 0)
        assert reads(pair) == {"read": 1}


async def published(side: Side, heard: Heard) -> dict[bytes, int]:
    """
    Return the published blocks by hash.

    Fails unless they are those of the events until now: each was stored when it was there, and removed before
    its block was used again.
    """
    snapshot = await asyncio.wrap_future(side.client.engine.kv_snapshot())
    tree = Tree()
    for batch in heard.batches[: snapshot.seq + 1]:
        apply(tree, list(events_of(batch, 4, tokens=True)))
    assert tree == dict(snapshot.part(0, len(snapshot)))
    return dict(snapshot._by_hash)


@pytest.mark.parametrize("damaged", [False, True], ids=["whole", "damaged"])
async def test_peer_read_events_are_true_of_the_cache(damaged: bool) -> None:
    """Invariant 6: blocks of a peer are announced once they are valid, and removed before their reuse."""
    heard, theirs = Heard(), Heard()
    side = slow_side(blocks=24, kv_events=KvEvents(heard))
    decode = fake_side("decode", kv_events=KvEvents(theirs))
    async with open_pair(side, decode, peers=True) as pair:
        prompt = await first_turn(pair)
        names = block_hashes(prompt, 4, root_hash())
        side.faulty.hold()
        if damaged:
            side.faulty.flip_bit_next(2)
        generating = asyncio.create_task(pair.generate(prompt))
        await side.faulty.held(1)
        assert [name in await published(side, heard) for name in names] == [True] * 7 + [False] * 7
        side.faulty.release()
        assert tokens(await generating) == answer(prompt)
        assert reads(pair) == {"checksum" if damaged else "read": 1}
        ours, source = await published(side, heard), await published(decode, theirs)
        shared = names[:12]
        assert block_checksums(side.cache, [ours[name] for name in shared]) == block_checksums(
            decode.cache, [source[name] for name in shared]
        )
        for start in range(40, 57, 4):  # other prompts evict them
            await side.generate(pair.request(list(range(start, start + 40)), remote=False, max_tokens=1))
            await published(side, heard)
        assert not set(shared) & set(await published(side, heard))


async def test_peer_read_is_not_begun_where_computing_is_sooner() -> None:
    async with open_pair(slow_side(1e-6), peers=True) as pair:
        prompt = await first_turn(pair)
        assert_computed(pair, prompt, await pair.generate(prompt), {})
        assert pair.prefill.faulty.requested == []


async def test_peer_read_damaged_block_is_computed() -> None:
    """Invariant 1: no block is published whose checksum differs. Blocks before it are."""
    async with open_pair(slow_side(), peers=True) as pair:
        prompt = await first_turn(pair)
        pair.prefill.faulty.flip_bit_next(2)
        outputs = await pair.generate(prompt)
        assert tokens(outputs) == answer(prompt)
        assert reads(pair) == {"checksum": 1}
        assert (outputs[0].cached_tokens, outputs[0].peer_tokens) == (36, 8)


@pytest.mark.parametrize("after", [0, 3])
async def test_peer_read_that_fails_is_a_computation(after: int) -> None:
    async with open_pair(slow_side(), peers=True) as pair:
        prompt = await first_turn(pair)
        pair.prefill.faulty.fail_next(after)
        assert_computed(pair, prompt, await pair.generate(prompt), {"transport": 1})


async def test_peer_read_that_is_late_is_a_computation() -> None:
    """Its blocks stay in quarantine until the read has ended, because it may still write to them."""
    async with open_pair(slow_side(0.3), peers=True) as pair:
        prompt = await first_turn(pair)
        pair.prefill.faulty.hold()
        assert_computed(pair, prompt, await pair.generate(prompt), {"deadline": 1})
        assert pair.prefill.now.quarantined_blocks == READ // 4
        pair.prefill.faulty.release()
        await eventually(lambda: not pair.prefill.now.quarantined_blocks)


@pytest.mark.parametrize(("hung_s", "ends"), [(TIMEOUT_S, False), (0.2, True)], ids=["late", "hangs"])
async def test_peer_read_that_is_late_ends_the_worker_only_if_it_hangs(hung_s: float, ends: bool) -> None:
    """It quarantines more of the pool than the limit."""
    fatal: list[str] = []
    side = slow_side(0.3, blocks=20, quarantine_limit=0.1, on_fatal=fatal.append)
    async with open_pair(side, peers=True, hung_s=hung_s) as pair:
        prompt = await first_turn(pair)
        pair.prefill.faulty.hold()
        assert tokens(await pair.generate(prompt)) == answer(prompt)
        assert pair.prefill.now.quarantined_blocks == READ // 4
        if ends:
            await eventually(lambda: bool(fatal))
        pair.prefill.faulty.release()
        await eventually(lambda: not pair.prefill.now.quarantined_blocks)
    assert ["are quarantined" in one for one in fatal] == [True] * ends


async def test_peer_read_after_a_failure_pauses() -> None:
    async with open_pair(slow_side(), peers=True) as pair:
        prompt = await first_turn(pair)
        pair.prefill.faulty.fail_next()
        await pair.generate(prompt)
        pair.prefill.client.clear_cache()
        assert tokens(await pair.generate([*prompt, 7, 8, 9])) == answer([*prompt, 7, 8, 9])
        assert reads(pair) == {"transport": 1}


@pytest.mark.parametrize("late", [False, True], ids=["at once", "after its deadline"])
async def test_peer_read_after_a_failed_read_and_the_pause_succeeds(late: bool) -> None:
    """The access to a peer's memory is of no use after a failure, so the peer is connected again."""
    now, passed, step_s = 0.0, 0.0, 0.3 if late else 1000.0

    def clock() -> float:
        nonlocal passed
        passed += step_s
        return passed

    side = fake_side("prefill", clock=clock)
    async with open_pair(side, peers=True, peer_clock=lambda: now) as pair:
        prompt = await first_turn(pair)
        pair.prefill.faulty.fail_next()
        if late:
            pair.prefill.faulty.hold()
        await pair.generate(prompt)
        pair.prefill.faulty.release()
        await eventually(lambda: not pair.prefill.now.quarantined_blocks)
        step_s = 1000.0
        await pair.generate([80, 81, 82, 83])  # from here on, computing takes longer than any read
        pair.prefill.client.clear_cache()
        now += PAUSE_S
        again = [*prompt, 7, 8, 9]
        assert tokens(await pair.generate(again)) == answer(again)
        assert reads(pair) == {"deadline" if late else "transport": 1, "read": 1}


async def test_peer_read_of_evicted_blocks_is_a_computation() -> None:
    """The decode worker asks for a prompt that it has; the source is another worker, which has nothing."""
    async with (
        lending(fake_side("other")) as address,
        open_pair(slow_side(), peers=True, source=address) as pair,
    ):
        prompt = await first_turn(pair)
        assert_computed(pair, prompt, await pair.generate(prompt), {"rejected": 1})


async def test_peer_read_takes_the_blocks_that_are_left() -> None:
    """The source has only the first part of what was asked for."""
    other = fake_side("other")
    async with (
        lending(other) as address,
        open_pair(slow_side(), peers=True, source=address) as pair,
    ):
        prompt = await first_turn(pair)
        await other.generate(pair.request(prompt[:37], remote=False, max_tokens=1))
        outputs = await pair.generate(prompt)
        assert tokens(outputs) == answer(prompt)
        assert (outputs[0].cached_tokens, outputs[0].peer_tokens) == (36, 8)
        assert reads(pair) == {"rejected": 1}


async def test_peer_read_of_nobody_is_a_computation() -> None:
    async with open_pair(slow_side(), peers=True, source=f"127.0.0.1:{steady_port()}") as pair:
        prompt = await first_turn(pair)
        assert_computed(pair, prompt, await pair.generate(prompt), {"unreachable": 1})


async def test_peer_read_of_other_weights_is_refused() -> None:
    """Invariant 2: blocks of other weights, dtype or protocol have another digest."""
    async with (
        lending(fake_side("other", weights="another fine-tune")) as address,
        open_pair(slow_side(), peers=True, source=address) as pair,
    ):
        prompt = await first_turn(pair)
        assert_computed(pair, prompt, await pair.generate(prompt), {"refused": 1})


async def test_peer_read_of_another_salt_finds_nothing() -> None:
    """A tenant's blocks have other hashes, so a prompt of another one does not name them."""
    async with open_pair(slow_side(), peers=True) as pair:
        prompt = await first_turn(pair)
        request = dataclasses.replace(pair.request(prompt), salt="tenant")
        assert tokens(await pair.decode.generate(request)) == answer(prompt)
        assert (reads(pair), pair.prefill.now.totals.prompt_tokens_cached) == ({}, 0)


async def test_peer_read_with_tickets_covers_the_source() -> None:
    async with open_pair(slow_side(), peers=True, secret=SECRET) as pair:
        for prompt in (PROMPT, [*PROMPT, *answer(PROMPT, ANSWERED), *NEW]):
            name = f"q{len(prompt)}"
            ticket = tickets.issue(SECRET, name, pair.server.address, 1000.0)
            sampling = pair.request(prompt, remote=False, max_tokens=ANSWERED).sampling
            remote = pair.prefills.remote(pair.server.address, ticket, name)
            outputs = await pair.decode.generate(Request(name, tuple(prompt), sampling, remote=remote))
            assert tokens(outputs) == answer(prompt, ANSWERED)
        assert pair.prefills.outcomes == {"whole": 2}
        assert reads(pair) == {"read": 1}


async def test_peer_read_without_a_valid_ticket_is_refused() -> None:
    async with open_pair(slow_side(), peers=True, lender_secret=SECRET) as pair:
        prompt = await first_turn(pair)
        assert_computed(pair, prompt, await pair.generate(prompt), {"refused": 1})


async def test_lender_checks_the_ticket_of_each_read() -> None:
    """The ticket of the connection is for one request only."""
    side = fake_side("decode")
    server = lend(side, secret=SECRET)
    await side.open()
    await server.start()
    try:
        connection = await control.dial(server.address, PACE)
        ticket = tickets.issue(SECRET, "q", server.address, 1000.0)
        connection.send(side.me.hello("q", ticket))
        assert isinstance(await connection.receive(), Welcome)
        connection.send(ReadCached(session="a", epoch=1, hashes=[b"12345678"], request_id="r", ticket=ticket))
        failed = await connection.receive()
        assert isinstance(failed, Failed) and "the ticket is not for session r" in failed.reason
        await connection.close()
    finally:
        await server.close()
        await side.close()


def test_ticket_admits_only_its_source() -> None:
    """A prefill worker must not read blocks of a worker that somebody else names."""
    ticket = tickets.issue(SECRET, "q", "prefill:1", 1000.0, "decode:1")
    assert tickets.refusal(SECRET, ticket, "q", "prefill:1", 1000.0, "decode:1") is None
    for source in ("", "decode:2"):
        reason = tickets.refusal(SECRET, ticket, "q", "prefill:1", 1000.0, source)
        assert reason is not None and reason.startswith("the ticket was not signed for prefill:1")
    plain = tickets.issue(SECRET, "q", "prefill:1", 1000.0)
    assert tickets.refusal(SECRET, plain, "q", "prefill:1", 1000.0, "decode:1") is not None


@pytest.mark.parametrize(
    ("name", "secret", "ticket", "source", "named"),
    [
        ("a machine of its own", b"", "", "127.0.0.1:7000", True),
        ("other machines cannot reach it", b"", "", "127.0.0.1:7000", False),
        ("other machines can", b"", "", "10.0.0.7:7000", True),
        ("the router's ticket names no source", b"", "ticket", "10.0.0.7:7000", False),
        ("a ticket of its own", SECRET, "ticket", "10.0.0.7:7000", True),
        ("no control server", SECRET, "ticket", "", False),
    ],
)
async def test_decode_worker_names_itself_as_source(
    name: str, secret: bytes, ticket: str, source: str, named: bool
) -> None:
    address = "127.0.0.1:7001" if "of its own" in name and "machine" in name else "10.0.0.8:7001"
    prefills = ask(fake_side("decode"), secret=secret, source=source)
    fetch = Fetch("q", (1,), 0, b"", (1,), SamplingParams(), "")
    request = FetchRequest(fetch, address, ticket, "q", HostEvent())
    assert prefills.source_for(request) == (source if named else ""), name
    await prefills.close()


async def test_peer_read_that_is_cancelled_releases_both_sides() -> None:
    async with open_pair(slow_side(), peers=True) as pair:
        prompt = await first_turn(pair)
        pair.prefill.faulty.hold()
        generation = pair.decode.client.generate(pair.request(prompt))
        await pair.prefill.faulty.held(1)
        await generation.aclose()
        await eventually(lambda: pair.prefill.now.quarantined_blocks == READ // 4)
        pair.prefill.faulty.release()
        await pair.quiet()


async def test_peer_read_whose_source_ends_is_a_computation() -> None:
    """The blocks arrive, but not their checksums."""
    async with open_pair(slow_side(), peers=True) as pair:
        assert pair.lender is not None and pair.caches is not None
        prompt = await first_turn(pair)
        pair.prefill.faulty.hold()
        summing = pair.decode.faulty.summing = threading.Event()
        try:
            generating = asyncio.create_task(pair.generate(prompt))
            await pair.prefill.faulty.held(1)
            await pair.lender.close()
            links = pair.caches._links
            await eventually(lambda: not links.open)
        finally:
            summing.set()
        pair.prefill.faulty.release()
        assert_computed(pair, prompt, await generating, {"lost": 1})


@pytest.mark.parametrize("early", [False, True], ids=["after the read", "during the read"])
@pytest.mark.parametrize("error", [OSError("no memory"), TransferFailed("A rank.")], ids=["own", "rank"])
async def test_peer_read_whose_source_cannot_sum_is_a_computation(early: bool, error: Exception) -> None:
    """It is counted as refused, so that the peer is left alone for a while."""
    async with open_pair(slow_side(), peers=True) as pair:
        assert pair.caches is not None
        prompt = await first_turn(pair)
        summing = pair.decode.faulty.summing = threading.Event()
        try:
            pair.decode.faulty.fail_next_sums(error)
            pair.prefill.faulty.hold()
            generating = asyncio.create_task(pair.generate(prompt))
            await pair.prefill.faulty.held(1)
            (link,) = pair.caches._links.open
            (read,) = link.listeners.values()
            assert isinstance(read, _Read)
            if early:
                summing.set()
                await eventually(lambda: read.ended)
            pair.prefill.faulty.release()
            await pair.prefill.faulty.idle()
            summing.set()
            outputs = await generating
        finally:
            summing.set()
        assert_computed(pair, prompt, outputs, {"refused": 1})


async def test_lender_bad_messages_cost_nothing() -> None:
    """A peer asks for what is not there, twice, and leaves without a word: nothing is held."""
    side = fake_side("decode")
    server = lend(side)
    await side.open()
    await server.start()
    try:
        sampling = SamplingParams(temperature=0.0, max_tokens=1)
        await side.generate(Request("q", tuple(PROMPT), sampling))
        connection = await control.dial(server.address, PACE)
        connection.send(side.me.hello())
        assert isinstance(await connection.receive(), Welcome)
        hashes = block_hashes(PROMPT, 4, root_hash())
        nothing = ReadCached(session="a", epoch=1, hashes=[b"12345678"])
        connection.send(nothing)
        failed = await connection.receive()
        assert isinstance(failed, Failed) and "none of the blocks is cached" in failed.reason
        connection.send(ReadCached(session="b", epoch=1, hashes=[*hashes[:7], b"12345678"]))
        chunk = await connection.receive()
        assert isinstance(chunk, Chunk) and len(chunk.blocks) == 7
        assert side.now.pinned_blocks == 7
        await connection.receive()  # the checksums
        connection.send(ReadCached(session="b", epoch=2, hashes=hashes))
        again = await connection.receive()
        assert isinstance(again, Failed) and "exists already" in again.reason
        connection.send(ReadCached(session="c", epoch=1, hashes=hashes, deadline_s=0.0))
        late = await connection.receive()
        while not isinstance(late, Drained):
            late = await connection.receive()
        assert late.session == "c"
        await connection.close()
        await eventually(lambda: not (side.now.pinned_blocks or side.now.owned_blocks or server.sessions))
    finally:
        await server.close()
        await side.close()


async def test_lender_draining_refuses_new_reads() -> None:
    async with open_pair(slow_side(), peers=True) as pair:
        assert pair.lender is not None
        prompt = await first_turn(pair)
        async with asyncio.timeout(TIMEOUT_S):
            await pair.lender.drain()
        assert_computed(pair, prompt, await pair.generate(prompt), {"refused": 1})
