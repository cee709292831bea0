"""A client that goes away: its work ends at once and its blocks come back."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from baton_engine.api.http import HttpServer
from tests.engine.api.api import MODEL, USER, Api, eventually


def request(path: str = "/v1/chat/completions", **body: object) -> bytes:
    encoded = msgspec.json.encode({"model": MODEL, "messages": USER, "prompt": "Hi"} | body)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(encoded)}"
    )
    return head.encode() + b"\r\n\r\n" + encoded


async def connect(server: HttpServer, payload: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(payload)
    await writer.drain()
    return reader, writer


async def hang_up(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_running_request_is_aborted(
    api: Api, server: HttpServer, stream: bool, n: int
) -> None:
    model, engine = api.model, api.served.computing

    def all_run() -> bool:
        """Let one more pass run while fewer requests do: others may come when the engine stands still."""
        if engine.snapshot().running < n and not model.go.is_set():
            model.stops_at = model.passes + 1
            model.go.set()
        return engine.snapshot().running == n

    model.stops_at = 9
    reader, writer = await connect(server, request(stream=stream, n=n, ignore_eos=True))
    if stream:
        for _ in range(5):
            await reader.readuntil(b"data: ")
    else:
        await eventually(all_run)
    await hang_up(writer)
    await eventually(lambda: not api.served.drain.running)
    model.resume()
    await eventually(lambda: not engine.snapshot().owned_blocks)
    api.assert_all_blocks_back()
    assert await api.metric('baton_worker_requests_total{finish_reason="abort"}') == n


@pytest.mark.parametrize("stream", [True, False])
async def test_disconnect_before_first_token_aborts(api: Api, server: HttpServer, stream: bool) -> None:
    api.model.go.clear()
    _, writer = await connect(server, request(stream=stream))
    await asyncio.to_thread(api.model.inside.wait)
    await hang_up(writer)
    await eventually(lambda: not api.served.drain.running)
    api.model.go.set()
    await eventually(lambda: not api.served.computing.snapshot().owned_blocks)
    api.assert_all_blocks_back()


@pytest.mark.one_process("counts the process's requests")
async def test_disconnect_before_the_body_leaves_nothing(api: Api, server: HttpServer) -> None:
    _, writer = await connect(server, request()[:-5])
    await eventually(lambda: api.served.drain.running == 1)
    await hang_up(writer)
    await eventually(lambda: not api.served.drain.running)
    api.assert_all_blocks_back()


async def test_disconnect_rest_of_a_prompt_list_is_dropped(api: Api, server: HttpServer) -> None:
    _, writer = await connect(
        server, request("/v1/completions", prompt=[f"prompt {i}" for i in range(100)], max_tokens=400)
    )
    await eventually(lambda: api.served.computing.snapshot().running > 0)
    await hang_up(writer)
    await eventually(lambda: not api.served.drain.running)
    await eventually(api.at_rest)
    assert api.served.computing.snapshot().queued == 0
    api.assert_all_blocks_back()


async def test_connection_next_request_is_answered(api: Api, server: HttpServer) -> None:
    reader, writer = await connect(server, request(max_tokens=2) + request(max_tokens=2, stream=True))
    first = await reader.readuntil(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200")
    rest = await reader.readuntil(b"[DONE]")
    assert b"text/event-stream" in rest
    await hang_up(writer)


async def test_clients_that_leave_at_any_moment_leave_nothing(api: Api, server: HttpServer) -> None:
    chance = random.Random(3)

    async def visit() -> None:
        payload = request(stream=chance.random() < 0.7, n=chance.choice((1, 1, 2)), max_tokens=60)
        reader, writer = await connect(server, payload)
        seen = b""
        async with asyncio.timeout(300):
            for _ in range(chance.randint(0, 12)):
                seen += await reader.read(200)
                if b"[DONE]" in seen or b'"usage"' in seen:
                    break  # nearly all of it came, and the connection stays open
        await hang_up(writer)

    for _ in range(10):
        await asyncio.gather(*(visit() for _ in range(10)))
    await eventually(lambda: not api.served.drain.running)
    await eventually(lambda: not api.served.computing.snapshot().owned_blocks)
    api.assert_all_blocks_back()
    assert (await api.chat()).status_code == 200
