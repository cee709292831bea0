"""
Routers side by side before the same workers of a real vLLM, on conversations that grow turn by turn.

    python -m benchmarks.vllm_routers --vllm VENV/bin/python --model FOLDER \\
        --router 'baton=baton router --port {port} {prefill:--prefill=} {decode:--decode=}' \\
        --router 'vllm-router=vllm-router --port {port} --vllm-pd-disaggregation {prefill:--prefill } ...'

`{prefill:FLAG}` becomes FLAGurl for each prefill worker, likewise `{decode:FLAG}`. Two prefill and two decode
workers keep running; each router is started before them in turn, as often as `--repeats` says. Several
clients hold one conversation after another. Each turn sends the whole conversation, so that a worker that
computed the turn before needs only the new tokens. Conversations are new for each router, and the same in
number and length. Hits are those of vLLM's own counters, over all prompt tokens that the workers looked up.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.answering import until_answering
from benchmarks.replay import Ports, processor_s, running
from benchmarks.vllm_workers import VllmWorker, WorkerSpec, opened

MODEL = "vllm"
BASE_PORT = 8600
WORDS = 90
"""Words of each question: about 300 tokens."""

ANSWER_TOKENS = 16
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"


@dataclass(slots=True)
class Load:
    """Conversations through one router, and what their turns took."""

    url: str
    length: int
    """Questions of a conversation."""
    rng: random.Random
    waits: list[float] = field(default_factory=list)
    """Seconds to the first token of each turn."""
    durations: list[float] = field(default_factory=list)
    failed: int = 0

    async def play(self, clients: int, conversations: int) -> None:
        left = iter(range(conversations))
        async with httpx.AsyncClient(timeout=600, trust_env=False) as client:

            async def one() -> None:
                for _ in left:
                    await self._converse(client)

            await asyncio.gather(*(one() for _ in range(clients)))

    async def _converse(self, client: httpx.AsyncClient) -> None:
        messages: list[dict[str, str]] = []
        for _ in range(self.length):
            words = " ".join(f"word{self.rng.randrange(10_000)}" for _ in range(WORDS))
            messages.append({"role": "user", "content": words})
            answer = await self._ask(client, messages)
            if not answer:
                self.failed += 1
                return
            messages.append({"role": "assistant", "content": answer})

    async def _ask(self, client: httpx.AsyncClient, messages: list[dict[str, str]]) -> str:
        """The whole answer, empty if it failed."""
        body = {
            "model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "ignore_eos": True,
            "temperature": 0, "stream": True,
        }  # fmt: skip
        text, begun, first = "", time.perf_counter(), 0.0
        async with client.stream("POST", f"{self.url}/v1/chat/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:]).get("choices", ()):
                        piece = choice.get("delta", {}).get("content") or ""
                        first = first or (time.perf_counter() if piece else 0.0)
                        text += piece
        if first:
            self.waits.append(first - begun)
            self.durations.append(time.perf_counter() - begun)
        return text


def lookups(workers: Sequence[VllmWorker]) -> tuple[float, float]:
    """Tokens that were looked up in the workers' caches, and those that were found."""
    queries = hits = 0.0
    for worker in workers:
        with urllib.request.urlopen(f"{worker.url}/metrics", timeout=30) as answer:
            for line in answer.read().decode().splitlines():
                queries += float(line.split()[-1]) if line.startswith(QUERIES) else 0
                hits += float(line.split()[-1]) if line.startswith(HITS) else 0
    return queries, hits


def measure(
    template: str, ports: Ports, workers: Sequence[VllmWorker], load: Load, size: tuple[int, int], log: Path
) -> dict[str, float]:
    """`size`: clients and conversations. Times in seconds, the router's processor time per turn in µs."""
    with running(ports.command(template), log) as process:
        until_answering(ports.router, MODEL, log)
        before, used = lookups(workers), processor_s(process)
        began = time.perf_counter()
        asyncio.run(load.play(*size))
        took = time.perf_counter() - began
        used = processor_s(process) - used
    after = lookups(workers)
    if not load.waits:
        raise SystemExit(f"no turn was answered; the router's log is {log}")
    return {
        "turns": len(load.waits),
        "failed": load.failed,
        "hit": round((after[1] - before[1]) / (after[0] - before[0]), 3),
        "ttft_p50_s": round(statistics.median(load.waits), 3),
        "ttft_mean_s": round(statistics.fmean(load.waits), 3),
        "ttft_p90_s": round(statistics.quantiles(load.waits, n=10)[-1], 3),
        "turn_mean_s": round(statistics.fmean(load.durations), 3),
        "turns_per_s": round(len(load.waits) / took, 3),
        "router_us_per_turn": round(1e6 * used / len(load.waits)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, required=True, help="Python of vLLM's environment")
    parser.add_argument("--model", type=Path, required=True, help="a model's folder")
    parser.add_argument("--router", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--length", type=int, default=5, help="questions of a conversation")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("build/vllm-routers"))
    given = parser.parse_args()
    ports = Ports.of(BASE_PORT, 2, 2)
    with opened(given.vllm, given.out) as starter:
        workers = [starter.start(WorkerSpec(given.model, port)) for port in (*ports.prefill, *ports.decode)]
        for worker in workers:
            worker.await_ready()
        for repeat in range(given.repeats):
            for number, router in enumerate(given.router):
                name, _, template = router.partition("=")
                rng = random.Random(repeat * len(given.router) + number)
                load = Load(f"http://127.0.0.1:{ports.router}", given.length, rng)
                size = (given.clients, given.conversations)
                log = given.out / f"{name}-{repeat}.log"
                print(name, json.dumps(measure(template, ports, workers, load, size, log)), flush=True)


if __name__ == "__main__":
    main()
