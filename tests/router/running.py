"""A real router on a real socket, in the test's own event loop."""

from __future__ import annotations

import asyncio
import itertools
import resource
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Protocol

import httpx

from baton_router.app import RouterApp, create_app
from baton_router.server import RouterServer, address, bind
from baton_router.settings import RouterSettings
from tests.plain_http import PLAIN

CHAT = "/v1/chat/completions"
QUESTION = {"model": "tiny", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
STREAM = {**QUESTION, "stream": True}

_numbers = itertools.count()

CONNECT_S = 60.0
"""Seconds for a connection or an answer: on a busy machine the default of 1 s is not always enough."""


def anew(body: dict[str, Any]) -> dict[str, Any]:
    """The same with a prompt that no worker holds yet: it may go to any."""
    messages = [{"role": "user", "content": f"Question {next(_numbers)}: what is the capital of France?"}]
    return {**body, "messages": messages}


class Addressed(Protocol):
    """A worker of a test."""

    @property
    def url(self) -> str: ...


class RunningRouter:
    def __init__(self, router: RouterApp, server: RouterServer, url: str, client: httpx.AsyncClient) -> None:
        self.router = router
        self.server = server
        self.url = url
        self.client = client
        self.port = int(url.rpartition(":")[2])

    async def post(self, body: object = QUESTION, path: str = CHAT) -> httpx.Response:
        return await self.client.post(path, json=body)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of all samples that have these labels, whatever others they have."""
        return sum(
            sample.value
            for family in self.router.metrics.registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )


class QuickServer(RouterServer):
    """Ends at once: uvicorn looks ten times a second whether it should, and hundreds of tests wait for it."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.005)


@asynccontextmanager
async def running_router(
    decode: Sequence[Addressed] = (),
    prefill: Sequence[Addressed] = (),
    *,
    wait: bool = True,
    **settings: object,
) -> AsyncIterator[RunningRouter]:
    """
    A router in front of these workers; it has looked at all of them, unless `wait` is False.

    All parts share one event loop. On a loaded machine a connection can take longer than `connect_s` allows
    by default, and the router would then take its healthy workers for lost.
    """
    config = RouterSettings.model_validate(
        {
            "port": 0,
            "decode": [worker.url for worker in decode],
            "prefill": [worker.url for worker in prefill],
            "drain_s": 1,
            "recovery_s": 0,
            "connect_s": CONNECT_S,
            **settings,
        }
    )
    router = create_app(config)
    await router.start_endpoint_picker()
    server = QuickServer(router, config)
    server.serve_metrics(router.serve_internal)
    listening = bind(config.host, config.port)
    url = address(listening)
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    async with httpx.AsyncClient(base_url=url, timeout=CONNECT_S, trust_env=False, verify=PLAIN) as client:
        try:
            if wait:
                await until(lambda: all(worker.health.load for worker in router.workers.all))
            await until(lambda: server.started)
            yield RunningRouter(router, server, url, client)
        finally:
            await client.aclose()
            server.should_exit = True
            await serving


async def until(condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition that other tasks cause without a notification."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, f"not so within {seconds} s"
        await asyncio.sleep(0.002)


@contextmanager
def no_more_files() -> Iterator[None]:
    """This process gets no new file descriptor; those that it has stay."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
