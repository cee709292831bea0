"""Client connections: their limits in bytes and seconds, and how they are accepted."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn

from baton_api import metrics
from baton_api.errors import Overloaded
from baton_api.headers import REQUEST_ID
from baton_api.limits import TENANT_SHARE
from baton_http import acceptor, unwanted
from baton_http.acceptor import ACCEPTED_AT_ONCE, Acceptor
from baton_http.flow import READ_AT_ONCE
from baton_http.protocol import BoundedHttpProtocol, ConnectionLimits, http_protocol
from baton_http.replies import Receive, Scope, Send, send_json
from baton_http.request_cycle import expect_body
from baton_router.server import BACKLOG, bind, new_event_loop
from tests.router import fake_worker
from tests.router.fake_worker import FakeWorker, gated, whole_stream
from tests.router.running import (
    CHAT,
    QUESTION,
    STREAM,
    RunningRouter,
    anew,
    no_more_files,
    running_router,
    until,
)

START = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n"
LIMIT = 4096
PATIENT: dict[str, Any] = {"header_s": 240.0, "body_s": 240.0, "idle_s": 240.0}
"""Settings of a router that keeps memory for announced bodies throughout a test."""


async def answer_to(router: RunningRouter, *parts: bytes) -> bytes:
    """Everything that comes back until the router closes the connection."""
    return await ask(router.port, *parts)


async def ask(port: int, *parts: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(60):
            for part in parts:
                writer.write(part)
                await writer.drain()
            return await reader.read()
    finally:
        writer.close()


Application = Callable[[Scope, Receive, Send], Awaitable[None]]


@asynccontextmanager
async def serving(
    application: Application, listener: type[BoundedHttpProtocol]
) -> AsyncIterator[uvicorn.Server]:
    config = uvicorn.Config(application, http=listener, port=0, lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    task = asyncio.create_task(server._serve())
    await until(lambda: server.started)
    try:
        yield server
    finally:
        server.should_exit = True
        await task


def port_of(server: uvicorn.Server) -> int:
    return server.servers[0].sockets[0].getsockname()[1]  # type: ignore[no-any-return]


def tenants(folder: Path) -> str:
    """A file of the tenants alice and bob, whose keys are their names."""
    listed = [
        {"name": name, "keys": [f"sha256:{hashlib.sha256(name.encode()).hexdigest()}"]}
        for name in ("alice", "bob")
    ]
    (folder / "tenants.yaml").write_text(json.dumps({"tenants": listed}))
    return str(folder / "tenants.yaml")


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
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"0.2 seconds" in answer
        await until(lambda: router.metric(metrics.ROUTER_REQUESTS.name, code="408") == 1)
        assert not router.metric(metrics.ROUTER_REQUESTS.name, code="499")


async def test_body_that_cannot_be_read_is_counted_as_it_is_answered() -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        answer = await answer_to(router, START + b"transfer-encoding: chunked\r\n\r\n", b"no size\r\n")
        assert answer.startswith(b"HTTP/1.1 400 ")
        await until(lambda: router.metric(metrics.ROUTER_REQUESTS.name, code="400") == 1)


SLOW = {
    "chat": (CHUNKED, b"1\r\n{\r\n"),
    "upload": (
        b"POST /v1/files HTTP/1.1\r\nhost: x\r\ncontent-type: multipart/form-data; boundary=b\r\n"
        b"content-length: 99999\r\n\r\n--b\r\n"
        b'content-disposition: form-data; name="file"; filename="f"\r\n\r\n',
        b"x",
    ),
    "batch": (
        b"POST /v1/batches HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 999\r\n\r\n",
        b"{",
    ),
    "behind its answer": (
        b"GET /health HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n",
        b"1\r\na\r\n",
    ),
}


@pytest.mark.parametrize(("start", "part"), SLOW.values(), ids=SLOW.keys())
async def test_body_that_goes_on_byte_by_byte_ends(start: bytes, part: bytes, tmp_path: Path) -> None:
    async with running_router(body_s=0.2, state=str(tmp_path)) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(start)

        async def drip() -> None:
            while True:
                writer.write(part)
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        async with asyncio.timeout(60):
            answer = await reader.read()
        dripping.cancel()
        writer.close()
        assert statuses(answer) == [200 if start.startswith(b"GET /health ") else 408]


async def unfinished(router: RunningRouter, size: int, tenant: str) -> asyncio.StreamWriter:
    """A client that has sent `size` bytes of a body but one, or was refused."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    memory = router.router.memory
    before = memory.used_by(f"tenant:{tenant}")
    writer.write(START + f"authorization: Bearer {tenant}\r\ncontent-length: {size}\r\n\r\n".encode())
    writer.write(b"x" * (size - 1))
    refused = asyncio.ensure_future(reader.readline())
    await until(lambda: refused.done() or memory.used_by(f"tenant:{tenant}") == before + size)
    return writer


async def test_unfinished_bodies_have_one_limit_that_tenants_share(tmp_path: Path) -> None:
    size, limit = 100_000, 2_000_000
    async with (
        FakeWorker() as worker,
        running_router(
            [worker], tenants_file=tenants(tmp_path), max_body=size, connection_memory=limit, **PATIENT
        ) as router,
    ):
        memory = router.router.memory
        flood = [await unfinished(router, size, "alice") for _ in range(20)]
        assert memory.used_by("tenant:alice") == int(TENANT_SHARE * limit) // size * size
        body = {**QUESTION, "pad": "x" * (size // 2)}
        answer = await router.client.post(CHAT, json=body, headers={"authorization": "Bearer bob"})
        assert answer.status_code == 200
        refused = await router.client.post(CHAT, json=body, headers={"authorization": "Bearer alice"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, Overloaded.code)
        assert int(refused.headers["retry-after"]) >= 1
        for writer in flood:
            writer.transport.abort()
        await until(lambda: not memory.used)
        answer = await router.client.post(CHAT, json=body, headers={"authorization": "Bearer alice"})
        assert answer.status_code == 200
        await until(lambda: not memory.used)


async def test_body_of_known_length_is_refused_at_its_head_beyond_the_memory() -> None:
    size = 1_000_000
    async with running_router(max_body=size, connection_memory=2 * size, **PATIENT) as router:
        memory = router.router.memory
        head = START + b"content-length: %d\r\n\r\n" % size
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(head)
        await until(lambda: memory.used == size)
        assert statuses(await answer_to(router, head)) == [503]
        assert memory.used == size
        writer.transport.abort()
        await until(lambda: not memory.used)
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(head + b"x" * (size - 1))
        await until(lambda: router.router.memory.used == size)
        writer.write(b"x")
        assert b" 400 " in await reader.readline()
        writer.close()


async def test_body_of_known_length_over_the_limit_is_refused_at_its_head() -> None:
    async with running_router(max_body=1000) as router:
        answer = await answer_to(router, START + CLOSE + LENGTH % 1001)
        assert statuses(answer) == [413]


@pytest.mark.parametrize("announced", [True, False])
async def test_client_keeps_its_connection_after_a_body_over_the_limit(
    announced: bool,
) -> None:
    body = b"x" * 1_000_000
    async with running_router(max_body=1000) as router:
        head = LENGTH % len(body) + body if announced else IN_CHUNKS % (len(body), body)
        assert statuses(await answer_to(router, START + head, LAST)) == [413, 200]


async def test_announced_body_holds_memory_while_it_arrives() -> None:
    size, part = 100_000, b"x" * 100
    async with running_router(max_body=size, connection_memory=2 * size, idle_s=0.2) as router:
        memory = router.router.memory
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(START + LENGTH % size)
        await until(lambda: memory.used == size)
        for _ in range(20):
            writer.write(part)
            await asyncio.sleep(0.01)
            assert memory.used == size
        await until(lambda: memory.used == 20 * len(part))
        writer.write(250 * part)
        await until(lambda: memory.used == 270 * len(part))
        writer.write(b"x" * (size - 270 * len(part)))
        assert b" 400 " in await reader.readline()
        writer.close()


async def test_body_that_is_read_after_its_client_has_left_holds_no_memory() -> None:
    begin, limits = asyncio.Event(), ConnectionLimits()

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await begin.wait()
        expect_body(scope, 1000)

    async with serving(application, http_protocol(limits)) as server:
        state = server.server_state
        clients = [await asyncio.open_connection("127.0.0.1", port_of(server)) for _ in range(3)]
        for _, writer in clients:
            writer.write(START + LENGTH % 1000)
        await until(lambda: len(state.tasks) == len(clients))
        for _, writer in clients:
            writer.transport.abort()
        await until(lambda: not state.connections)
        begin.set()
        await until(lambda: not state.tasks)
    assert not limits.memory.used


async def test_refusals_come_later_the_more_clients_of_a_tenant_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwanted, "REFUSAL_S", 3600.0)
    monkeypatch.setattr(unwanted, "REFUSAL_LIMIT_S", 3600.0)
    size = 100_000
    async with running_router(
        tenants_file=tenants(tmp_path), max_body=size, connection_memory=2 * size, **PATIENT
    ) as router:
        head = START + b"authorization: Bearer %b\r\ncontent-length: %d\r\n\r\n"
        refused = router.server._connections.limits.unwanted
        clients = [await asyncio.open_connection("127.0.0.1", router.port) for _ in range(3)]
        clients[0][1].write(head % (b"alice", size))
        await until(lambda: router.router.memory.used == size)
        clients[1][1].write(head % (b"alice", size))
        assert b" 503 " in await clients[1][0].readline()
        assert refused == {"tenant:alice": 1}
        clients[2][1].write(head % (b"alice", size))
        await until(lambda: refused == {"tenant:alice": 2})
        assert statuses(await answer_to(router, head % (b"bob", size))) == [503]
        assert not clients[2][0]._buffer  # type: ignore[attr-defined]
        clients[1][1].transport.abort()
        await until(lambda: refused == {"tenant:alice": 1})
        for _, writer in clients:
            writer.transport.abort()


async def test_body_counts_until_its_request_ends() -> None:
    size = 200_000
    async with FakeWorker(fake_worker.gated) as worker, running_router([worker]) as router:
        asking = [asyncio.create_task(router.post(anew({**STREAM, "pad": "x" * size}))) for _ in range(3)]
        await until(lambda: len(worker.requests) == 3)
        assert 3 * size < router.router.memory.used < 4 * size
        worker.release.set()
        assert {(await one).status_code for one in asking} == {200}
        await until(lambda: not router.router.memory.used)


async def test_downloads_that_nobody_reads_are_cut_off_and_have_the_same_limit(tmp_path: Path) -> None:
    limit = 1_000_000
    async with running_router(
        state=str(tmp_path), idle_s=1.0, max_body=1000, connection_memory=limit
    ) as router:
        files = {"file": ("f", b"x" * 16_000_000)}
        id = (await router.client.post("/v1/files", files=files, data={"purpose": "user_data"})).json()["id"]
        memory, most, clients = router.router.memory, 0, []
        for _ in range(30):
            _, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=1024)
            writer.write(f"GET /v1/files/{id}/content HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            clients.append(writer)
        await until(lambda: memory.used > 0)
        while memory.used:
            most = max(most, memory.used)
            await asyncio.sleep(0.01)
        assert most <= limit
        await until(lambda: len(router.server.server_state.connections) <= 1)  # that of `router.client`
        for writer in clients:
            writer.transport.abort()
        assert len((await router.client.get(f"/v1/files/{id}/content")).content) == 16_000_000


async def test_large_bodies_are_read_by_few_connections_at_a_time() -> None:
    clients, size = 40, 1_000_000
    begin, turn, reads = asyncio.Event(), 0, Counter[int]()
    loop = asyncio.get_running_loop()

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await begin.wait()
        while (await receive()).get("more_body"):
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    class Reading(http_protocol(ConnectionLimits())):  # type: ignore[misc]
        def data_received(self, data: bytes) -> None:
            reads[turn] += begin.is_set()
            super().data_received(data)

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        loop.call_soon(count_turns)

    async with serving(application, Reading) as server:
        sent = START + CLOSE + LENGTH % size + b"x" * size
        asking = [asyncio.create_task(ask(port_of(server), sent)) for _ in range(clients)]
        opened: set[Any] = server.server_state.connections
        await until(lambda: len(opened) == clients and all(each.flow.read_paused for each in opened))
        count_turns()
        begin.set()
        assert [statuses(await one) for one in asking] == [[200]] * clients
        assert max(reads.values()) <= READ_AT_ONCE


NOWHERE = b"POST /v1/nowhere HTTP/1.1\r\nhost: x\r\n"


async def test_body_behind_its_answer_is_read_to_its_end() -> None:
    size = 1_000_000
    async with running_router() as router:
        unwanted = router.server._connections.limits.unwanted
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(NOWHERE + LENGTH % size)
        assert b" 404 " in await reader.readline()
        writer.write(b"x" * (size - 1))
        await until(lambda: unwanted.total() == 1)
        writer.write(b"x")
        await until(lambda: not unwanted)
        writer.write(LAST)
        async with asyncio.timeout(60):
            assert b"HTTP/1.1 200 " in await reader.read()
        writer.close()


async def test_body_behind_its_answer_is_read_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unwanted, "DISCARD_S", 3600.0)
    async with running_router() as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(NOWHERE + LENGTH % 1000)
        assert b" 404 " in await reader.readline()
        [connection] = router.server.server_state.connections
        writer.write(b"x")
        await until(lambda: cast(BoundedHttpProtocol, connection).flow.read_paused)
        writer.close()


async def test_chunks_behind_their_answer_delay_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Counter[str]()
    read_on = unwanted.UnwantedInput._read_on

    def counted(unwanted_input: unwanted.UnwantedInput) -> None:
        calls["read on"] += 1
        read_on(unwanted_input)

    monkeypatch.setattr(unwanted.UnwantedInput, "_read_on", counted)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        await send_json(send, 200, b"{}", b"id")

    class Counting(http_protocol(ConnectionLimits())):  # type: ignore[misc]
        def data_received(self, data: bytes) -> None:
            calls["received"] += 1
            super().data_received(data)

    async with serving(application, Counting) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
        writer.write(CHUNKED)
        assert b" 200 " in await reader.readline()
        writer.write(b"1\r\nx\r\n" * 1000)
        await until(lambda: calls["read on"])
        writer.close()
    assert calls["read on"] < calls["received"]


async def test_pipelined_requests_are_bounded() -> None:
    async with running_router() as router:
        request = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        answer = await answer_to(router, 2000 * request)
        assert b"More than 64 requests wait on this connection" in answer
        assert answer.count(b"HTTP/1.1 200 ") <= 65


async def test_endless_body_behind_its_answer_ends_the_connection() -> None:
    async with running_router() as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(b"POST /v1/nowhere HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        sent, chunk = 0, b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
        with pytest.raises(ConnectionError):
            while sent < 4 * unwanted.DISCARDED_LIMIT:
                writer.write(chunk)
                await writer.drain()
                sent += len(chunk)
        writer.close()
        assert reader.exception() or b" 404 " in await reader.readline()


@pytest.mark.parametrize("closes", [False, True])
async def test_endless_body_is_rejected_and_not_read_on(
    closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unwanted, "DISCARDED_LIMIT", 1_000_000)
    async with FakeWorker() as worker, running_router([worker], max_body=1000) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(START + CLOSE * closes + b"content-length: 100000000\r\n\r\n" + b"x" * 100_000)
        assert b" 413 " in await reader.readline()
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(60):
                while True:
                    writer.write(b"x" * 100_000)
                    await writer.drain()
        writer.close()


BODY = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}).encode()
HIDDEN = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: Bearer another's\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n"
H2C = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
WEBSOCKET = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
CLOSE = b"connection: close\r\n"
NOT_JSON = 400

LENGTH = b"content-length: %d\r\n\r\n"
IN_CHUNKS = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n"
LAST = HEALTH + CLOSE + b"\r\n"

OFFERS: dict[str, tuple[list[bytes], list[int], list[bytes]]] = {
    "a length": ([START + H2C + LENGTH % len(BODY) + BODY, LAST], [200, 200], [BODY]),
    "chunks": ([START + H2C + IN_CHUNKS % (len(BODY), BODY), LAST], [200, 200], [BODY]),
    "a later body": ([START + H2C + LENGTH % len(BODY), BODY, LAST], [200, 200], [BODY]),
    "a body like a request": ([START + H2C + LENGTH % len(HIDDEN), HIDDEN, LAST], [NOT_JSON, 200], []),
    "one at once": ([START + H2C + LENGTH % len(HIDDEN) + HIDDEN + LAST], [NOT_JSON, 200], []),
    "one in chunks": ([START + H2C + IN_CHUNKS % (len(HIDDEN), HIDDEN) + LAST], [NOT_JSON, 200], []),
    "a protocol of one's own": (
        [START + b"connection: upgrade\r\nupgrade: x\r\n" + LENGTH % len(HIDDEN), HIDDEN + LAST],
        [NOT_JSON, 200],
        [],
    ),
    "an Ingress's lines": (
        [START + b"upgrade: websocket\r\nconnection: upgrade\r\n" + LENGTH % len(BODY), BODY + LAST],
        [200, 200],
        [BODY],
    ),
    "no body": ([HEALTH + H2C + b"\r\n" + LAST], [200, 200], []),
    "a websocket": ([HEALTH + WEBSOCKET + b"\r\n", LAST], [200, 200], []),
    "an empty body": ([HEALTH + H2C + LENGTH % 0 + LAST], [200, 200], []),
    "offer after offer": (
        [(START + H2C + LENGTH % len(BODY) + BODY) * 3 + HEALTH + H2C + b"\r\n" + LAST],
        [200] * 5,
        [BODY] * 3,
    ),
    "a tunnel": ([b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", HIDDEN], [400], []),
}
"""What is sent, the status of each answer, and the bodies that reach a worker."""


def statuses(answer: bytes) -> list[int]:
    """The status of each of the answers in these bytes, which are nothing but answers."""
    found: list[int] = []
    while answer:
        head, _, answer = answer.partition(b"\r\n\r\n")
        line, *lines = head.split(b"\r\n")
        version, status, _ = line.split(b" ", 2)
        assert version == b"HTTP/1.1"
        found.append(int(status))
        length = [int(value) for name, _, value in (each.partition(b": ") for each in lines)
                  if name.lower() == b"content-length"]  # fmt: skip
        answer = answer[length[0] :]
    return found


@pytest.mark.parametrize(("parts", "expected", "bodies"), OFFERS.values(), ids=OFFERS.keys())
async def test_offered_upgrade_is_ignored_and_its_body_is_read(
    parts: list[bytes], expected: list[int], bodies: list[bytes]
) -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        assert statuses(await answer_to(router, *parts)) == expected
        assert [request.body for request in worker.requests] == bodies


async def test_offered_upgrade_has_one_answer_wherever_its_segments_are_cut() -> None:
    whole = START + H2C + LENGTH % len(HIDDEN) + HIDDEN + LAST
    async with running_router() as router:
        for cut in range(1, len(whole)):
            reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
            writer.write(whole[:cut])
            await asyncio.sleep(0)  # the router runs in this event loop
            writer.write(whole[cut:])
            async with asyncio.timeout(60):
                answer = await reader.read()
            writer.close()
            assert statuses(answer) == [NOT_JSON, 200], whole[:cut]


async def test_trailers_are_no_headers() -> None:
    trailer = b"0\r\nauthorization: Bearer another's\r\nx-request-id: from-a-trailer\r\n\r\n"
    sent = START + CLOSE + (IN_CHUNKS % (len(BODY), BODY)).replace(b"0\r\n\r\n", trailer)
    async with FakeWorker() as worker, running_router([worker]) as router:
        assert statuses(await answer_to(router, sent)) == [200]
        [request] = worker.requests
    assert request.header("authorization") is None
    assert request.header(REQUEST_ID) != "from-a-trailer"


BROKEN_CHUNK = b"transfer-encoding: chunked\r\n\r\nzz\r\n"
ASKED = START + LENGTH % len(BODY) + BODY
OUT_OF_PLACE = {
    "what is no request": (ASKED + b"NONSENSE\r\n\r\n" + HIDDEN, [200, 400]),
    "a head over the limit": (ASKED + HEALTH + b"a: b\r\n" * LIMIT + b"\r\n" + HIDDEN, [200, 431]),
    "a broken body": (START + BROKEN_CHUNK + HIDDEN, [400]),
    "a broken body of the second": (ASKED + START + BROKEN_CHUNK + HIDDEN, [200, 400]),
    "no host": (b"GET /health HTTP/1.1\r\n\r\n" + HIDDEN, [400]),
    "a doubtful body": (START + b"transfer-encoding: gzip, chunked\r\n\r\n" + HIDDEN, [400]),
    "what follows the last": (HEALTH + CLOSE + b"\r\n" + HIDDEN, [200]),
    "HTTP/1.0 and more": (b"GET /health HTTP/1.0\r\n\r\n" + HIDDEN, [200]),
}


@pytest.mark.parametrize(("sent", "expected"), OUT_OF_PLACE.values(), ids=OUT_OF_PLACE.keys())
async def test_rejection_comes_in_its_turn_and_is_the_last_answer(sent: bytes, expected: list[int]) -> None:
    async with FakeWorker() as worker, running_router([worker], max_header=LIMIT) as router:
        assert statuses(await answer_to(router, sent)) == expected


async def test_rejection_waits_for_a_stream_that_runs() -> None:
    async with FakeWorker(gated) as worker, running_router([worker]) as router:
        body = json.dumps({**json.loads(BODY), "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(START + LENGTH % len(body) + body + b"NONSENSE\r\n\r\n")
        await worker.arrived.wait()
        worker.release.set()
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.close()
    stream, rejection, rest = answer.partition(b"HTTP/1.1 400 ")
    assert stream.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert rejection
    assert rest.count(b"HTTP/1.1 ") == 0


async def test_client_that_sends_on_reads_its_rejection() -> None:
    async with running_router() as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        for _ in range(50):
            writer.write(b"NONSENSE" * 1000)
            await asyncio.sleep(0)
        async with asyncio.timeout(60):
            assert statuses(await reader.read()) == [400]
        writer.close()


async def test_requests_that_cannot_be_read_are_not_logged_each(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running_router() as router:
        caplog.clear()
        for line in (b"NONSENSE\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", HEALTH + WEBSOCKET + CLOSE + b"\r\n"):
            await answer_to(router, line)
        assert not caplog.records


STREAMED = json.dumps({"model": "tiny", "messages": [], "stream": True}).encode()
HTTP_1_0 = b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b"


async def test_http_1_0_stream_has_no_chunks_and_ends_with_the_connection() -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        head, _, body = (await answer_to(router, HTTP_1_0 % (len(STREAMED), STREAMED))).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head
    assert b"\r\nconnection: close" in head
    assert body == whole_stream()


@pytest.mark.parametrize("given", ["", "content-length: 11\r\n"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_http_1_0_answers_of_applications_have_no_chunks(method: str, given: str) -> None:
    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        name, _, value = given.strip().encode().partition(b": ")
        headers = [(name, value)] if name else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"hello ", "more_body": True})
        await send({"type": "http.response.body", "body": b"world"})

    async with serving(application, http_protocol(ConnectionLimits())) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(server))
        writer.write(f"{method} / HTTP/1.0\r\nexpect: 100-continue\r\n\r\n".encode())
        async with asyncio.timeout(60):
            head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in head
    assert (given.strip().encode() in head) and body == (b"hello world" if method == "GET" else b"")


@pytest.mark.parametrize("line", [b"NONSENSE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00"])
async def test_invalid_http_is_400_in_the_format_of_openai(line: bytes) -> None:
    async with running_router() as router:
        head, _, body = (await answer_to(router, line)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 ")
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}


class Greeter(asyncio.Protocol):
    """Greets clients and hangs up; one for all connections."""

    def __init__(self) -> None:
        self.greeted = self.left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(b"hello")
        transport.close()
        self.greeted += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.left += 1


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with bind("127.0.0.1", 0) as one:
        one.listen(BACKLOG)
        yield one


def connected(listening: socket.socket) -> socket.socket:
    client = socket.create_connection(listening.getsockname())
    client.setblocking(False)
    return client


async def greeting(client: socket.socket) -> bytes:
    async with asyncio.timeout(60):
        return await asyncio.get_running_loop().sock_recv(client, 100)


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, new_event_loop])
def test_burst_of_clients_is_accepted_in_few_turns(
    new_loop: Callable[[], asyncio.AbstractEventLoop], listening: socket.socket
) -> None:
    clients = [connected(listening) for _ in range(3 * ACCEPTED_AT_ONCE)]
    greeter = Greeter()

    async def count_turns() -> int:
        acceptor = Acceptor(listening, lambda: greeter)
        count = 0
        while greeter.greeted < len(clients):
            await asyncio.sleep(0)
            count += 1
        acceptor.close()
        await acceptor.wait_closed()
        await until(lambda: greeter.left == len(clients))
        return count

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(count_turns()) < 10
    for client in clients:
        client.close()


async def test_clients_are_accepted_again_once_there_are_descriptors(
    listening: socket.socket, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "ACCEPT_RETRY_S", 0.01)
    with closing(connected(listening)) as client, closing(Acceptor(listening, Greeter)):
        with no_more_files():
            await until(lambda: len(caplog.records) >= 2)
        assert await greeting(client) == b"hello"
    assert "accepts no connection" in caplog.text


async def test_client_that_left_before_is_in_nobodys_way(listening: socket.socket) -> None:
    gone = connected(listening)
    gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    gone.close()  # with a reset
    with closing(connected(listening)) as client, closing(Acceptor(listening, Greeter)):
        assert await greeting(client) == b"hello"


async def test_closed_acceptor_accepts_nobody(listening: socket.socket) -> None:
    acceptor = Acceptor(listening, Greeter)
    acceptor.close()
    with closing(connected(listening)) as client:
        for _ in range(10):
            await asyncio.sleep(0)
        with pytest.raises(BlockingIOError):
            client.recv(1)
    await acceptor.wait_closed()
