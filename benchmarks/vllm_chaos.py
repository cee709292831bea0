"""
Kills and stops workers of a real vLLM under load, and says how each stream ended.

    python -m benchmarks.vllm_chaos --vllm VENV/bin/python --model FOLDER --faults 100

Two prefill and two decode workers behind Baton's router, all prompts computed by the pair. Clients stream
greedy answers whose text is known. Each fault is `kill -9` or SIGSTOP (for some seconds) of a random worker;
the next one comes when the router calls all four ready again. A stream may continue elsewhere, end with a
framed error or be refused. It may not hang, end without an end, or bring another text.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.vllm_workers import VllmWorker, VllmWorkers, WorkerSpec, await_answer, opened

PORTS = {"prefill": (8611, 8612), "decode": (8621, 8622)}
ROUTER_PORT = 8600
URL = f"http://127.0.0.1:{ROUTER_PORT}"
HUNG_S = 90.0
TOKENS = 160
PROMPTS = 16
CLIENTS = 4
STOPPED_S = 8.0
QUIET_S = 2.0
"""Load between two faults."""

END = "data: [DONE]"


@dataclass(slots=True)
class Ends:
    """How streams ended, and how many came after a fault."""

    counts: Counter[str] = field(default_factory=Counter)
    resumed: int = 0
    faults: Counter[str] = field(default_factory=Counter)

    def add(self, end: str, resumed: bool) -> None:
        self.counts[end] += 1
        self.resumed += resumed

    def __str__(self) -> str:
        return json.dumps({"faults": self.faults, "ends": self.counts, "resumed": self.resumed})


def questions(rng: random.Random) -> list[dict[str, Any]]:
    """Requests of 40 to 900 tokens; every other one is a chat."""
    bodies: list[dict[str, Any]] = []
    for number in range(PROMPTS):
        tokens = [rng.randint(300, 8000) for _ in range(rng.randint(40, 900))]
        text = " ".join(f"w{token}" for token in tokens[: len(tokens) // 4])
        prompt = {"messages": [{"role": "user", "content": text}]} if number % 2 else {"prompt": tokens}
        bodies.append(
            {**prompt, "model": "vllm", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "seed": 1}
        )
    return bodies


def path_of(body: dict[str, Any]) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def text_of(events: str) -> str:
    """The text of a stream's events."""
    text = ""
    for line in events.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:]).get("choices", ()):
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return text


def end_of(status: int, events: str, whole: bool, expected: str) -> str:
    """
    The end of a stream by what was received.

    >>> end_of(200, "", False, "x")
    'ended silently'
    """
    if status != 200:
        return "refused" if '"error"' in events else "refused without an error"
    if whole and END in events:
        return "equal" if text_of(events) == expected else "another text"
    return "framed error" if '"error"' in events else "ended silently"


async def ask(client: httpx.AsyncClient, url: str, body: dict[str, Any]) -> tuple[int, str, bool]:
    """Status, received events, and whether the connection ended in order. Raises TimeoutError if it hangs."""
    received, status, whole = "", 0, True
    sent = {**body, "stream": True, "cache_salt": f"{random.random()}"}
    try:
        async with asyncio.timeout(HUNG_S), client.stream("POST", url + path_of(body), json=sent) as reply:
            status = reply.status_code
            async for piece in reply.aiter_text():
                received += piece
    except httpx.TransportError:
        whole = False
    return status, received, whole


async def load(url: str, bodies: Sequence[dict[str, Any]], expected: Sequence[str], ends: Ends) -> None:
    """One client, until cancelled."""
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        while True:
            number = random.randrange(len(bodies))
            try:
                status, events, whole = await ask(client, url, bodies[number])
            except TimeoutError:
                ends.add("hung", False)
                continue
            end = end_of(status, events, whole, expected[number])
            ends.add(end, ": resumed" in events)
            if end not in ("equal", "framed error", "refused"):
                print(f"{end}: status {status}, {events[-300:]!r}", file=sys.stderr)
            if status != 200:
                await asyncio.sleep(0.2)


async def faults(
    workers: VllmWorkers,
    running: dict[str, list[VllmWorker]],
    url: str,
    count: int,
    ends: Ends,
    rng: random.Random,
) -> None:
    for number in range(count):
        await all_ready(url, sum(map(len, running.values())))
        await asyncio.sleep(rng.uniform(0, QUIET_S))
        role = rng.choice(list(running))
        at = rng.randrange(len(running[role]))
        kill = rng.random() < 0.5
        ends.faults[f"{'kill -9' if kill else 'SIGSTOP'} of a {role} worker"] += 1
        worker = running[role][at]
        if kill:
            worker.signal(signal.SIGKILL)
            await until_lost(url, worker.url.removeprefix("http://"))
            running[role][at] = workers.start(worker.spec)
        else:
            worker.signal(signal.SIGSTOP)
            await asyncio.sleep(STOPPED_S)
            worker.signal(signal.SIGCONT)
        if number % 10 == 9:
            print(f"{number + 1} faults: {ends}", file=sys.stderr, flush=True)
    await all_ready(url, sum(map(len, running.values())))
    await asyncio.sleep(QUIET_S)


async def until_lost(url: str, address: str) -> None:
    """Returns once the router no longer calls this worker ready."""
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        while True:
            rows = (await client.get(f"{url}/workers")).json()["data"]
            if all(row["worker"] != address or row["state"] != "ready" for row in rows):
                return
            await asyncio.sleep(0.2)


async def all_ready(url: str, count: int) -> None:
    async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
        deadline = time.monotonic() + 600
        while time.monotonic() < deadline:
            rows = (await client.get(f"{url}/workers")).json()["data"]
            if sum(row["state"] == "ready" for row in rows) == count:
                return
            await asyncio.sleep(0.5)
    raise SystemExit("the router does not call all workers ready after 600 s")


async def play(
    workers: VllmWorkers, running: dict[str, list[VllmWorker]], url: str, count: int, seed: int
) -> Ends:
    rng = random.Random(seed)
    bodies = questions(rng)
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        decode = running["decode"][0].url
        expected = [text_of((await ask(client, decode, body))[1]) for body in bodies]
    ends = Ends()
    clients = [asyncio.create_task(load(url, bodies, expected, ends)) for _ in range(CLIENTS)]
    await faults(workers, running, url, count, ends, rng)
    for client_task in clients:
        client_task.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    return ends


@contextmanager
def router_before(
    workers: VllmWorkers, model: Path, folder: Path, *flags: str
) -> Iterator[dict[str, list[VllmWorker]]]:
    """Two prefill and two decode workers, all ready, and a router before them at `URL`."""
    running = {
        role: [workers.start(WorkerSpec(model, port)) for port in ports] for role, ports in PORTS.items()
    }
    command = [str(Path(sys.executable).with_name("baton")), "router", f"--port={ROUTER_PORT}", *flags]
    for role, listed in running.items():
        for worker in listed:
            worker.await_ready()
            command.append(f"--{role}={worker.url}")
    with (folder / "router.log").open("w") as log:
        router = subprocess.Popen([*command, "--local-prefill-max-tokens=0"], stdout=log, stderr=log)
        try:
            await_answer(f"{URL}/ready")
            yield running
        finally:
            router.terminate()
            router.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, required=True, help="Python of vLLM's environment")
    parser.add_argument("--model", type=Path, required=True, help="a small model's folder")
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("build/vllm-chaos"))
    given = parser.parse_args()
    with opened(given.vllm, given.out) as workers, router_before(workers, given.model, given.out) as running:
        ends = asyncio.run(play(workers, running, URL, given.faults, given.seed))
    print(ends)
    bad = ends.counts.keys() - {"equal", "framed error", "refused"}
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
