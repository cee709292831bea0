"""The prefill worker's control server, spoken to over real TCP by a decode worker that may be a bad one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from baton_api import messages, tickets
from baton_api.errors import SetupError, TransferFailed
from baton_api.hashing import block_hashes, chain_hash, root_hash
from baton_api.messages import (
    PROTOCOL,
    Abort,
    Checksums,
    Chunk,
    Commit,
    Done,
    Drained,
    Failed,
    Ping,
    Pong,
    Prefill,
    Refuse,
    Welcome,
)
from baton_api.sampling import SamplingParams
from baton_engine.requests import Output, Request
from baton_engine.transfer import control
from baton_engine.transfer.control import ControlConnection
from baton_engine.transfer.integrity import block_checksums
from baton_prefill.server import PrefillServer
from tests.decode.pair import PACE, TIMEOUT_S, Side, eventually, fake_side, serve
from tests.engine.fake_model import FakeModel

PROMPT = list(range(30))
BLOCKS = 8
"""Of PROMPT, at 4 tokens each."""
NOW = 1000.0


@dataclass
class Bench:
    """One prefill worker, and a decode worker's side of a connection that the test plays by hand."""

    side: Side
    server: PrefillServer

    @property
    def model(self) -> FakeModel:
        assert isinstance(self.side.model, FakeModel)
        return self.side.model

    async def raw(self) -> ControlConnection:
        return await control.dial(self.server.address, PACE)

    @contextlib.asynccontextmanager
    async def peer(self, **hello: Any) -> AsyncIterator[ControlConnection]:
        """A connection that was welcomed and has a heartbeat."""
        connection = await self.raw()
        connection.send(self.side.me.hello(**hello))
        try:
            assert isinstance(await connection.receive(), Welcome)
            connection.start_heartbeat()
            yield connection
        finally:
            await connection.close()

    async def quiet(self) -> None:
        def held() -> tuple[int, ...]:
            now = self.side.now
            return (
                self.server.sessions,
                now.running,
                now.queued,
                now.held,
                now.owned_blocks,
                now.pinned_blocks,
            )

        await eventually(lambda: not any(held()), held)


@contextlib.asynccontextmanager
async def open_bench(side: Side | None = None, **how: Any) -> AsyncIterator[Bench]:
    side = side or fake_side("prefill-0")
    bench = Bench(side, serve(side, **how))
    await side.open()
    await bench.server.start()
    try:
        yield bench
        await bench.quiet()
    finally:
        bench.model.go.set()  # a test that fails half way must not leave the engine waiting
        await bench.server.close()
        await side.close()


def prefill(session: str = "r", epoch: int = 1, tokens: list[int] = PROMPT, **changes: Any) -> Prefill:
    fields: dict[str, Any] = {
        "start_block": 0,
        "parent": root_hash(),
        "sampling": SamplingParams(seed=1, temperature=0.0),
        "request_id": session,
    }
    return Prefill(session=session, epoch=epoch, tokens=tokens, **{**fields, **changes})


async def hear(connection: ControlConnection, kind: type[Any]) -> Any:
    """The next message of that kind; heartbeats and others on the way are passed over."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            message = await connection.receive()
            if isinstance(message, kind):
                return message


async def chunks(connection: ControlConnection) -> tuple[list[Chunk], Commit]:
    """All chunks of the one prompt that is under way, and its commit."""
    heard, _, commit = await all_of(connection)
    return heard, commit


async def all_of(connection: ControlConnection) -> tuple[list[Chunk], list[Checksums], Commit]:
    """All messages of the one prompt that is under way."""
    heard: list[Chunk] = []
    sums: list[Checksums] = []
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            message = await connection.receive()
            match message:
                case Chunk():
                    heard.append(message)
                case Checksums():
                    sums.append(message)
                case Commit():
                    return heard, sums, message


async def ended(connection: ControlConnection) -> str:
    """How the server ended the connection."""
    with pytest.raises(TransferFailed) as raised:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                await connection.receive()
    return str(raised.value)


async def test_prefill_reader_goes_on_while_shared_threads_are_busy() -> None:
    """Prompts are admitted and heartbeats answered whatever else occupies the event loop's threads."""
    busy = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    async with open_bench() as bench, bench.peer() as peer:
        blocked = asyncio.ensure_future(asyncio.to_thread(busy.wait))
        try:
            peer.send(prefill())
            _, commit = await chunks(peer)
            assert commit.first.token == FakeModel().greedy(PROMPT, 1)[0]
            peer.send(Done(session="r", epoch=1))
            peer.send(Ping(number=7))
            while (await hear(peer, Pong)).number != 7:
                pass
        finally:
            busy.set()
            await blocked


class Watched:
    """A worker's engine client that remembers what it was asked."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self.requests: list[Request] = []

    def generate(self, request: Request) -> AsyncIterator[Output]:
        self.requests.append(request)
        return self._side.client.generate(request)


@pytest.mark.parametrize("length", [1, 4, 28, 30])
async def test_prefill_prompt_is_hashed_once_by_its_admission(length: int) -> None:
    """Hashes computed off the event loop are not computed again when the engine gets the prompt on it."""
    side = fake_side("prefill-0")
    client = Watched(side)
    async with open_bench(side, client=client) as bench, bench.peer() as peer:
        peer.send(prefill(tokens=PROMPT[:length], parent=root_hash("t"), salt="t"))
        await chunks(peer)
        peer.send(Done(session="r", epoch=1))
        await hear(peer, Drained)
    (request,) = client.requests
    assert request.hashes == block_hashes(PROMPT[:length], side.cache.block_size, root_hash("t"))


@pytest.mark.parametrize(("tenant", "turn"), [("alice", "alice"), ("", "r")])
async def test_prefill_prompt_waits_for_the_turn_of_its_tenant(tenant: str, turn: str) -> None:
    """Without a tenant, as the engine's other requests, it has turns of its own."""
    side = fake_side("prefill-0")
    client = Watched(side)
    async with open_bench(side, client=client) as bench, bench.peer() as peer:
        peer.send(prefill(tenant=tenant))
        await chunks(peer)
        peer.send(Done(session="r", epoch=1))
        await hear(peer, Drained)
    assert [request.tenant for request in client.requests] == [turn]


async def test_prefill_announces_computed_blocks_then_commits() -> None:
    async with open_bench() as bench, bench.peer() as peer:
        peer.send(prefill())
        heard, told, commit = await all_of(peer)
        assert [chunk.first_block for chunk in heard] == [0, 2, 4, 6], "8 tokens a pass, 4 a block"
        assert [one.first_block for one in told] == [0, 2, 4, 6]
        blocks = [block for chunk in heard for block in chunk.blocks]
        assert len(set(blocks)) == BLOCKS
        sums = [checksum for one in told for checksum in one.checksums]
        assert sums == block_checksums(bench.side.cache, blocks)
        assert commit.first.token == FakeModel().greedy(PROMPT, 1)[0]
        tail = root_hash()
        for start in range(0, 30, 4):
            tail = chain_hash(tail, PROMPT[start : start + 4])
        assert (commit.prompt_tokens, commit.cached_tokens, commit.tail) == (30, 0, tail)
        assert bench.side.now.held == 1, "the blocks stay until Done"
        peer.send(Done(session="r", epoch=1))
        assert await hear(peer, Drained) == Drained(session="r", epoch=1)


async def test_prefill_samples_one_token_whatever_peer_requests() -> None:
    """A peer's `max_tokens` and `prompt_logprobs` cost the prefill worker no passes of their own."""
    async with open_bench() as bench, bench.peer() as peer:
        peer.send(prefill(sampling=SamplingParams(temperature=0.0, max_tokens=9, prompt_logprobs=2)))
        await chunks(peer)
        assert bench.model.passes == 4, "30 tokens, 8 a pass"
        peer.send(Done(session="r", epoch=1))
        await hear(peer, Drained)


async def test_prefill_announces_a_cached_prefix_first() -> None:
    async with open_bench() as bench, bench.peer() as peer:
        peer.send(prefill())
        await chunks(peer)
        peer.send(Done(session="r", epoch=1))
        await hear(peer, Drained)
        bench.model.go.clear()
        try:
            peer.send(prefill("s"))
            first = await hear(peer, Chunk)
            assert (first.session, first.first_block, len(first.blocks)) == ("s", 0, 7)
        finally:
            bench.model.go.set()
        rest, commit = await chunks(peer)
        assert [(chunk.first_block, len(chunk.blocks)) for chunk in rest] == [(7, 1)]
        assert commit.cached_tokens == 28
        peer.send(Done(session="s", epoch=1))


async def test_prefill_skips_blocks_that_the_decode_worker_has() -> None:
    parent = root_hash()
    for start in range(0, 12, 4):
        parent = chain_hash(parent, PROMPT[start : start + 4])
    async with open_bench() as bench, bench.peer() as peer:
        peer.send(prefill(start_block=3, parent=parent))
        heard, _ = await chunks(peer)
        assert [chunk.first_block for chunk in heard] == [3, 4, 6]
        peer.send(Done(session="r", epoch=1))


async def test_another_prompt_behind_the_same_length_is_refused() -> None:
    """Peers' defect 19: tokens that differ are found by the parent's hash before anything is computed."""
    async with open_bench() as bench, bench.peer() as peer:
        peer.send(prefill(start_block=1, parent=chain_hash(root_hash(), [9, 9, 9, 9])))
        failed = await hear(peer, Failed)
        assert "not those that the decode worker has" in failed.reason
        assert not failed.retry
        assert bench.model.passes == 0


PrefillState = Callable[[Bench, ControlConnection], Awaitable[None]]


async def start_prefill(bench: Bench, peer: ControlConnection) -> None:
    peer.send(prefill())


async def in_mid_pass(bench: Bench, peer: ControlConnection) -> None:
    bench.model.inside.clear()
    bench.model.go.clear()
    peer.send(prefill())
    await asyncio.to_thread(bench.model.inside.wait, TIMEOUT_S)


async def partly_announced(bench: Bench, peer: ControlConnection) -> None:
    peer.send(prefill())
    await hear(peer, Chunk)


async def committed(bench: Bench, peer: ControlConnection) -> None:
    peer.send(prefill())
    await hear(peer, Commit)


STATES: dict[str, PrefillState] = {
    "asked": start_prefill,
    "in mid-pass": in_mid_pass,
    "partly announced": partly_announced,
    "committed": committed,
}


@pytest.mark.parametrize("state", STATES)
async def test_prefill_abort_in_any_state_releases_and_confirms(state: str) -> None:
    """Peers' defect 23: an abort is acknowledged once nothing of the session is left, whatever its state."""
    async with open_bench() as bench, bench.peer() as peer:
        await STATES[state](bench, peer)
        peer.send(Abort(session="r", epoch=1))
        assert await hear(peer, Drained) == Drained(session="r", epoch=1)
        bench.model.go.set()


@pytest.mark.parametrize("state", STATES)
async def test_prefill_lost_connection_in_any_state_releases(state: str) -> None:
    async with open_bench() as bench:
        async with bench.peer() as peer:
            await STATES[state](bench, peer)
        bench.model.go.set()


@pytest.mark.parametrize("state", ["in mid-pass", "committed"])
async def test_prefill_deadline_releases_all_blocks(state: str) -> None:
    """Peers' defect 8: a decode worker that never says Done costs blocks for so long and no longer."""
    async with open_bench() as bench, bench.peer() as peer:
        if state == "in mid-pass":
            bench.model.go.clear()
        peer.send(prefill(deadline_s=0.15))
        assert await hear(peer, Drained) == Drained(session="r", epoch=1)
        bench.model.go.set()


async def test_server_silent_peer_sessions_are_released() -> None:
    async with open_bench(pace=replace(PACE, silent_ticks=40)) as bench:
        connection = await bench.raw()
        connection.send(bench.side.me.hello())
        await connection.receive()
        connection.send(prefill())  # and no heartbeat from now on
        await hear(connection, Commit)
        await eventually(lambda: bench.server.sessions == 0)
        await connection.close()


async def test_server_done_for_ended_session_is_acknowledged() -> None:
    """Peers' defect 23: a lost acknowledgement is asked for again, and comes again."""
    async with open_bench() as bench, bench.peer() as peer:
        for _ in range(2):
            peer.send(Done(session="gone", epoch=7))
            assert await hear(peer, Drained) == Drained(session="gone", epoch=7)


async def test_prefill_later_attempt_replaces_an_earlier_one() -> None:
    async with open_bench() as bench, bench.peer() as peer:
        bench.model.go.clear()
        peer.send(prefill(epoch=2))
        await eventually(lambda: bench.server.sessions == 1)
        peer.send(prefill(epoch=1))
        peer.send(prefill(epoch=2))
        peer.send(prefill(epoch=3))
        assert await hear(peer, Drained) == Drained(session="r", epoch=2)
        bench.model.go.set()
        _, commit = await chunks(peer)
        assert commit.epoch == 3
        peer.send(Abort(session="r", epoch=2))
        await hear(peer, Drained)
        assert bench.server.sessions == 1, "an abort of the earlier attempt is not for this one"
        peer.send(Done(session="r", epoch=3))


async def test_server_two_peers_may_use_one_session_name() -> None:
    """Peers' defect 27: names are each peer's own."""
    async with open_bench() as bench, bench.peer() as one, bench.peer() as two:
        one.send(prefill())
        two.send(prefill(tokens=PROMPT[::-1]))
        assert (await chunks(one))[1].first.token == FakeModel().greedy(PROMPT, 1)[0]
        assert (await chunks(two))[1].first.token == FakeModel().greedy(PROMPT[::-1], 1)[0]
        one.send(Done(session="r", epoch=1))
        await hear(one, Drained)
        assert bench.server.sessions == 1
        two.send(Done(session="r", epoch=1))


async def test_prefill_drain_finishes_sessions_and_rejects_new_ones() -> None:
    async with open_bench() as bench, bench.peer() as peer:
        peer.send(prefill())
        await chunks(peer)
        drained = asyncio.ensure_future(bench.server.drain())
        await asyncio.sleep(0)
        peer.send(prefill("late"))
        failed = await hear(peer, Failed)
        assert (failed.session, failed.retry) == ("late", True)
        assert "draining" in failed.reason
        assert not drained.done(), "the blocks of the first one were not pulled yet"
        peer.send(Done(session="r", epoch=1))
        await asyncio.wait_for(drained, TIMEOUT_S)


async def test_prefill_full_worker_rejects_with_retry() -> None:
    async with open_bench(sessions=1) as bench, bench.peer() as peer:
        peer.send(prefill())
        await chunks(peer)
        peer.send(prefill("s"))
        failed = await hear(peer, Failed)
        assert (failed.retry, failed.busy, failed.reason) == (
            True,
            True,
            "prefill-0 has 1 sessions under way already",
        )
        peer.send(Done(session="r", epoch=1))


async def test_prefill_ping_is_answered_with_the_load() -> None:
    async with open_bench() as bench, bench.peer() as peer:
        peer.send(Ping(number=41))
        pong = await hear(peer, Pong)
        assert (pong.number, pong.free_blocks) == (41, bench.side.now.available_blocks)


async def test_prefill_other_protocol_version_is_rejected() -> None:
    async with open_bench() as bench:
        connection = await bench.raw()
        hello = {"type": "hello", "protocol": PROTOCOL + 1, "worker": "decode-9", "novelty": [1, 2]}
        await send_raw(connection, msgspec.msgpack.encode(hello))
        refusal = await hear(connection, Refuse)
        assert f"prefill-0 uses version {PROTOCOL} " in refusal.reason
        assert f"decode-9 version {PROTOCOL + 1}." in refusal.reason
        assert "closed" in await ended(connection)
        await connection.close()


async def test_prefill_other_digest_is_rejected_without_memory_details() -> None:
    async with open_bench() as bench:
        other = fake_side("decode-1", weights="v")
        connection = await bench.raw()
        connection.send(other.me.hello())
        refusal = await hear(connection, Refuse)
        assert "weights is w here and v there" in refusal.reason
        await ended(connection)
        await connection.close()
        await other.transfer.close()


UNWELCOME: dict[str, bytes] = {
    "garbage": bytes(range(256)) * 8,
    "a frame over the limit": (2**31).to_bytes(4) + b"x" * 100,
    "a first frame over its own limit": (100_000).to_bytes(4) + b"x" * 100_000,
    "no msgpack": (5).to_bytes(4) + b"hello",
    "a ping before Hello": messages.encode(Ping(number=1)),
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "nothing at all": b"",
    "half a frame": (50).to_bytes(4) + b"x",
}


@pytest.mark.parametrize("case", UNWELCOME)
async def test_prefill_peer_without_hello_is_cut_off(case: str) -> None:
    ends = case not in ("nothing at all", "half a frame")
    async with open_bench(pace=PACE if ends else replace(PACE, handshake_s=2.0)) as bench:
        connection = await bench.raw()
        connection._writer.write(UNWELCOME[case])
        await ended(connection)
        await connection.close()
        async with bench.peer() as peer:
            peer.send(prefill())
            await chunks(peer)
            peer.send(Done(session="r", epoch=1))


async def test_prefill_unexpected_message_ends_the_connection() -> None:
    async with open_bench() as bench, bench.peer() as peer:
        peer.send(Chunk(session="r", epoch=1, first_block=0, blocks=[1]))
        await ended(peer)


async def test_mutated_frames_end_a_connection_at_most() -> None:
    chance = random.Random(5)
    frame = messages.encode(prefill())[messages.LENGTH_BYTES :]
    async with open_bench() as bench:
        for _ in range(150):
            mutated = bytearray(frame)
            for _ in range(chance.randint(1, 4)):
                mutated[chance.randrange(len(mutated))] = chance.randrange(256)
            async with bench.peer() as peer:
                await send_raw(peer, bytes(mutated))
        async with bench.peer() as peer:
            peer.send(prefill())
            await chunks(peer)
            peer.send(Done(session="r", epoch=1))


SECRET = b"s3cret"


async def test_prefill_ticket_admits_only_its_own_request() -> None:
    async with open_bench(secret=SECRET, wall_clock=lambda: NOW) as bench:
        good = tickets.issue(SECRET, "r", bench.server.address, NOW)
        async with bench.peer(request_id="r", ticket=good) as peer:
            peer.send(prefill(ticket=good))
            await chunks(peer)
            peer.send(Done(session="r", epoch=1))
            peer.send(prefill("s", ticket=good))
            failed = await hear(peer, Failed)
            assert failed.reason == "the ticket is not for session s"


@pytest.mark.parametrize("case", ["none", "of another prefill worker", "expired", "of another secret", "odd"])
async def test_without_a_good_ticket_the_memory_is_not_told_of(case: str) -> None:
    async with open_bench(secret=SECRET, wall_clock=lambda: NOW) as bench:
        address = bench.server.address
        ticket = {
            "none": "",
            "of another prefill worker": tickets.issue(SECRET, "r", "10.0.0.1:1", NOW),
            "expired": tickets.issue(SECRET, "r", address, NOW - 200),
            "of another secret": tickets.issue(b"other", "r", address, NOW),
            "odd": "v1.é.r.ü",
        }[case]
        connection = await bench.raw()
        connection.send(bench.side.me.hello("r", ticket))
        refusal = await hear(connection, Refuse)
        assert "ticket" in refusal.reason
        await connection.close()


async def test_too_many_connections_are_refused() -> None:
    async with open_bench(peers=1) as bench, bench.peer():
        connection = await bench.raw()
        connection.send(bench.side.me.hello())
        assert "of 1 workers already" in (await hear(connection, Refuse)).reason
        await connection.close()


@pytest.mark.parametrize("says", ["nothing", "half a Hello", "a Hello without a ticket"])
async def test_server_strangers_keep_no_decode_worker_out(says: str) -> None:
    """Whoever reaches the port can open connections; only a valid Hello makes a decode worker of one."""
    async with open_bench(peers=2, secret=SECRET, wall_clock=lambda: NOW) as bench:
        strangers = []
        for _ in range(20):
            stranger = await bench.raw()
            strangers.append(stranger)
            if says == "half a Hello":
                stranger._writer.write(messages.encode(bench.side.me.hello())[:-1])
            elif says == "a Hello without a ticket":
                stranger.send(bench.side.me.hello("r"))
                assert isinstance(await stranger.receive(), Refuse)
        ticket = tickets.issue(SECRET, "r", bench.server.address, NOW)
        async with bench.peer(request_id="r", ticket=ticket), bench.peer(request_id="r", ticket=ticket):
            await eventually(lambda: len(bench.server._connections) <= 4, lambda: bench.server._connections)
            late = await bench.raw()
            late.send(bench.side.me.hello("r", ticket))
            assert "of 2 workers already" in (await hear(late, Refuse)).reason
            await late.close()
        for stranger in strangers:
            await stranger.close()


async def test_prefill_port_in_use_names_the_flag() -> None:
    async with open_bench() as bench:
        second = serve(bench.side, port=int(bench.server.address.rpartition(":")[2]))
        with pytest.raises(SetupError, match=r"cannot listen on 127\.0\.0\.1:\d+.*--control-port"):
            await second.start()
        await second.close()


async def test_prefill_engine_failure_is_retryable() -> None:
    async with open_bench() as bench, bench.peer() as peer:
        bench.model.fail_on = PROMPT[20]
        peer.send(prefill())
        failed = await hear(peer, Failed)
        assert failed.retry
        peer.send(Done(session="r", epoch=1))
        assert await hear(peer, Drained) == Drained(session="r", epoch=1)


async def test_prefill_transfer_is_served_while_peers_may_read() -> None:
    async with open_bench() as bench:
        presence = bench.server._peer_reads
        assert not presence.served
        async with bench.peer():
            assert presence.served
        presence.close()
        assert not presence.served


async def send_raw(connection: ControlConnection, body: bytes) -> None:
    connection._writer.write(len(body).to_bytes(messages.LENGTH_BYTES) + body)
