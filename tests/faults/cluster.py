"""
Real processes on this machine: a router, a prefill and a decode worker over NIXL, and a reference worker.

The reference (role `both`) gives the expected answers. All serve the same tiny random model in
fp32, so that answers can be compared token by token. Tests end processes by their ids, stop and continue
them, and start them again where they were.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from baton_api.announcements import Announcement, Listening, Ready
from baton_cli import supervisor
from tests.engine.models import VOCAB, make_model
from tests.ports import steady_port

CHUNK_TOKENS = 16
"""Small chunks, so that a long prompt comes over in many pieces and can be hit between two of them."""

LONG_PROMPT = 3000
CONTEXT = 4096
TIMEOUT_S = 300.0
"""For whatever must happen at some time, however busy the machine is."""

POLL_S = 0.01

BLOCK_STATES = ("free", "cached", "owned", "pinned", "quarantined")


async def until(condition: Callable[[], Any], what: str, seconds: float = TIMEOUT_S) -> None:
    """Wait for an awaitable or plain condition to be true; fails naming `what`."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                answer = condition()
                if asyncio.iscoroutine(answer):
                    answer = await answer
                if answer:
                    return
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise AssertionError(f"not within {seconds:g} s: {what}") from None


@dataclass(slots=True)
class Node:
    """One process, and where it listens."""

    name: str
    arguments: tuple[str, ...]
    http: httpx.AsyncClient
    process: supervisor.Child | None = None
    port: int = field(default_factory=steady_port)
    control: str = ""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    lines: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def control_port(self) -> int:
        return int(self.control.rpartition(":")[2] or steady_port())

    async def start(self) -> None:
        """Start at the ports of the last start, and wait until it is ready."""
        self.ready.clear()
        ports: list[str] = [f"--port={self.port}"]
        if self.arguments[0] == "prefill":
            ports.append(f"--control-port={self.control_port}")
        self.process = await supervisor.start(
            [*self.arguments, *ports], {"OMP_NUM_THREADS": "1"}, self._announced, self.lines.append
        )
        async with asyncio.timeout(TIMEOUT_S):
            ready = asyncio.create_task(self.ready.wait())
            ended = asyncio.create_task(self.process.ended())
            await asyncio.wait((ready, ended), return_when=asyncio.FIRST_COMPLETED)
            assert ready.done(), "\n".join([f"{self.name} did not start:", *self.lines[-20:]])
            ended.cancel()

    def _announced(self, announcement: Announcement) -> None:
        match announcement:
            case Listening(port=port):
                self.port = port
            case Ready(control=control):
                self.control = control
                self.ready.set()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        os.kill(self.process.pid, number)

    async def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        await self.gone()

    async def gone(self) -> None:
        """Wait until it is gone, after a signal that ends it."""
        assert self.process is not None
        await self.process.ended()
        self.process = None

    async def stop(self) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
            await self.kill()

    async def metrics(self) -> dict[str, float]:
        """`name{labels}` to value."""
        text = (await self.http.get(f"{self.url}/metrics")).raise_for_status().text
        return {
            match[1]: float(match[2])
            for match in re.finditer(r"^(\S+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)
        }

    async def blocks(self) -> dict[str, int]:
        values = await self.metrics()
        return {state: int(values[f'baton_worker_kv_blocks{{state="{state}"}}']) for state in BLOCK_STATES}

    async def load(self) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.http.get(f"{self.url}/load")).raise_for_status().json()
        return answer

    async def at_rest(self) -> bool:
        """Every block is free or cached."""
        blocks = await self.blocks()
        return blocks["owned"] == blocks["pinned"] == blocks["quarantined"] == 0

    async def relay_of(self, answer_id: str) -> dict[str, Any] | None:
        """How the prompt of an answer came over; None if it was computed there."""
        rows: list[dict[str, Any]] = []

        async def recorded() -> bool:
            """A record may come a moment after its answer."""
            every = (await self.http.get(f"{self.url}/debug/requests")).raise_for_status().json()["data"]
            rows[:] = [row for row in every if row["id"] == answer_id]
            return bool(rows)

        await until(recorded, f"the {self.name} worker has a record of {answer_id}")
        relays: list[dict[str, Any]] = rows[0]["relays"]
        return relays[0] if relays else None


@dataclass(slots=True)
class Cluster:
    """The four processes. `prompts` never gives the same prompt twice."""

    router: Node
    prefill: Node
    decode: Node
    reference: Node
    http: httpx.AsyncClient
    random: random.Random

    def prompt(self, length: int) -> list[int]:
        return [self.random.randrange(3, VOCAB) for _ in range(length)]

    def body(self, prompt: Sequence[int], max_tokens: int = 24, **more: Any) -> dict[str, Any]:
        return {
            "model": "tiny",
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "seed": 7,
            "ignore_eos": True,
            "return_token_ids": True,
            **more,
        }

    async def post(self, prompt: Sequence[int], **more: Any) -> httpx.Response:
        """Ask the router for a completion."""
        return await self.http.post(f"{self.router.url}/v1/completions", json=self.body(prompt, **more))

    async def ask(self, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        """A completion through the router; fails unless it is answered with 200."""
        answer = await self.post(prompt, **more)
        assert answer.status_code == 200, answer.text
        completion: dict[str, Any] = answer.json()
        return completion

    async def expected(self, prompt: Sequence[int], **more: Any) -> dict[str, Any]:
        """Return the reference worker's answer."""
        answer = await self.http.post(f"{self.reference.url}/v1/completions", json=self.body(prompt, **more))
        completion: dict[str, Any] = answer.raise_for_status().json()
        return completion

    async def same_as_reference(self, prompt: Sequence[int], answer: dict[str, Any], **more: Any) -> None:
        expected = await self.expected(prompt, **more)
        assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
        assert answer["usage"]["completion_tokens"] == expected["usage"]["completion_tokens"]

    async def healthy(self) -> None:
        """Every process runs, and a prompt goes all the way over."""
        for node in (self.prefill, self.decode):
            if node.process is None:
                await node.start()
        await until(self._sees_both, "the router sees both workers")
        await until(self._relays, "a prompt is computed by the prefill worker")

    async def _sees_both(self) -> bool:
        workers = (await self.http.get(f"{self.router.url}/workers")).raise_for_status().json()
        return all(worker["state"] == "ready" for worker in workers["data"])

    async def _relays(self) -> bool:
        answer = await self.ask(self.prompt(100), max_tokens=1)
        return await self.decode.relay_of(answer["id"]) is not None

    async def at_rest(self) -> None:
        """Wait until neither side holds blocks of a request."""
        await until(self.decode.at_rest, "the decode worker's blocks are all free or cached")
        await until(self.prefill.at_rest, "the prefill worker's blocks are all free or cached")


@contextlib.asynccontextmanager
async def open_cluster(folder: Path) -> AsyncIterator[Cluster]:
    model = make_model(folder / "tiny", max_position_embeddings=CONTEXT)
    shared = (
        str(model),
        "--served-model-name=tiny",
        "--dtype=float32",
        "--threads=1",
        f"--chunk-tokens={CHUNK_TOKENS}",
        "--kv-cache-memory=64MiB",
        "--transfer-deadline-s=5",
    )
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as http, contextlib.AsyncExitStack() as stack:
        prefill = Node("prefill", ("prefill", *shared), http)
        decode = Node("decode", ("decode", *shared), http)
        reference = Node("alone", ("serve", *shared), http)
        for node in (prefill, decode, reference):
            stack.push_async_callback(node.stop)
        await asyncio.gather(prefill.start(), decode.start(), reference.start())
        # However short a prompt is: it is its way that is tested.
        router_arguments = (
            "router",
            f"--prefill={prefill.url}",
            f"--decode={decode.url}",
            "--local-prefill-max-tokens=0",
        )
        router = Node("router", router_arguments, http)
        stack.push_async_callback(router.stop)
        await router.start()
        cluster = Cluster(router, prefill, decode, reference, http, random.Random(11))
        await cluster.healthy()
        yield cluster
