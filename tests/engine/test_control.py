"""A control connection over real sockets: order, limits, and who is alive."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from baton_api import messages
from baton_api.errors import TransferFailed
from baton_api.messages import Done, Ping, Pong, Prefill
from baton_api.sampling import SamplingParams
from baton_engine.transfer import control
from baton_engine.transfer.control import ControlConnection, Pace, dial, join_address, split_address

QUICK = Pace(tick_s=0.04, silent_ticks=5, connect_s=60.0, handshake_s=60.0, close_s=0.2)


@contextlib.asynccontextmanager
async def open_ends() -> AsyncIterator[tuple[ControlConnection, ControlConnection]]:
    """Both ends of one connection, without heartbeats."""
    accepted: asyncio.Future[ControlConnection] = asyncio.get_running_loop().create_future()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pong = Pong(number=0, queued_tokens=17)
        accepted.set_result(ControlConnection(reader, writer, QUICK, lambda number: pong))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    ours = await dial(f"127.0.0.1:{port}", QUICK)
    theirs = await accepted
    try:
        yield ours, theirs
    finally:
        await ours.close()
        await theirs.close()
        server.close()


async def end_of(connection: ControlConnection) -> str:
    with pytest.raises(TransferFailed) as raised:
        async with asyncio.timeout(60):
            async for _ in connection.messages():
                pass
    return str(raised.value)


async def test_messages_arrive_in_order() -> None:
    async with open_ends() as (ours, theirs):
        sent = [Done(session=str(number), epoch=number) for number in range(500)]
        for message in sent:
            ours.send(message)
        assert [await theirs.receive() for _ in sent] == sent


async def test_control_long_message_arrives_whole() -> None:
    async with open_ends() as (ours, theirs):
        prompt = Prefill(
            session="r",
            epoch=1,
            tokens=list(range(500_000)),
            start_block=0,
            parent=b"",
            sampling=SamplingParams(seed=0),
        )
        ours.send(prompt)
        assert await theirs.receive() == prompt


async def test_control_ping_is_answered_and_not_passed_on() -> None:
    async with open_ends() as (ours, theirs):
        waiting = asyncio.ensure_future(theirs.receive())
        ours.send(Ping(number=5))
        assert await ours.receive() == Pong(number=0, queued_tokens=17)
        ours.send(Done(session="r", epoch=1))
        assert await waiting == Done(session="r", epoch=1), "the ping itself is not passed on"


async def test_control_close_sends_queued_messages_first() -> None:
    async with open_ends() as (ours, theirs):
        ours.send(Done(session="last", epoch=1))
        await ours.close()
        assert await theirs.receive() == Done(session="last", epoch=1)
        assert "it was closed" in await end_of(theirs)


async def test_control_sending_after_the_end_is_no_error() -> None:
    async with open_ends() as (ours, theirs):
        await ours.close()
        ours.send(Done(session="r", epoch=1))
        await end_of(theirs)


async def test_two_idle_ends_keep_one_another_alive() -> None:
    async with open_ends() as (ours, theirs):
        ours.start_heartbeat()
        theirs.start_heartbeat()
        listening = asyncio.ensure_future(end_of(theirs))
        for _ in range(3 * QUICK.silent_ticks):
            assert isinstance(await ours.receive(), Pong)
        assert not listening.done()
        await ours.close()
        await listening


async def test_control_silent_peer_is_lost_after_some_ticks() -> None:
    async with open_ends() as (ours, _):
        ours.start_heartbeat()
        assert "no data was received for 0.2 s" in await end_of(ours)


async def test_control_own_pause_does_not_count_against_the_peer() -> None:
    async with open_ends() as (ours, theirs):
        ours.start_heartbeat()
        theirs.start_heartbeat()
        ends = [asyncio.ensure_future(end_of(end)) for end in (ours, theirs)]
        await asyncio.sleep(0)
        time.sleep(2 * QUICK.tick_s * QUICK.silent_ticks)  # noqa: ASYNC251 - the pause is the story
        done, _ = await asyncio.wait(ends, timeout=2 * QUICK.tick_s)
        assert not done
        await ours.close()
        await asyncio.gather(*ends)


async def test_control_peer_that_does_not_read_is_cut_off() -> None:
    async with open_ends() as (ours, theirs):
        theirs._writer.transport.pause_reading()  # type: ignore[attr-defined]
        prompt = Prefill(
            session="r",
            epoch=1,
            tokens=[100_000] * 1_500_000,
            start_block=0,
            parent=b"",
            sampling=SamplingParams(seed=0),
        )
        sent = 0
        while not ours._writer.is_closing():
            ours.send(prompt)
            sent += 1
            assert sent < 20
        assert "buffered bytes" in await end_of(ours)


async def test_half_a_frame_and_an_end_is_a_lost_connection() -> None:
    async with open_ends() as (ours, theirs):
        ours._writer.write(messages.encode(Done(session="r", epoch=1))[:-2])
        await ours.close()
        assert "ended" in await end_of(theirs)


@pytest.mark.parametrize(
    "address, parts",
    [
        ("127.0.0.1:80", ("127.0.0.1", 80)),
        ("[::1]:7000", ("::1", 7000)),
        ("host.name:65535", ("host.name", 65535)),
    ],
)
def test_address_splits_into_host_and_port(address: str, parts: tuple[str, int]) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address


@pytest.mark.parametrize(
    "address", ["", "host", ":80", "host:", "host:0", "host:65536", "host:8o", "host:²", "h:-1"]
)
def test_address_invalid_is_rejected(address: str) -> None:
    with pytest.raises(TransferFailed, match="Expected host:port"):
        split_address(address)


async def test_dial_without_listener_fails_at_once() -> None:
    async with open_ends() as (ours, _):
        port = ours._writer.get_extra_info("sockname")[1]  # in use, but without a listener
    with pytest.raises(TransferFailed, match="Cannot connect to"):
        await control.dial(f"127.0.0.1:{port}", QUICK)
