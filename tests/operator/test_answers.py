"""What pods and servers of users answer to the operator: endless, compressed, elsewhere, or nonsense."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from baton_api import metrics
from baton_operator import answers
from baton_operator.adapters.worker_api import AdapterApi, AdapterApiError
from baton_operator.cluster.rollout_health import COUNTERS_LIMIT, parse_counters
from baton_operator.scaling.prometheus import MetricsLost, PrometheusClient, held_requests

HELD = metrics.ROUTER_HELD.name
REQUESTS = metrics.ROUTER_REVISION_REQUESTS.name
MUCH = 8 * answers.LIMIT
"""Bytes that a server gets rid of only if somebody reads them, or lets them pile up."""

Reader = Callable[[str], Awaitable[bool]]
"""Reads an answer from a URL, and returns whether it was usable."""


async def held(url: str) -> bool:
    return (await held_requests([url])).has_value


async def health(url: str) -> bool:
    try:
        return bool(await answers.pod_metrics(f"{url}/metrics"))
    except (OSError, TimeoutError, ValueError, aiohttp.ClientError):
        return False


async def prometheus(url: str) -> bool:
    client = PrometheusClient()
    try:
        return bool(await client.query(url, "up", "pod"))
    except MetricsLost:
        return False
    finally:
        await client.close()


async def adapters(url: str) -> bool:
    api = AdapterApi()
    try:
        return bool(await api.adapters(url))
    except AdapterApiError:
        return False
    finally:
        await api.close()


READERS = pytest.mark.parametrize("read", [held, health, prometheus, adapters])
USABLE = {
    "/metrics": f"{HELD} 1\n",
    "/api/v1/query": '{"status": "success", "data": {"result": [{"metric": {"pod": "a"}, "value": [1, "2"]}]}}',  # noqa: E501
    "/v1/models": '{"data": [{"id": "pirate", "parent": "base"}]}',
}


class Server:
    """At `url`. Each path is answered by `answer`."""

    def __init__(self, answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> None:
        self.answer = answer
        self.url = ""
        self.sent = 0

    async def pour(self, request: web.Request, chunk: bytes) -> web.StreamResponse:
        """Send the chunk until nobody reads it any more."""
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            while self.sent < MUCH:
                await response.write(chunk)
                self.sent += len(chunk)
        except ConnectionError:
            pass
        return response


@asynccontextmanager
async def server(answer: Callable[[web.Request], Awaitable[web.StreamResponse]]) -> AsyncIterator[Server]:
    running = Server(answer)

    async def answered(request: web.Request) -> web.StreamResponse:
        return await running.answer(request)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answered)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    running.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield running
    finally:
        await runner.cleanup()


async def usable(request: web.Request) -> web.StreamResponse:
    return web.Response(text=USABLE[request.path])


@READERS
async def test_answer_in_one_piece_or_many_is_read(read: Reader) -> None:
    async def in_pieces(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for letter in USABLE[request.path]:
            await response.write(letter.encode())
        return response

    for answer in (usable, in_pieces):
        async with server(answer) as running:
            assert await read(running.url)


@READERS
async def test_endless_answer_is_given_up(read: Reader) -> None:
    async with server(usable) as running:
        running.answer = lambda request: running.pour(request, b"# " + b"x" * 65_534)
        assert not await read(running.url)
        assert running.sent < MUCH / 2


@READERS
async def test_compressed_answer_is_refused(read: Reader) -> None:
    async def bomb(request: web.Request) -> web.StreamResponse:
        assert request.headers["Accept-Encoding"] == "identity"
        body = gzip.compress(USABLE[request.path].encode())
        return web.Response(body=body, headers={"Content-Encoding": "gzip"})

    async with server(bomb) as running:
        assert not await read(running.url)


@READERS
async def test_redirect_is_not_followed(read: Reader) -> None:
    async with server(usable) as elsewhere:

        async def redirect(request: web.Request) -> web.StreamResponse:
            raise web.HTTPTemporaryRedirect(elsewhere.url + request.path)

        async with server(redirect) as running:
            assert not await read(running.url)


def test_samples_of_other_metrics_are_not_parsed() -> None:
    text = f'other{{ nonsense\n{HELD}{{process="0"}} 2\n{HELD}{{process="1"}} 3\n'
    assert [one.value for one in answers.samples(text, HELD)] == [2.0, 3.0]
    with pytest.raises(ValueError, match="4097 samples"):
        answers.samples(f"{HELD} 1\n" * 4097, HELD)


def test_counters_of_a_router_are_bounded_and_finite() -> None:
    assert not parse_counters(f"{REQUESTS} NaN\n{REQUESTS} +Inf\n")
    assert parse_counters(f"{REQUESTS} 1\n{REQUESTS}_more 1\n") == {("", ""): 1.0}
    lines = (f'{REQUESTS}{{revision="{one}",result="passed"}} 1\n' for one in range(COUNTERS_LIMIT + 1))
    with pytest.raises(ValueError, match="513 counters"):
        parse_counters("".join(lines))
