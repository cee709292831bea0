"""
Clients of an overloaded service: a flood by one tenant, an overload, and a batch.

    python -m benchmarks.overload --seconds 20

One real router before workers without models (`benchmarks.model_server`). Uncached prompts of 2,000 tokens
take each prefill worker a known time, so the capacity C in requests per second is known too.
Clients arrive at random, whether or not the others were answered. Everything is `--scale` times faster than
the modeled workers; times are printed in real milliseconds.

- flood: twenty tenants ask for 0.8 C together; then one of them asks for ten times as much as before; then
  the same as one tenant. Measures the time to the first token of the other tenants.
- overload: 3 C with an objective of 1 s. Measures requests in time per second, with the class interactive
  (which is rejected at once if it would be late) and with the class default (which waits).
- batch: interactive requests for half of C. They run without other load and beside 64 requests at a time of
  the class batch. Then the 64 are of the class default, and last all are of one class and tenant.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import uvloop

from baton_cli.bench.connection import Connection
from benchmarks.model_cluster import MODEL
from benchmarks.model_worker import BYTES_PER_TOKEN, Timing
from benchmarks.replay import Ports, running
from benchmarks.workloads import words

PREFILL, DECODE = 2, 2
PROMPT_TOKENS = 2000
ANSWER_TOKENS = 8
TENANTS = 20
OBJECTIVE_S = 1.0
AT_ONCE = 64
WARM_S = 3.0
START_LIMIT_S = 60.0


@dataclass(slots=True)
class TimedRequest:
    """One request that has ended."""

    tenant: str
    kind: str
    sent: float
    wait_s: float
    """To the first byte of the answer, whatever it was."""
    status: int


@dataclass(frozen=True, slots=True)
class Load:
    """Requests of one tenant and class: so many a second by chance, or so many at any time."""

    tenant: str
    kind: str = "default"
    per_s: float = 0.0
    at_once: int = 0
    objective_s: float | None = None


class Clients:
    """All clients of one run."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._rng = random.Random(seed)
        self._idle: list[Connection] = []
        self._seeds = random.Random(seed)
        self.requests: list[TimedRequest] = []

    async def offer(self, loads: Sequence[Load], seconds: float) -> None:
        """Send these loads for `seconds`, then cancel open requests."""
        until = time.perf_counter() + seconds
        tasks: set[asyncio.Task[None]] = set()
        for load in loads:
            for _ in range(load.at_once):
                tasks.add(asyncio.create_task(self._one_after_the_other(load)))
        rate = sum(load.per_s for load in loads)
        weights = [load.per_s for load in loads]
        due = time.perf_counter()
        while rate and (due := due + self._rng.expovariate(rate)) < until:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            load = self._rng.choices(loads, weights)[0]
            task = asyncio.create_task(self.ask(load))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.sleep(max(0.0, until - time.perf_counter()))
        for task in tuple(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _one_after_the_other(self, load: Load) -> None:
        while True:
            await self.ask(load)

    async def ask(self, load: Load) -> None:
        client = await self._connected()
        answer = await client.ask(self._request(load))
        waited = answer.first - answer.sent
        self.requests.append(TimedRequest(load.tenant, load.kind, answer.sent, waited, answer.status))
        self._idle.append(client)

    def _request(self, load: Load) -> bytes:
        text = words(self._seeds.getrandbits(60), PROMPT_TOKENS)[: PROMPT_TOKENS * BYTES_PER_TOKEN - 8]
        messages = [{"role": "user", "content": text}]
        body = json.dumps(
            {"model": MODEL, "messages": messages, "max_tokens": ANSWER_TOKENS, "stream": True}
        ).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        head += f"authorization: Bearer {load.tenant}\r\nx-baton-class: {load.kind}\r\n"
        if load.objective_s is not None:
            head += f"x-slo-ttft-ms: {1000 * load.objective_s:.0f}\r\n"
        return f"{head}content-length: {len(body)}\r\n\r\n".encode() + body

    async def _connected(self) -> Connection:
        while self._idle:
            client = self._idle.pop()
            if client.usable:
                return client
        _, client = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self._port)
        return client


@contextmanager
def cluster(base: int, scale: float, logs: Path) -> Iterator[int]:
    """Workers and a router that knows twenty tenants; gives its port."""
    ports = Ports.of(base, PREFILL, DECODE)
    tenants = logs / "tenants.yaml"
    names = [name_of(number) for number in range(TENANTS)]
    digests = {name: hashlib.sha256(name.encode()).hexdigest() for name in names}
    tenants.write_text(
        json.dumps({"tenants": [{"name": name, "keys": [f"sha256:{digests[name]}"]} for name in names]})
    )
    workers = [sys.executable, "-m", "benchmarks.model_server", "--scale", str(scale)]
    workers += ["--prefill", *map(str, ports.prefill), "--decode", *map(str, ports.decode)]
    router = ["baton", "router", "--port", str(ports.router), "--tenants-file", str(tenants)]
    router += [f"--decode=http://127.0.0.1:{port}" for port in ports.decode]
    router += [f"--prefill=http://127.0.0.1:{port}" for port in ports.prefill]
    environment = {"BATON_ROUTER_TICKET_SECRET": "a secret for this run"}
    with (
        running(workers, logs / "workers.log"),
        running(
            ["env", *(f"{key}={value}" for key, value in environment.items()), *router], logs / "router.log"
        ),
    ):
        uvloop.run(_await_answer(ports.router))
        yield ports.router


async def _await_answer(port: int) -> None:
    limit = time.perf_counter() + START_LIMIT_S
    while time.perf_counter() < limit:
        clients = Clients(port, 0)
        with suppress(OSError):
            await clients.ask(Load(name_of(0)))
        if clients.requests and clients.requests[0].status == 200:
            return
        await asyncio.sleep(0.3)
    raise SystemExit(f"no router answered at {port} within {START_LIMIT_S:g} s")


def name_of(number: int) -> str:
    return f"tenant-{number:02d}"


def measured(
    base: int, scale: float, logs: Path, loads: Sequence[Load], seconds: float
) -> list[TimedRequest]:
    """Return the requests of these loads to a router that is warmed up."""
    with cluster(base, scale, logs) as port:
        clients = Clients(port, base)

        async def run() -> None:
            await clients.offer([Load(name_of(0), per_s=0.3 * capacity(scale))], WARM_S)
            clients.requests.clear()
            await clients.offer(loads, seconds)

        uvloop.run(run())
    return clients.requests


def capacity(scale: float) -> float:
    """Requests per second that the prefill workers can compute."""
    return PREFILL / Timing().faster(scale).prefill_s(PROMPT_TOKENS, PROMPT_TOKENS)


def waits(requests: Sequence[TimedRequest]) -> str:
    """The median and the 99th percentile of what was answered, in milliseconds."""
    seen = sorted(one.wait_s for one in requests if one.status == 200)
    if not seen:
        return "| - | - "
    return f"| {1000 * statistics.median(seen):.0f} | {1000 * seen[int(0.99 * (len(seen) - 1))]:.0f} "


def flood(base: int, scale: float, seconds: float, logs: Path) -> None:
    each = 0.8 * capacity(scale) / TENANTS
    names = [name_of(number) for number in range(TENANTS)]
    calm = [Load(name, per_s=each) for name in names]
    flooded = [Load(names[0], per_s=10 * each), *calm[1:]]
    alike = [Load(names[0], per_s=10 * each), Load(names[0], per_s=each * (TENANTS - 1))]
    cases = {"calm": calm, "one asks for ten times as much": flooded, "the same, all as one tenant": alike}
    print(
        "| flood | others' p50 ms | p99 | the flood's p50 ms | p99 | answered/s |\n|---|---|---|---|---|---|"
    )
    for number, (name, loads) in enumerate(cases.items()):
        requests = measured(base + 100 * number, scale, logs, loads, seconds)
        others = [one for one in requests if one.tenant != names[0]] if loads is not alike else requests
        mine = [one for one in requests if one.tenant == names[0]]
        good = sum(one.status == 200 for one in requests) / seconds
        print(f"| {name} {waits(others)}{waits(mine)}| {good:.1f} |", flush=True)


def overload(base: int, scale: float, seconds: float, logs: Path) -> None:
    most = capacity(scale)
    print(f"\nC is {most:.1f} requests/s\n")
    print("| overload | in time/s | answered/s | rejected/s | rejected after p50 ms | p50 ms | p99 |")
    print("|---|---|---|---|---|---|---|")
    for number, (kind, times) in enumerate([("interactive", 0.8), ("interactive", 3.0), ("default", 3.0)]):
        objective = OBJECTIVE_S if kind == "interactive" else None
        loads = [Load(name_of(0), kind, times * most, objective_s=objective)]
        requests = measured(base + 100 * number, scale, logs, loads, seconds)
        good = [one for one in requests if one.status == 200]
        in_time = sum(one.wait_s <= OBJECTIVE_S for one in good) / seconds
        rejected = [one.wait_s for one in requests if one.status == 503]
        after = f"{1000 * statistics.median(rejected):.1f}" if rejected else "-"
        print(
            f"| {kind}, {times:g} C | {in_time:.1f} | {len(good) / seconds:.1f} "
            f"| {len(rejected) / seconds:.1f} | {after} {waits(requests)}|",
            flush=True,
        )


def batch(base: int, scale: float, seconds: float, logs: Path) -> None:
    first, second = name_of(0), name_of(1)
    interactive = Load(first, "interactive", 0.5 * capacity(scale))
    cases = {
        "alone": [interactive],
        "beside batch": [interactive, Load(second, "batch", at_once=AT_ONCE)],
        "beside default": [interactive, Load(second, "default", at_once=AT_ONCE)],
        "beside default of the same class": [
            Load(first, "default", 0.5 * capacity(scale)),
            Load(first, "default", at_once=AT_ONCE),
        ],
    }
    print("\n| batch | p50 ms | p99 | answered/s | of the others/s |\n|---|---|---|---|---|")
    for number, (name, loads) in enumerate(cases.items()):
        requests = measured(base + 100 * number, scale, logs, loads, seconds)
        mine = [one for one in requests if (one.tenant, one.kind) == (loads[0].tenant, loads[0].kind)]
        good = [sum(one.status == 200 for one in some) / seconds for some in (mine, requests)]
        print(f"| {name} {waits(mine)}| {good[0]:.1f} | {good[1] - good[0]:.1f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each run")
    parser.add_argument("--scale", type=float, default=4.0)
    parser.add_argument("--only", choices=("flood", "overload", "batch"))
    parser.add_argument("--port", type=int, default=22000)
    parser.add_argument("--out", type=Path, default=Path("build/overload"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for number, one in enumerate((flood, overload, batch)):
        if options.only in (None, one.__name__):
            one(options.port + 1000 * number, options.scale, options.seconds, options.out)


if __name__ == "__main__":
    main()
