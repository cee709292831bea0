"""A router with one process and with two, and a worker, under a fuzz of the wire."""

from __future__ import annotations

import asyncio
from functools import partial

import httpx
import pytest

from baton_engine.api.http import HttpServer
from tests.engine.api.api import MODEL, open_api
from tests.plain_http import PLAIN
from tests.router import fake_worker
from tests.router.fake_worker import FakeWorker, saying
from tests.router.running import running_router
from tests.router.test_frontend_pool import running_pool
from tests.wire.fuzz import Counts, answers, run, send_body, send_framed, send_mutated

pytestmark = pytest.mark.slow

SEED = 20261126
EACH = 1500
"""Requests of each kind."""

ALIVE_S = 60.0


async def check(port: int, model: str) -> None:
    """Every kind keeps its law, and the server answers at the end."""
    kinds = {
        "mutated": partial(send_mutated, port),
        "framed": partial(send_framed, port),
        "bodies": partial(send_body, port, model=model),
    }
    for name, send in kinds.items():
        counts = await run(SEED, EACH, send)
        print(name, counts.line())
        assert counts.sent == EACH
        assert counts.faults == []
        async with httpx.AsyncClient(verify=PLAIN, trust_env=False, timeout=ALIVE_S) as client:
            assert (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200


async def test_fuzz_of_a_router() -> None:
    async with (
        FakeWorker(saying(200, fake_worker.whole_answer())) as worker,
        running_router([worker]) as router,
    ):
        await check(router.port, "tiny")


async def test_fuzz_of_a_router_of_several_processes() -> None:
    async with FakeWorker(saying(200, fake_worker.whole_answer())) as worker, running_pool(worker) as pool:
        await check(int(pool.url.rpartition(":")[2]), "tiny")


async def test_fuzz_of_a_worker() -> None:
    async with open_api() as api, HttpServer(api.app, "127.0.0.1", 0, api.served.drain) as server:
        await check(server.port, MODEL)


@pytest.mark.parametrize("rest", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhell"])
def test_answers_are_counted_and_a_broken_one_is_left(rest: bytes) -> None:
    whole = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 X\r\nContent-Length: 2\r\n\r\nno"
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
    assert answers(whole + chunked + rest) == ([404, 200], rest)
    with pytest.raises(ValueError, match="no response"):
        answers(chunked + b"x y z\r\n\r\n")


async def test_senders_notice_what_breaks_a_law() -> None:
    """A server that reads bodies as requests, as the router did behind an offered upgrade."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (line := await reader.readline()) and not writer.is_closing():
            if b" HTTP/1.1" in line:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
            if line == b"connection: close\r\n":
                writer.close()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        counts: Counts = await run(SEED, 50, partial(send_framed, server.sockets[0].getsockname()[1]))
    assert counts.faults
