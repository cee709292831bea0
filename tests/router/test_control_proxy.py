"""Requests that a frontend process forwards to the scheduler process: any size and length, both ways."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from baton_http.control_proxy import ControlProxy
from baton_http.replies import Receive, Scope, Send
from tests.plain_http import PLAIN
from tests.router.running import until

app = FastAPI()
left = asyncio.Event()


@app.api_route("/echo", methods=["GET", "POST", "PUT", "DELETE"])
async def echo(request: Request) -> Response:
    body = await request.body()
    seen = {
        "x-method": request.method,
        "x-query": request.url.query,
        "x-asked": request.headers.get("x-a", ""),
    }
    return Response(body, status_code=207, headers=seen)


@app.post("/digest")
async def digest(request: Request) -> dict[str, object]:
    sha256, size, most = hashlib.sha256(), 0, 0
    async for piece in request.stream():
        sha256.update(piece)
        size += len(piece)
        most = max(most, len(piece))
    return {"sha256": sha256.hexdigest(), "size": size, "most": most}


@app.get("/stream")
async def stream() -> StreamingResponse:
    async def pieces() -> AsyncIterator[bytes]:
        for number in range(500):
            yield b"%06d\n" % number * 100

    return StreamingResponse(pieces())


@app.get("/endless")
async def endless() -> StreamingResponse:
    async def pieces() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"more\n"
                await asyncio.sleep(0.001)
        finally:
            left.set()

    return StreamingResponse(pieces())


@app.get("/broken")
async def broken() -> StreamingResponse:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"half"
        raise RuntimeError("a bug")

    return StreamingResponse(pieces())


@app.get("/empty")
@app.head("/empty")
async def empty() -> Response:
    return Response(status_code=204)


@app.head("/sized")
async def sized() -> Response:
    return Response(headers={"content-length": "1000000"})


class Served:
    """A uvicorn server, on a Unix socket or on a port."""

    def __init__(self, application: object, path: str | None) -> None:
        config = uvicorn.Config(
            application,  # type: ignore[arg-type]
            uds=path, port=0, lifespan="off", log_config=None, access_log=False, timeout_graceful_shutdown=1,
        )  # fmt: skip
        self.server = uvicorn.Server(config)

    async def __aenter__(self) -> Served:
        self.task = asyncio.create_task(self.server._serve())
        await until(lambda: self.server.started)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.should_exit = True
        await self.task

    @property
    def port(self) -> int:
        port: int = self.server.servers[0].sockets[0].getsockname()[1]
        return port


@asynccontextmanager
async def passing() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a frontend process that forwards everything."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "control")
        control = ControlProxy(path)

        async def frontend(scope: Scope, receive: Receive, send: Send) -> None:
            await control(scope, receive, send)

        async with Served(app, path), Served(frontend, None) as before:
            url = f"http://127.0.0.1:{before.port}"
            async with httpx.AsyncClient(base_url=url, timeout=20, trust_env=False, verify=PLAIN) as client:
                yield client


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE"])
async def test_request_and_response_pass_unchanged(method: str) -> None:
    async with passing() as client:
        body = b"" if method in ("GET", "DELETE") else b"a body"
        answer = await client.request(method, "/echo?a=1&b=%20", content=body, headers={"x-a": "b"})
        assert (answer.status_code, answer.content) == (207, body)
        assert (answer.headers["x-method"], answer.headers["x-query"]) == (method, "a=1&b=%20")
        assert answer.headers["x-asked"] == "b"


@pytest.mark.parametrize("sized", [True, False])
async def test_upload_passes_in_pieces(sized: bool) -> None:
    piece, count = bytes(range(256)) * 1024, 80
    whole = piece * count

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(count):
            yield piece

    async with passing() as client:
        headers = {"content-length": str(len(whole))} if sized else {}
        answer = (await client.post("/digest", content=pieces(), headers=headers)).json()
        assert (answer["size"], answer["sha256"]) == (len(whole), hashlib.sha256(whole).hexdigest())
        assert answer["most"] < len(whole) / 10


async def test_long_response_passes_completely() -> None:
    async with passing() as client:
        answer = await client.get("/stream")
        assert answer.content == b"".join(b"%06d\n" % number * 100 for number in range(500))


async def test_answers_without_a_body_are_complete() -> None:
    async with passing() as client:
        assert (await client.get("/empty")).status_code == 204
        assert (await client.head("/empty")).status_code == 204
        assert (await client.head("/sized")).headers["content-length"] == "1000000"


async def test_aborted_response_raises_at_the_client() -> None:
    async with passing() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.get("/broken")


async def test_disconnected_client_disconnects_from_the_scheduler_too() -> None:
    left.clear()
    async with passing() as client:
        async with client.stream("GET", "/endless") as answer:
            await anext(answer.aiter_bytes())
        await asyncio.wait_for(left.wait(), 60)


async def test_answer_that_does_not_wait_for_the_body_reaches_the_client() -> None:
    """The scheduler's process closes its socket while the frontend process still sends."""

    def reject(listening: socket.socket) -> None:
        with contextlib.suppress(OSError):  # until it is shut down
            while True:
                connection, _ = listening.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(b"HTTP/1.1 403 X\r\ncontent-length: 2\r\nconnection: close\r\n\r\nno")

    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listening:
        path = str(Path(folder) / "control")
        listening.bind(path)
        listening.listen()
        rejecting = asyncio.create_task(asyncio.to_thread(reject, listening))
        async with Served(ControlProxy(path), None) as frontend, httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{frontend.port}", timeout=20, trust_env=False, verify=PLAIN
        ) as client:  # fmt: skip
            answers = [await client.post("/v1/files", content=b"a" * 60_000) for _ in range(200)]
        listening.shutdown(socket.SHUT_RDWR)
        await rejecting
    assert {(answer.status_code, answer.text) for answer in answers} == {(403, "no")}


async def test_scheduler_process_that_ends_before_it_answers_is_reported() -> None:
    async def end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.transport.abort()

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "control")
        server = await asyncio.start_unix_server(end, path)
        async with server, Served(ControlProxy(path), None) as frontend, httpx.AsyncClient(
            base_url=f"http://127.0.0.1:{frontend.port}", timeout=20, trust_env=False, verify=PLAIN
        ) as client:  # fmt: skip
            answer = await client.post("/v1/files", content=b"a" * 60_000)
    assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")


async def test_missing_scheduler_process_is_reported() -> None:
    async with Served(ControlProxy("/nonexistent/socket"), None) as frontend:
        url = f"http://127.0.0.1:{frontend.port}/v1/files"
        async with httpx.AsyncClient(trust_env=False, verify=PLAIN) as client:
            answer = await client.get(url)
        assert (answer.status_code, answer.json()["error"]["type"]) == (503, "server_error")
        assert "retry-after" in answer.headers
