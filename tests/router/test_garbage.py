"""Requests leave nothing for the garbage collector, whose pauses delay all clients."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest

from baton_http.request_cycle import RequestCycle
from baton_router.engines.engine_request import EngineRequest
from baton_router.requests.inference_request import InferenceRequest
from tests.router.fake_worker import FakeWorker
from tests.router.running import QUESTION, STREAM, running_router, until

REQUESTS = 20


def alive(*kinds: type) -> set[int]:
    """The objects of these classes, by their `id`."""
    return {id(one) for one in gc.get_objects() if isinstance(one, kinds)}


@pytest.mark.parametrize("body", [QUESTION, STREAM], ids=["whole", "stream"])
async def test_request_is_freed_without_the_collector(body: dict[str, Any]) -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        gc.collect()
        before = alive(EngineRequest, InferenceRequest, RequestCycle)
        gc.disable()
        try:
            for _ in range(REQUESTS):
                assert (await router.post(body)).status_code == 200
            await until(lambda: not alive(EngineRequest, InferenceRequest) - before)
            # Each connection keeps its last request, and a client that was idle for long opens another one.
            assert len(alive(RequestCycle) - before) < REQUESTS / 2
        finally:
            gc.enable()


ENDS = {
    "refused": (b"zz\r\n", 400),
    "beyond the memory": (b"186a0\r\n%b\r\n" % (b"x" * 100_000), 503),
    "left": (b"", 0),
}
"""What a client sends behind a part of its body, and the status of the answer."""


@pytest.mark.parametrize(("rest", "status"), ENDS.values(), ids=ENDS.keys())
async def test_unfinished_body_is_freed_without_the_collector(rest: bytes, status: int) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
    async with running_router(connection_memory=200_000, max_body=100_000) as router:
        gc.collect()
        before = alive(RequestCycle)
        gc.disable()
        try:
            for _ in range(REQUESTS):
                reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
                writer.write(head + b"186a0\r\n%b\r\n" % (b"x" * 100_000))
                await until(lambda: router.router.memory.used)
                writer.write(rest)
                if status:
                    assert int((await reader.readline())[9:12]) == status
                writer.transport.abort()
            await until(lambda: not alive(RequestCycle) - before)
        finally:
            gc.enable()
