"""
A prefill worker that is killed while a decode worker connects to it: requests are answered all the same.

The decode worker reaches it through a relay, which kills it after a step of the dial.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
import pytest_asyncio

from baton_api import headers
from tests.engine.models import VOCAB, make_model
from tests.faults.cluster import TIMEOUT_S, Node, until

pytestmark = [pytest.mark.nixl, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

ANSWER_S = 60.0
"""An answer takes less than a second. A request that waits for a dead worker takes ten minutes."""

STEPS = {
    "connected": (0, 0),
    "Hello passed on": (1, 0),
    "Welcome passed on": (1, 1),
    "prompt passed on": (2, 1),
}
"""Pieces of the conversation after which a step is complete: from the decode worker, and from its peer."""

OFFSETS_S = (0.0, 0.001, 0.005, 0.02, 0.06)
"""Seconds from the step to the kill."""

AT_ONCE = 3
"""Requests that share the dial."""


class Relay:
    """Carries connections to `target`. Calls `reached` once it has passed on the pieces of `step`."""

    def __init__(self, target: str, step: tuple[int, int], reached: Callable[[], None]) -> None:
        self._host, _, self._port = target.rpartition(":")
        self._left = list(step)
        self._reached: Callable[[], None] | None = reached
        self._writers: list[asyncio.StreamWriter] = []

    def hang_up(self) -> None:
        """End the connections, as the kernel does for a dead process, some milliseconds after its end."""
        for writer in self._writers:
            writer.close()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            theirs, ours = await asyncio.open_connection(self._host, int(self._port))
        except OSError:
            writer.close()
            return
        self._writers.append(writer)
        self._passed()
        await asyncio.gather(self._carry(reader, ours, 0), self._carry(theirs, writer, 1))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, side: int) -> None:
        with contextlib.suppress(OSError):
            while piece := await source.read(1 << 20):
                sink.write(piece)
                await sink.drain()
                self._left[side] -= 1
                self._passed()
        sink.close()

    def _passed(self) -> None:
        if self._reached is not None and max(self._left) <= 0:
            self._reached()
            self._reached = None


@dataclass(slots=True)
class Workers:
    decode: Node
    prefill: Node
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    async def ask(self, address: str) -> dict[str, Any]:
        """A prompt that no worker has seen, for the prefill worker at `address`."""
        number = next(self.numbers)
        prompt = [3 + number % (VOCAB - 3), 3 + number // (VOCAB - 3), *range(3, 303)]
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
        answer = await self.decode.http.post(
            f"{self.decode.url}/v1/completions", json=body, headers={headers.PREFILL: address}
        )
        assert answer.status_code == 200, answer.text
        completion: dict[str, Any] = answer.json()
        return completion


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workers(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workers]:
    pytest.importorskip("nixl", reason="the NIXL library is missing")
    model = make_model(tmp_path_factory.mktemp("dial") / "tiny", max_position_embeddings=1024)
    shared = (str(model), "--served-model-name=tiny", "--dtype=float32", "--threads=1")
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as http, contextlib.AsyncExitStack() as stack:
        decode, prefill = (
            Node(role, (role, *shared, "--kv-cache-memory=64MiB"), http) for role in ("decode", "prefill")
        )
        for node in (decode, prefill):
            stack.push_async_callback(node.stop)
        await decode.start()
        yield Workers(decode, prefill)


@pytest.mark.parametrize("offset_s", OFFSETS_S, ids=lambda offset_s: f"{1000 * offset_s:g}ms")
@pytest.mark.parametrize("step", STEPS)
async def test_dial_prefill_killed_in_dial_costs_only_time(
    workers: Workers, step: str, offset_s: float
) -> None:
    await workers.prefill.start()
    killed = asyncio.Event()

    def kill() -> None:
        workers.prefill.signal(signal.SIGKILL)
        relay.hang_up()
        killed.set()

    def reached() -> None:
        if offset_s:
            asyncio.get_running_loop().call_later(offset_s, kill)
        else:
            kill()

    relay = Relay(workers.prefill.control, STEPS[step], reached)
    server = await asyncio.start_server(relay.serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server, asyncio.timeout(ANSWER_S):
        asking = [asyncio.create_task(workers.ask(address)) for _ in range(AT_ONCE)]
        await killed.wait()
        for answer in await asyncio.gather(*asking):
            assert answer["usage"]["completion_tokens"] == 4
    await workers.prefill.gone()
    await until(workers.decode.at_rest, "the decode worker's blocks are all free or cached")
