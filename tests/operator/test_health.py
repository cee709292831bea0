"""The operator's HTTP server, as what nobody should send meets it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator

import pytest

from baton_operator.cluster.leadership import Leadership
from baton_operator.cluster.reflector import Reflectors
from baton_operator.health import HealthServer

HEAD = b"GET /healthz HTTP/1.1\r\nhost: x\r\n"
HIDDEN = b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n"
LENGTH = b"content-length: %d\r\n\r\n" % len(HIDDEN)
IN_CHUNKS = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(HIDDEN), HIDDEN)


@pytest.fixture
async def server() -> AsyncIterator[HealthServer]:
    # Only /healthz of an operator that does not lead is asked: it looks at neither.
    server = HealthServer(
        object.__new__(Leadership), object.__new__(Reflectors), lambda: b"secret 1\n", lambda: 0.0
    )
    runner = await server.start("127.0.0.1", 0)
    yield server
    await runner.cleanup()


async def answer_to(server: HealthServer, *parts: bytes) -> bytes:
    """What comes back until the client, which waits for a first answer, has closed its side."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    async with asyncio.timeout(60):
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0)
        answer = await reader.readuntil(b"\r\n\r\n")
        writer.write_eof()
        answer += await reader.read()
    writer.close()
    return answer


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket", b"tcp", b"x"])
@pytest.mark.parametrize("parts", [[LENGTH, HIDDEN], [LENGTH + HIDDEN], [IN_CHUNKS]])
async def test_body_behind_an_offered_upgrade_is_no_request(
    server: HealthServer, protocol: bytes, parts: list[bytes]
) -> None:
    offer = HEAD + b"connection: upgrade\r\nupgrade: " + protocol + b"\r\n"
    answer = await answer_to(server, offer + parts[0], *parts[1:])
    assert re.findall(rb"HTTP/1\.. (\d+) ", answer) == [b"200"]
    assert b"secret" not in answer


async def test_requests_that_cannot_be_read_are_not_logged(
    server: HealthServer, caplog: pytest.LogCaptureFixture
) -> None:
    for sent in (
        b"NONSENSE\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n\r\n",
        HEAD + b"content-length: 1\r\n" + IN_CHUNKS,
    ):
        assert b" 400 " in await answer_to(server, sent)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
