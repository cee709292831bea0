"""
A real router before mock workers, each a process of its own: faults on demand, and nothing to wait for.

Two prefill workers that are only named, and three decode workers, so that one may fail and two are well.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec

from tests.faults.caller import CHAT, CallSpec, Outcome, call
from tests.faults.cluster import TIMEOUT_S, Node, until
from tests.faults.mock_worker import TOKENS, Fault, MockCounts
from tests.ports import steady_port

ROOT = Path(__file__).parents[2]

FIRST_BYTE_S = 2.0
IDLE_S = 3.0
HEALTH_S = 0.2
HEALTH_MISSES = 20
"""Each so many that no worker is given up which only waits for a busy processor."""

SLOTS = 8
"""Concurrent requests at which a mock worker counts as full."""


class Mock:
    """One worker's process."""

    def __init__(self, role: str) -> None:
        self.role = role
        self.port = steady_port()
        self._process: asyncio.subprocess.Process | None = None
        self._orders = asyncio.Lock()

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.name}"

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """At the same port, if it ran before."""
        command = ("-m", "tests.faults.mock_worker", f"--role={self.role}", f"--port={self.port}")
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=ROOT, stdin=pipe, stdout=pipe
        )
        self.port = msgspec.json.decode(await self._line())["port"]

    async def become(self, name: str = "", **fault: Any) -> MockCounts:
        """Fail like this from now on."""
        return await self._tell(msgspec.json.encode(Fault(name=name, **fault)))

    async def counts(self) -> MockCounts:
        return await self._tell(b"")

    async def kill(self) -> None:
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()

    async def _tell(self, order: bytes) -> MockCounts:
        assert self._process is not None and self._process.stdin is not None
        async with self._orders:
            self._process.stdin.write(order + b"\n")
            return msgspec.json.decode(await self._line(), type=MockCounts)

    async def _line(self) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        line = await self._process.stdout.readline()
        assert line, f"the mock {self.role} worker has ended"
        return line


@dataclass(slots=True)
class Crew:
    router: Node
    decodes: list[Mock]
    prefills: list[Mock]
    http: httpx.AsyncClient
    numbers: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def all(self) -> list[Mock]:
        return [*self.decodes, *self.prefills]

    def spec(
        self, path: str = CHAT, *, stream: bool = True, choices: int = 1, tokens: int = TOKENS
    ) -> CallSpec:
        """Return a call with a prompt that no worker has cached."""
        return CallSpec(
            f"{next(self.numbers)}: what is the capital of France?", path, stream, choices, tokens
        )

    async def call(self, spec: CallSpec | None = None) -> Outcome:
        return await call(self.router.port, spec or self.spec())

    async def calls(self, count: int, at_once: int = 4, **fields: Any) -> list[Outcome]:
        """Send `count` calls with `fields`. Without fields, all but every fourth are streamed."""
        outcomes: list[Outcome] = []
        waiting = iter(range(count))

        async def client() -> None:
            for number in waiting:
                call_spec = self.spec(**fields) if fields else self.spec(stream=number % 4 != 3)
                outcomes.append(await self.call(call_spec))

        await asyncio.gather(*(client() for _ in range(at_once)))
        return outcomes

    async def healthy(self) -> None:
        """All run, without a fault, and the router forgot what it had against them."""
        epochs: dict[str, str] = {}
        seen = await self.workers()
        for mock in self.all:
            if not mock.runs:
                await mock.start()
            # The measured speed of prefill workers is worth keeping.
            anew = mock.role == "decode" or seen[mock.name]["state"] != "ready"
            epochs[mock.name] = (await mock.become(anew=anew)).epoch

        async def sees_all() -> bool:
            rows = await self.workers()
            return all(
                rows[name]["state"] == "ready" and rows[name]["load"]["epoch"] == epoch
                for name, epoch in epochs.items()
            )

        await until(sees_all, "the router sees that all workers are well")

    async def workers(self) -> dict[str, dict[str, Any]]:
        """Return the router's state of each worker, by its name."""
        rows = (await self.http.get(f"{self.router.url}/workers")).raise_for_status().json()["data"]
        return {row["worker"]: row for row in rows}

    async def state(self, mock: Mock) -> str:
        state: str = (await self.workers())[mock.name]["state"]
        return state

    async def all_become(self, name: str = "", **fault: Any) -> None:
        """All decode workers fail like this."""
        for mock in self.decodes:
            await mock.become(name, **fault)

    async def at_rest(self) -> None:
        """No request is anywhere, and no worker's memory is held."""

        async def resting() -> bool:
            rows = (await self.workers()).values()
            counts = [await mock.counts() for mock in self.decodes if mock.runs]
            return not any(row["in_flight"] for row in rows) and not any(one.running for one in counts)

        await until(resting, "nothing is in flight at the router or at a worker")


@contextlib.asynccontextmanager
async def open_crew() -> AsyncIterator[Crew]:
    async with contextlib.AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False))
        decodes, prefills = [Mock("decode") for _ in range(3)], [Mock("prefill") for _ in range(2)]
        for mock in (*decodes, *prefills):
            stack.push_async_callback(mock.kill)
            await mock.start()
        router_arguments = ("router", *(f"--decode={mock.url}" for mock in decodes))
        router_arguments += tuple(f"--prefill={mock.url}" for mock in prefills)
        router_arguments += (
            "--local-prefill-max-tokens=0",
            "--recovery-s=0.5",
            f"--health-interval-s={HEALTH_S}",
            f"--health-misses={HEALTH_MISSES}",
        )
        router_arguments += (f"--first-byte-s={FIRST_BYTE_S}", f"--idle-s={IDLE_S}")
        router = Node("router", router_arguments, http)
        stack.push_async_callback(router.stop)
        await router.start()
        crew = Crew(router, decodes, prefills, http)
        await crew.healthy()
        await crew.calls(60, at_once=8)  # so that the workers' speed is known
        yield crew
