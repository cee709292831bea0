"""The server around the app: ports, limits, and its end."""

from __future__ import annotations

import asyncio
import json
import re

import httpx
import pytest

from baton_api import limits
from baton_api.errors import Overloaded, SetupError
from baton_engine.api.http import HttpServer
from tests.engine.api.api import MODEL, USER, Api
from tests.plain_http import PLAIN


async def test_http_port_in_use_names_the_flag(api: Api, server: HttpServer) -> None:
    with pytest.raises(SetupError, match=rf"127\.0\.0\.1:{server.port} is in use .*--port"):
        HttpServer(api.app, "127.0.0.1", server.port, api.served.drain)


async def test_http_foreign_address_is_an_error(api: Api) -> None:
    with pytest.raises(SetupError, match="--host"):
        HttpServer(api.app, "192.0.2.1", 0, api.served.drain)


async def test_endless_headers_are_cut_off(server: HttpServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\nx: " + b"y" * (3 * limits.HEAD.most))
    async with asyncio.timeout(60):
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 431 ")
    writer.close()
    await writer.wait_closed()


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
LAST = b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
CHUNK = b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
UPGRADE = b"connection: upgrade\r\nupgrade: h2c\r\n"
WIRE = {
    "a length": (HEAD + b"content-length: 2\r\n\r\n{}" + LAST, [400, 200]),
    "an offered upgrade": (HEAD + UPGRADE + b"content-length: 2\r\n\r\n{}" + LAST, [400, 200]),
    "one in chunks": (HEAD + UPGRADE + CHUNK + LAST, [400, 200]),
    "a body like a request": (
        HEAD + UPGRADE + b"content-length: %d\r\n\r\n" % len(LAST) + LAST * 2,
        [400, 200],
    ),
    "chunks beside a length": (HEAD + b"content-length: 2\r\n" + CHUNK + LAST, [400]),
    "two codings": (HEAD + CHUNK.replace(b"chunked", b"gzip, chunked") + LAST, [400]),
    "a folded header": (HEAD + b"x:\r\n content-length: 2\r\n" + CHUNK + LAST, [400]),
    "lines without CR": ((HEAD + b"content-length: 2\r\n\r\n{}").replace(b"\r", b"") + LAST, [400]),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n" + LAST, [400]),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + LAST, [400]),
}


@pytest.mark.parametrize(("sent", "expected"), WIRE.values(), ids=WIRE.keys())
async def test_http_body_ends_where_the_head_says_or_nothing_more_is_read(
    server: HttpServer, sent: bytes, expected: list[int]
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    assert [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) [A-Z]", answer)] == expected
    if expected == [400]:
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"


async def test_http_1_0_stream_ends_with_the_connection(server: HttpServer) -> None:
    body = json.dumps({"model": MODEL, "messages": USER, "stream": True, "max_tokens": 2}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = (
        b"POST /v1/chat/completions HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    writer.write(head % len(body) + body)
    async with asyncio.timeout(60):
        answer = await reader.read()
    writer.close()
    assert b"transfer-encoding" not in answer.lower()
    assert answer.endswith(b"data: [DONE]\n\n")


async def test_http_closed_server_sends_unanswered_clients_a_retry(api: Api) -> None:
    api.model.go.clear()
    async with (
        HttpServer(api.app, "127.0.0.1", 0, api.served.drain) as server,
        httpx.AsyncClient(base_url=f"http://{server.address}", verify=PLAIN) as client,
    ):
        body = {"model": MODEL, "messages": USER}
        waiting = asyncio.create_task(client.post("/v1/chat/completions", json=body))
        await asyncio.to_thread(api.model.inside.wait)
        await server.close()
        response = await waiting
    assert response.status_code == 503
    assert 1 <= int(response.headers["retry-after"]) <= 120
    assert response.json()["error"]["code"] == Overloaded.code


async def test_http_closed_server_cuts_streams_and_frees_its_port(api: Api) -> None:
    async with HttpServer(api.app, "127.0.0.1", 0, api.served.drain) as server:
        body = {"model": MODEL, "messages": USER, "stream": True, "ignore_eos": True}
        api.model.stops_at = 2
        async with httpx.AsyncClient(base_url=f"http://{server.address}", verify=PLAIN) as client:
            with pytest.raises(httpx.RemoteProtocolError):
                async with client.stream("POST", "/v1/chat/completions", json=body) as response:
                    parts = response.aiter_raw()
                    await anext(parts)
                    assert await server.drain(0.01) is False
                    await server.close()
                    async for _ in parts:
                        pass
    api.model.resume()
    async with HttpServer(api.app, "127.0.0.1", server.port, api.served.drain) as again:
        assert again.port == server.port
