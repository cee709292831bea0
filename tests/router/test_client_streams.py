"""Slow clients, many clients, and the OpenAI SDK as the client."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import cast

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from baton_api import metrics
from baton_http.protocol import BoundedHttpProtocol
from tests.plain_http import PLAIN
from tests.router import fake_worker
from tests.router.fake_worker import FakeWorker
from tests.router.running import CHAT, STREAM, RunningRouter, running_router, until

STREAMS = 500


async def asking(router: RunningRouter) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A client that has asked for a stream and reads nothing of it unless its reader is used."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=1024)
    body = json.dumps(STREAM).encode()
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
    return reader, writer


async def settled(worker: FakeWorker, paused: Callable[[], bool]) -> int:
    """Bytes that the worker got rid of, once that number stands still while the router reads no more."""
    before = -1
    while before != worker.flooded or not paused():
        before = worker.flooded
        await asyncio.sleep(0.1)
    return before


async def test_slow_client_slows_down_its_worker() -> None:
    async with FakeWorker(fake_worker.flood) as worker, running_router([worker]) as router:
        reader, writer = await asking(router)
        await until(lambda: worker.flooded)
        exchange = next(iter(router.router.workers.decode[0].upstream._busy)).exchange
        assert exchange is not None
        async with asyncio.timeout(60):
            held = await settled(worker, lambda: exchange.paused)
        # Kernel buffers of four sockets, and the router's own bounded ones.
        assert held < 24 * 1024 * 1024
        await reader.readexactly(4 * 1024 * 1024)
        await until(lambda: worker.flooded > held)
        writer.transport.abort()
        await worker.left.wait()


async def test_client_that_never_reads_is_cut_and_others_are_served() -> None:
    async with FakeWorker(fake_worker.flood) as worker, running_router([worker], idle_s=0.5) as router:
        _, writer = await asking(router)
        await worker.arrived.wait()
        worker.behaviour = fake_worker.answer
        assert (await router.post()).status_code == 200
        async with asyncio.timeout(60):
            await worker.left.wait()
        writer.transport.abort()


async def test_slow_worker_with_a_reading_client_is_not_cut() -> None:
    async with FakeWorker(fake_worker.gated) as worker, running_router([worker], idle_s=4) as router:
        waiting = asyncio.create_task(router.post(STREAM))
        await worker.arrived.wait()
        asyncio.get_running_loop().call_later(1.2, worker.release.set)  # after the first look at it
        assert b"[DONE]" in (await waiting).content


async def test_parallel_streams_are_all_complete() -> None:
    async with (
        FakeWorker(fake_worker.gated) as one,
        FakeWorker(fake_worker.gated) as two,
        running_router([one, two]) as router,
    ):
        clients = [await asking(router) for _ in range(STREAMS)]
        await until(lambda: len(one.requests) + len(two.requests) == STREAMS, 60)
        assert router.metric(metrics.ROUTER_IN_FLIGHT.name) == STREAMS
        one.release.set()
        two.release.set()
        for reader, writer in clients:
            assert b"[DONE]" in await reader.readuntil(b"\r\n0\r\n\r\n")
            writer.close()
        assert router.metric(metrics.ROUTER_REQUESTS.name, path=CHAT, code="200") == STREAMS
        assert abs(len(one.requests) - len(two.requests)) <= 2, "two choices keep two workers even"


def sdk(router: RunningRouter) -> openai.AsyncOpenAI:
    http_client = openai.DefaultAsyncHttpxClient(trust_env=False, verify=PLAIN)
    return openai.AsyncOpenAI(
        base_url=router.url + "/v1", api_key="none", max_retries=0, http_client=http_client
    )


MESSAGE: ChatCompletionUserMessageParam = {"role": "user", "content": "What is the capital of France?"}


async def test_sdk_lists_models_and_streams() -> None:
    async with FakeWorker() as worker, running_router([worker]) as router, sdk(router) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        whole = await client.chat.completions.create(model="tiny", messages=[MESSAGE])
        assert whole.choices[0].message.content == "".join(fake_worker.WORDS)
        assert whole._request_id
        stream = await client.chat.completions.create(model="tiny", messages=[MESSAGE], stream=True)
        words = [chunk.choices[0].delta.content async for chunk in stream]
        assert words == [*fake_worker.WORDS, None]


async def test_sdk_raises_when_the_worker_is_lost_during_a_stream() -> None:
    dying = fake_worker.streaming(fake_worker.event("The"), end=False)
    async with FakeWorker(dying) as worker, running_router([worker]) as router, sdk(router) as client:
        stream = await client.chat.completions.create(model="tiny", messages=[MESSAGE], stream=True)
        words = []
        with pytest.raises(openai.APIError, match="was lost"):
            async for chunk in stream:
                words.append(chunk.choices[0].delta.content)
                worker.release.set()
        assert words == ["The"]


async def test_sdk_raises_the_class_of_the_error() -> None:
    async with (
        FakeWorker() as worker,
        running_router([worker], health_interval_s=0.1) as router,
        sdk(router) as client,
    ):
        with pytest.raises(openai.NotFoundError, match="tiny"):
            await client.chat.completions.create(model="other", messages=[MESSAGE])
        worker.ready = False
        await until(lambda: router.router.unready_reason())
        with pytest.raises(openai.InternalServerError):
            await client.chat.completions.create(model="tiny", messages=[MESSAGE], stream=True)


async def test_small_pieces_are_not_held_back_on_either_side() -> None:
    async with FakeWorker(fake_worker.hang) as worker, running_router([worker]) as router:
        _, writer = await asking(router)
        upstream = router.router.workers.decode[0].upstream
        await until(lambda: worker.requests)
        clients = [cast(BoundedHttpProtocol, one).transport for one in router.server.server_state.connections]
        workers = [connection.transport for connection in upstream._busy]
        assert clients and workers
        for transport in (*clients, *workers):
            assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.transport.abort()
