"""Pieces of a body that pass from a worker's connection to a sink, without a task."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import pytest

from baton_http.upstream import Upstream, UpstreamExchange, UpstreamLost
from tests.router.running import until

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(piece: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(piece), piece)


class ScriptedWorker:
    """Answers one request with the head, and then sends each of `writes` when the test says `go`."""

    def __init__(self, writes: Sequence[bytes]) -> None:
        self.go = asyncio.Semaphore(0)
        self.ended = asyncio.Event()
        self._writes = writes

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD)
        for piece in self._writes:
            await self.go.acquire()
            writer.write(piece)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        self.ended.set()


@asynccontextmanager
async def answering(writes: Sequence[bytes]) -> AsyncIterator[tuple[ScriptedWorker, UpstreamExchange]]:
    worker = ScriptedWorker(writes)
    server = await asyncio.start_server(worker.serve, "127.0.0.1")
    upstream = Upstream("127.0.0.1", server.sockets[0].getsockname()[1], connect_s=60.0)
    try:
        yield worker, await upstream.request(b"GET / HTTP/1.1\r\n\r\n")
    finally:
        upstream.close()
        server.close()
        for _ in writes:
            worker.go.release()
        await worker.ended.wait()


def into(pieces: list[bytes]) -> Callable[[bytes], bool]:
    """A sink that takes everything."""

    def take(piece: bytes) -> bool:
        pieces.append(piece)
        return True

    return take


async def read_all(exchange: UpstreamExchange, sink: Callable[[bytes], bool]) -> list[bytes]:
    """The pieces that the sink did not take, in order."""
    pieces = []
    while piece := await exchange.read(sink):
        pieces.append(piece)
    return pieces


@pytest.mark.parametrize("seed", range(20))
async def test_law_each_byte_passes_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    body = [bytes([65 + number % 26]) * rng.randint(1, 50) for number in range(rng.randint(1, 40))]
    text = b"".join(map(chunk, body)) + END
    cuts = sorted(rng.sample(range(1, len(text)), min(30, len(text) - 1)))
    writes = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    passed: list[bytes] = []

    def sink(piece: bytes) -> bool:
        taken = rng.random() < 0.6
        if taken:
            passed.append(piece)
        return taken

    async with answering(writes) as (worker, exchange):
        for _ in writes:
            worker.go.release()
        while piece := await exchange.read(sink):
            passed.append(piece)
    assert b"".join(passed) == b"".join(body)


async def test_sink_gets_pieces_as_they_arrive_and_never_the_last() -> None:
    taken: list[bytes] = []
    writes = [chunk(b"one"), chunk(b"two"), chunk(b"last") + END]

    async with answering(writes) as (worker, exchange):
        reading = asyncio.create_task(read_all(exchange, into(taken)))
        for count, expected in enumerate(([b"one"], [b"one", b"two"]), start=1):
            worker.go.release()
            await until(lambda count=count: len(taken) == count)  # type: ignore[misc]
            assert taken == expected and not reading.done()
        worker.go.release()
        assert await reading == [b"last"]
        assert exchange.complete and len(taken) == 2


async def test_sink_without_room_leaves_the_pieces_to_the_reader() -> None:
    writes = [chunk(b"one"), chunk(b"two") + END]
    async with answering(writes) as (worker, exchange):
        worker.go.release()
        assert await exchange.read(lambda piece: False) == b"one"
        worker.go.release()
        assert await exchange.read(lambda piece: False) == b"two"


async def test_error_of_the_sink_is_the_readers() -> None:
    def sink(piece: bytes) -> bool:
        raise ValueError("an event that cannot be read")

    async with answering([chunk(b"one"), END]) as (worker, exchange):
        worker.go.release()
        with pytest.raises(ValueError, match="cannot be read"):
            await exchange.read(sink)
        assert not exchange.complete


async def test_lost_worker_is_noticed_behind_pieces_that_passed() -> None:
    taken: list[bytes] = []
    async with answering([chunk(b"one"), b""]) as (worker, exchange):
        reading = asyncio.create_task(read_all(exchange, into(taken)))
        worker.go.release()
        await until(lambda: taken)
        worker.go.release()
        with pytest.raises(UpstreamLost) as lost:
            await reading
        assert (taken, lost.value.cause) == ([b"one"], "reset")


async def test_cancelled_reader_takes_its_sink_along() -> None:
    taken: list[bytes] = []
    async with answering([chunk(b"one"), chunk(b"two"), END]) as (worker, exchange):
        reading = asyncio.create_task(read_all(exchange, into(taken)))
        worker.go.release()
        await until(lambda: taken)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        worker.go.release()
        assert await exchange.read() == b"two"
        assert taken == [b"one"]
