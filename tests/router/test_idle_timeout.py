"""The cause of a stalled answer, and the time until it is reported."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec, cast

import pytest

from baton_http.client_connection import ClientConnection
from baton_http.sse import EventStream
from baton_http.upstream import UpstreamExchange
from baton_router.proxy.timeouts import IdleTimeout
from benchmarks import virtual_time

SILENT_S = 0.4
TOKENS_S = 0.8
TOKEN = b'data: {"token": 1}\n\n'
ALIVE = b": keep-alive\n\n"
LATEST_S = 10.0

Arguments = ParamSpec("Arguments")


def in_virtual_time(test: Callable[Arguments, Coroutine[Any, Any, None]]) -> Callable[Arguments, None]:
    """The test on a loop whose time jumps: however slow the machine is, nothing comes late."""

    @functools.wraps(test)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        virtual_time.run(test(*args, **kwargs))

    return run


class FakeResponse:
    """A response in flight, client and worker side, whose progress a test controls."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.moved = self.progress = self.began = self._loop.time()
        self.sending = False
        self.events = EventStream()
        self.blamed: asyncio.Future[str] = self._loop.create_future()

    def comes(self, piece: bytes) -> None:
        self.events.push(piece)
        self.moved = self.progress = self._loop.time()

    def fail(self, cause: str) -> None:
        assert cause == "idle"
        self.blamed.set_result("worker")

    def watched(self, tokens_s: float = TOKENS_S) -> IdleTimeout:
        return IdleTimeout(
            cast(ClientConnection, self), cast(UpstreamExchange, self), self.events, SILENT_S, tokens_s
        )

    async def every(self, seconds: float, what: Callable[[], None]) -> None:
        while True:
            await asyncio.sleep(seconds)
            what()


async def blamed(
    answer: FakeResponse, every_s: float = 0.0, what: Callable[[], None] = lambda: None
) -> tuple[str, float]:
    """Return the cause and the seconds until it is reported, while an event repeats."""
    stall = answer.watched()
    happening = asyncio.create_task(answer.every(every_s, what)) if every_s else None
    try:
        async with asyncio.timeout(LATEST_S):
            who = await answer.blamed
        return who, asyncio.get_running_loop().time() - answer.began
    finally:
        stall.close()
        if happening is not None:
            happening.cancel()


@in_virtual_time
async def test_silent_worker_is_to_blame() -> None:
    answer = FakeResponse()
    answer.comes(TOKEN)
    who, after_s = await blamed(answer)
    assert who == "worker"
    assert after_s == pytest.approx(SILENT_S)


@in_virtual_time
async def test_keep_alive_extends_the_idle_timeout() -> None:
    answer = FakeResponse()
    answer.comes(TOKEN)
    who, after_s = await blamed(answer, SILENT_S / 4, lambda: answer.comes(ALIVE))
    assert who == "worker"
    assert after_s == pytest.approx(TOKENS_S, abs=SILENT_S / 4)


@pytest.mark.parametrize("pieces", [(TOKEN,), (TOKEN, ALIVE, ALIVE)], ids=["tokens", "tokens now and then"])
@in_virtual_time
async def test_progressing_answer_has_no_idle_timeout(pieces: tuple[bytes, ...]) -> None:
    answer, number = FakeResponse(), 0
    stall = answer.watched()
    while asyncio.get_running_loop().time() < answer.began + 2 * TOKENS_S:
        await asyncio.sleep(SILENT_S / 10)
        answer.comes(pieces[number % len(pieces)])
        number += 1
    assert not answer.blamed.done()
    stall.close()


@in_virtual_time
async def test_worker_is_not_blamed_for_the_reading_time_of_a_client() -> None:
    answer = FakeResponse()
    answer.comes(TOKEN)
    answer.comes(ALIVE)
    stall = answer.watched(SILENT_S)
    answer.sending = True
    while asyncio.get_running_loop().time() < answer.began + 2 * SILENT_S:
        await asyncio.sleep(SILENT_S / 10)
        assert not answer.blamed.done()
    answer.moved = asyncio.get_running_loop().time()
    answer.sending = False
    await asyncio.sleep(SILENT_S / 4)
    assert not answer.blamed.done()
    stall.close()
