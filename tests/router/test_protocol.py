"""Limits of client connections in bytes and seconds."""

from __future__ import annotations

import asyncio
import json

import pytest

from tests.router.fake_worker import FakeWorker
from tests.router.running import RunningRouter, running_router

START = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
LIMIT = 4096


async def answer_to(router: RunningRouter, *parts: bytes) -> bytes:
    """Everything that comes back until the router closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    try:
        async with asyncio.timeout(60):
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.read()
    finally:
        writer.close()


def endless(part: bytes) -> list[bytes]:
    return [part * 100] * 20


TOO_LARGE = {
    "one long line": [b"GET /" + b"x" * 2 * LIMIT + b" HTTP/1.1\r\n\r\n"],
    "one large header": [START, b"a: " + b"x" * 2 * LIMIT + b"\r\n\r\n"],
    "a header that does not end": [START, b"a: ", *endless(b"x" * 10)],
    "headers that do not end": [START, *endless(b"a: x\r\n")],
    "many headers in one piece": [START + b"a: x\r\n" * LIMIT + b"\r\n"],
}


@pytest.mark.parametrize("parts", TOO_LARGE.values(), ids=TOO_LARGE.keys())
async def test_head_over_the_limit_is_rejected(parts: list[bytes]) -> None:
    async with FakeWorker() as worker, running_router([worker], max_header=LIMIT) as router:
        answer = await answer_to(router, *parts)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 ")
        assert str(LIMIT) in json.loads(body)["error"]["message"]
        assert not worker.requests
        assert (await router.post()).status_code == 200


CHUNKED = START + b"transfer-encoding: chunked\r\n\r\n"
ENDLESS = {
    "a chunk's extension": (CHUNKED + b"1;", b"x" * 1000),
    "trailers": (CHUNKED + b"1\r\nx\r\n0\r\n", b"a: x\r\n" * 200),
    "one trailer": (CHUNKED + b"1\r\nx\r\n0\r\na:", b"x" * 1000),
}


@pytest.mark.parametrize(("start", "part"), ENDLESS.values(), ids=ENDLESS.keys())
async def test_endless_trailers_and_extensions_end_the_connection(start: bytes, part: bytes) -> None:
    async with FakeWorker() as worker, running_router([worker], max_header=LIMIT) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(start)
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(60):
                while True:
                    writer.write(part)
                    await writer.drain()
        assert reader.exception() or await reader.read()
        writer.close()
        assert not worker.requests
        assert (await router.post()).status_code == 200


async def test_head_within_the_limit_passes_before_a_large_body() -> None:
    async with FakeWorker() as worker, running_router([worker], max_header=LIMIT) as router:
        body = json.dumps({"model": "tiny", "pad": "x" * 50_000}).encode()
        head = START + b"a: " + b"x" * (LIMIT - 200) + b"\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        answer = await answer_to(router, head % len(body) + body)
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert worker.requests[0].body == body


async def test_slow_head_ends_the_connection() -> None:
    async with FakeWorker() as worker, running_router([worker], header_s=0.2) as router:
        assert await answer_to(router, START) == b""
        assert await answer_to(router) == b""


async def test_slow_body_is_an_error() -> None:
    async with FakeWorker() as worker, running_router([worker], body_s=0.2) as router:
        answer = await answer_to(router, START + b"content-length: 10\r\n\r\n{")
        assert answer.startswith(b"HTTP/1.1 400 ")
        assert b"0.2 seconds" in answer


async def test_endless_body_is_rejected_and_not_read_on() -> None:
    async with FakeWorker() as worker, running_router([worker], max_body=1000) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(START + b"content-length: 100000000\r\n\r\n" + b"x" * 100_000)
        assert b" 413 " in await reader.readline()
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(60):
                while True:
                    writer.write(b"x" * 100_000)
                    await writer.drain()
        writer.close()


@pytest.mark.parametrize("line", [b"NONSENSE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00"])
async def test_invalid_http_is_400_in_the_format_of_openai(line: bytes) -> None:
    async with running_router() as router:
        head, _, body = (await answer_to(router, line)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
