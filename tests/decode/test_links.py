"""Missing or bad prefill workers: each costs a request a fallback with a reason, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import msgspec
import pytest

from baton_api import tickets
from baton_api.messages import (
    PROTOCOL,
    Checksums,
    Chunk,
    Commit,
    Failed,
    Hello,
    Ping,
    Pong,
    Prefill,
    Refuse,
    TokenChoice,
    Welcome,
)
from baton_api.sampling import SamplingParams
from baton_decode.prefill_workers import PrefillWorkers
from baton_engine.requests import Request
from baton_engine.transfer.control import ControlConnection, Pace
from baton_engine.transfer.loopback import LoopbackTransfer
from tests.decode.pair import PACE, TIMEOUT_S, Side, ask, eventually, fake_side, tokens
from tests.engine.fake_model import FakeModel

PROMPT = list(range(30))
EXPECTED = FakeModel().greedy(PROMPT, 4)

Script = Callable[[ControlConnection, Side], Awaitable[None]]


def welcome(side: Side, **changes: object) -> Welcome:
    """Return the hello of a correct worker."""
    good = side.me.welcome(side.transfer.metadata, side.transfer.pools)
    changed: Welcome = msgspec.structs.replace(good, **changes)
    return changed


async def hang_up(connection: ControlConnection, side: Side) -> None:
    pass


async def say_nothing(connection: ControlConnection, side: Side) -> None:
    await connection.receive()
    await asyncio.Event().wait()


async def talk_nonsense(connection: ControlConnection, side: Side) -> None:
    connection._writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 20)
    await asyncio.Event().wait()


async def announce_a_huge_frame(connection: ControlConnection, side: Side) -> None:
    connection._writer.write(b"\xff" * 100)
    await asyncio.Event().wait()


async def answer_something_else(connection: ControlConnection, side: Side) -> None:
    connection.send(Ping(number=1))
    connection.send(Failed(session="r", epoch=1, reason="", retry=False))
    await asyncio.Event().wait()


async def refuse(connection: ControlConnection, side: Side) -> None:
    await connection.receive()
    connection.send(Refuse(reason="not you"))


async def welcome_another_version(connection: ControlConnection, side: Side) -> None:
    connection.send(welcome(side, protocol=PROTOCOL + 1))


async def welcome_another_digest(connection: ControlConnection, side: Side) -> None:
    connection.send(welcome(side, digest="0" * 32))


async def welcome_with_other_blocks(connection: ControlConnection, side: Side) -> None:
    pool = msgspec.structs.replace(side.transfer.pools[0], block_bytes=17)
    connection.send(welcome(side, pools=(pool,)))


async def welcome_with_bad_metadata(connection: ControlConnection, side: Side) -> None:
    connection.send(welcome(side, agent=b"junk"))
    await asyncio.Event().wait()


async def greet(connection: ControlConnection, side: Side) -> Prefill:
    """Do it right as far as the first prompt."""
    assert isinstance(await connection.receive(), Hello)
    connection.send(welcome(side))
    connection.start_heartbeat()
    requested = await connection.receive()
    assert isinstance(requested, Prefill)
    return requested


async def vanish_after_welcome(connection: ControlConnection, side: Side) -> None:
    assert isinstance(await connection.receive(), Hello)
    connection.send(welcome(side))


async def vanish_after_the_question(connection: ControlConnection, side: Side) -> None:
    await greet(connection, side)


async def fall_silent_after_the_question(connection: ControlConnection, side: Side) -> None:
    assert isinstance(await connection.receive(), Hello)
    connection.send(welcome(side))  # and no heartbeat, as with a stopped process
    await asyncio.Event().wait()


async def announce_blocks_that_are_none(connection: ControlConnection, side: Side) -> None:
    requested = await greet(connection, side)
    connection.send(Chunk(session=requested.session, epoch=1, first_block=0, blocks=[10**6]))
    await asyncio.Event().wait()


async def announce_with_a_wrong_checksum(connection: ControlConnection, side: Side) -> None:
    requested = await greet(connection, side)
    connection.send(Chunk(session=requested.session, epoch=1, first_block=0, blocks=[1]))
    connection.send(Checksums(session=requested.session, epoch=1, first_block=0, checksums=[0]))
    await asyncio.Event().wait()


async def commit_to_another_prompt(connection: ControlConnection, side: Side) -> None:
    requested = await greet(connection, side)
    connection.send(
        Commit(
            session=requested.session,
            epoch=1,
            first=TokenChoice(token=1),
            prompt_tokens=len(requested.tokens),
            cached_tokens=0,
            tail=b"another",
        )
    )
    await asyncio.Event().wait()


async def say_what_only_decode_workers_say(connection: ControlConnection, side: Side) -> None:
    requested = await greet(connection, side)
    connection.send(requested)
    await asyncio.Event().wait()


BAD: dict[Script, str] = {
    hang_up: "unreachable",
    say_nothing: "unreachable",
    talk_nonsense: "unreachable",
    announce_a_huge_frame: "unreachable",
    answer_something_else: "unreachable",
    welcome_with_bad_metadata: "unreachable",
    refuse: "refused",
    welcome_another_version: "refused",
    welcome_another_digest: "refused",
    welcome_with_other_blocks: "refused",
    vanish_after_welcome: "lost",
    vanish_after_the_question: "lost",
    fall_silent_after_the_question: "lost",
    say_what_only_decode_workers_say: "lost",
    announce_blocks_that_are_none: "protocol",
    announce_with_a_wrong_checksum: "checksum",
    commit_to_another_prompt: "mismatch",
}


PACES: dict[Script, Pace] = {
    say_nothing: replace(PACE, handshake_s=0.5, unreachable_s=TIMEOUT_S),
    fall_silent_after_the_question: replace(PACE, silent_ticks=8),
}
"""Deadlines for workers that no other event ends."""


@contextlib.asynccontextmanager
async def open_bad_worker(script: Script) -> AsyncIterator[tuple[Side, PrefillWorkers, str, list[int]]]:
    """A decode worker, and the address of a prefill worker that follows `script` on each connection."""
    bad, decode = fake_side("bad"), fake_side("decode")
    calls: list[int] = []
    tasks: set[asyncio.Task[None]] = set()

    async def play(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(1)
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        connection = ControlConnection(reader, writer, PACE)
        # asyncio's streams take a handler that ends as cancelled for a broken one.
        with contextlib.suppress(asyncio.CancelledError):
            await script(connection, bad)
        await connection.close()

    server = await asyncio.start_server(play, "127.0.0.1", 0)
    await decode.open()
    prefills = ask(decode, pace=PACES.get(script, PACE))
    try:
        yield decode, prefills, f"127.0.0.1:{server.sockets[0].getsockname()[1]}", calls
        await eventually(lambda: decode.now.owned_blocks + decode.now.quarantined_blocks == 0)
    finally:
        await prefills.close()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await decode.close()
        await bad.transfer.close()


def request(prefills: PrefillWorkers, address: str, name: str = "q", ticket: str = "") -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=4)
    return Request(name, tuple(PROMPT), sampling, remote=prefills.remote(address, ticket, name))


@pytest.mark.parametrize("script", BAD, ids=lambda script: script.__name__)
async def test_link_bad_prefill_worker_costs_a_recomputation(script: Script) -> None:
    async with open_bad_worker(script) as (decode, prefills, address, _):
        assert tokens(await decode.generate(request(prefills, address))) == EXPECTED
        assert prefills.outcomes == {BAD[script]: 1}
        assert prefills.under_way == prefills.unsettled == 0


SECRET = b"secret"
NOW = 1000.0


@pytest.mark.parametrize("case", ["none", "forged", "for another address", "for another request", "expired"])
async def test_prefills_without_valid_ticket_dial_nobody(case: str) -> None:
    """Blocks of a prefill worker are believed: a caller cannot make this worker connect to one of its own."""
    async with open_bad_worker(hang_up) as (decode, _, address, calls):
        elsewhere = tickets.issue(SECRET, "q", "10.0.0.7:7000", NOW)
        ticket = {
            "none": "",
            "forged": tickets.issue(b"guessed", "q", address, NOW),
            "for another address": elsewhere,
            "for another request": tickets.issue(SECRET, "other", address, NOW),
            "expired": tickets.issue(SECRET, "q", address, NOW - 1000),
        }[case]
        prefills = ask(decode, secret=SECRET, wall_clock=lambda: NOW)
        assert tokens(await decode.generate(request(prefills, address, ticket=ticket))) == EXPECTED
        assert (prefills.outcomes, calls) == ({"refused": 1}, [])
        good = tickets.issue(SECRET, "good", address, NOW)
        await decode.generate(request(prefills, address, "good", good))
        assert calls == [1], "the ticket that names this address admits the connection"
        await prefills.close()


async def test_link_lost_before_any_message_is_reconnected_once() -> None:
    async with open_bad_worker(vanish_after_the_question) as (decode, prefills, address, calls):
        await decode.generate(request(prefills, address))
        assert len(calls) == 2


@pytest.mark.parametrize("ends", ["connects then", "never connects", "fails then"])
async def test_link_that_ends_while_transfer_connects_answers_at_once(ends: str) -> None:
    """Nothing else would tell the requests that share the dial: they would wait for their deadline."""
    async with open_bad_worker(vanish_after_welcome) as (decode, prefills, address, calls):
        decode.faulty.connecting = asyncio.Event()
        asking = [decode.generate(request(prefills, address, f"q{n}")) for n in range(3)]
        for outputs in await asyncio.gather(*asking):
            assert tokens(outputs) == EXPECTED
        assert (prefills.outcomes, prefills.loads) == ({"lost": 3}, {})
        assert 2 <= len(calls) <= 6, "a slow request may come too late to share a dial"
        if ends == "fails then":
            decode.faulty.refuse_next()
        if ends != "never connects":
            decode.faulty.connecting.set()
            assert isinstance(decode.faulty.inner, LoopbackTransfer)
            loopback = decode.faulty.inner
            assert isinstance(loopback, LoopbackTransfer)
            await eventually(lambda: not prefills._tasks)
            assert not loopback._peers, "the dead one is forgotten"


async def test_link_answers_pings_while_transfer_connects() -> None:
    """The peer would give the connection up otherwise."""
    answered = asyncio.Event()

    async def ping(connection: ControlConnection, side: Side) -> None:
        assert isinstance(await connection.receive(), Hello)
        connection.send(welcome(side))
        connection.send(Ping(number=7))
        while await connection.receive() != Pong(number=7):
            pass
        answered.set()

    async with open_bad_worker(ping) as (decode, prefills, address, _):
        decode.faulty.connecting = asyncio.Event()
        assert tokens(await decode.generate(request(prefills, address))) == EXPECTED
        assert answered.is_set()


async def vanish_in_mid_read(connection: ControlConnection, side: Side) -> None:
    requested = await greet(connection, side)
    connection.send(Chunk(session=requested.session, epoch=1, first_block=0, blocks=[1]))
    connection.send(Checksums(session=requested.session, epoch=1, first_block=0, checksums=[0]))


async def test_link_lost_in_mid_read_is_not_retried_on_its_blocks() -> None:
    async with open_bad_worker(vanish_in_mid_read) as (decode, prefills, address, calls):
        decode.faulty.hold()
        assert tokens(await decode.generate(request(prefills, address))) == EXPECTED
        assert (len(calls), prefills.outcomes, prefills.unsettled) == (1, {"lost": 1}, 1)
        assert decode.now.quarantined_blocks == 1
        decode.faulty.release()


async def test_link_unreachable_address_is_avoided_for_a_while() -> None:
    async with open_bad_worker(say_nothing) as (decode, prefills, address, calls):
        await asyncio.gather(*(decode.generate(request(prefills, address, f"q{n}")) for n in range(5)))
        assert prefills.outcomes == {"unreachable": 5}
        await decode.generate(request(prefills, address, "again"))
        assert len(calls) == 1
