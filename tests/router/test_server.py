"""The router as a process: start, end, and what it says when it cannot start."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys

import httpx
import pytest
from pydantic import ValidationError

from baton_api.errors import SetupError
from baton_router.server import address, bind
from baton_router.settings import RouterSettings
from tests.router import fake_worker
from tests.router.fake_worker import FakeWorker
from tests.router.running import CHAT, STREAM

TIMEOUT_S = 120.0
"""For an answer, and for streams to end: nothing here may be late on a busy machine."""

PROGRAM = """
import sys
from baton_router.main import run
from baton_router.settings import RouterSettings
worker, drain_s, processes = sys.argv[1:]
settings = RouterSettings(port=0, decode=(worker,), drain_s=float(drain_s), processes=int(processes))
run(settings, ready=lambda url: print(url, flush=True))
"""


async def start(worker: FakeWorker, processes: int) -> tuple[asyncio.subprocess.Process, str]:
    arguments = (worker.url, str(TIMEOUT_S), str(processes))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PROGRAM, *arguments, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client:
        while (await client.get(url + "/ready")).status_code != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return process, url


async def refused(url: str) -> None:
    """Until it listens no more."""
    with pytest.raises(httpx.ConnectError):
        while True:
            async with httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client:
                # A connection that was made in the very last moment is closed without an answer.
                with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                    await client.get(url + "/health")


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_finishes_running_streams_and_exits_cleanly(
    number: signal.Signals, processes: int
) -> None:
    async with (
        FakeWorker(fake_worker.gated) as worker,
        httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client,
    ):
        process, url = await start(worker, processes)
        running = asyncio.create_task(client.post(url + CHAT, json=STREAM))
        await worker.arrived.wait()
        process.send_signal(number)
        await refused(url)
        worker.release.set()
        assert b"[DONE]" in (await running).content
        assert await process.wait() == 0


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
async def test_second_signal_ends_without_waiting(processes: int) -> None:
    async with (
        FakeWorker(fake_worker.gated) as worker,
        httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S) as client,
    ):
        process, url = await start(worker, processes)
        running = asyncio.create_task(client.post(url + CHAT, json=STREAM))
        await worker.arrived.wait()
        process.send_signal(signal.SIGTERM)
        await refused(url)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await process.wait() == 0
        with pytest.raises(httpx.HTTPError):
            await running


def test_port_in_use_is_reported_with_a_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SetupError, match=rf"127\.0\.0\.1:{port}.*--port"):
            bind("127.0.0.1", port)


def test_foreign_address_is_an_error() -> None:
    with pytest.raises(SetupError, match="--host"):
        bind("203.0.113.1", 0)


def test_port_0_takes_a_free_port_shown_in_the_url() -> None:
    with bind("127.0.0.1", 0) as listening:
        assert address(listening) == f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert listening.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a:1", "http://a:1/v1", "http://", ""])
def test_invalid_worker_url_is_refused(url: str) -> None:
    with pytest.raises(ValidationError, match="such as http"):
        RouterSettings(decode=(url,))


def test_worker_url_may_end_in_a_slash() -> None:
    assert RouterSettings(decode=("http://a:1/",)).decode == ("http://a:1",)
