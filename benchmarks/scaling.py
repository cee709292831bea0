"""
How well a load of steps, sines and nothing is followed: by Baton, by an HPA's rule for CPU, or not at all.

    python -m benchmarks.scaling --policy baton hpa static

Real are the router, Prometheus and a process for each worker (`scaled_worker`); the API server of its
EndpointSlices behaves as one. Workers are started, and drained as Kubernetes does: least to do first, listed
as terminating, then SIGTERM, and waited for. Decisions are those of the operator's own `decide`. Everything
happens `--scale` times faster than meant, and is printed as meant. Prometheus is killed while the load is
high, and comes back when the load has long fallen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import psutil

from baton_api import metrics
from baton_operator.rollout import RoleName
from baton_operator.scaling import routers
from baton_operator.scaling.observation import Memory, Policy
from baton_operator.scaling.prometheus import MetricsLost, Prometheus
from baton_operator.scaling.questions import FIGURE, Question
from baton_operator.scaling.service import Role, decide_all
from baton_operator.scaling.signals import Figures, Pods, observed
from benchmarks.model_cluster import MODEL
from benchmarks.workloads import words
from tests.router.fake_kubernetes import SELECTOR, FakeKubernetes, a_slice

TTFT_S, ITL_S = 30.0, 0.1
INTERVAL_S = 15.0
WINDOW_S = 120.0
STARTUP_S = 240.0
"""Half of it a worker waits; the other half is what a process takes to begin on a busy machine."""
NOTICE_S = 5.0
"""From the word that a worker ends to its SIGTERM."""

MINUTE = 60.0
ROLES: tuple[RoleName, ...] = ("prefill", "decode")
MOST = 6
STATIC: Mapping[RoleName, int] = {"prefill": 3, "decode": 4}
"""What the highest load of each role needs at 0.85 of what a worker can do."""

RATES = {"demand_prompt", "demand_answer", "prefill_speed", "decode_generated"}
TIMES = {"first_token"}


@dataclass(frozen=True, slots=True)
class Phase:
    """So many requests a second, of so many tokens, until a minute."""

    name: str
    until: float
    rate: Callable[[float], float]
    """Of the minute."""
    prompt: int
    answer: int


def _steady(rate: float) -> Callable[[float], float]:
    return lambda minute: rate


def _sine(minute: float) -> float:
    return 0.2 - 0.15 * math.cos(2 * math.pi * (minute - 36) / 22)


PHASES = (
    Phase("base", 3, _steady(0.08), 8000, 600),
    Phase("step of long prompts", 14, _steady(0.3), 16_000, 250),
    Phase("base again", 26, _steady(0.08), 8000, 600),
    Phase("step of long answers", 36, _steady(0.28), 1200, 2000),
    Phase("sine", 58, _sine, 8000, 800),
    Phase("nothing", 68, _steady(0.0), 1, 1),
    Phase("from zero", 72, _steady(0.08), 8000, 600),
)
DENSEST = 0.4
"""Requests a second, more than there ever are."""

DARK = (13.0, 21.0)
"""Minutes between which there is no Prometheus."""


@dataclass(slots=True)
class Answer:
    """What became of one request, in seconds as meant."""

    at: float
    phase: str
    first: float = math.inf
    token: float = 0.0
    ok: bool = False
    why: str = ""

    @property
    def good(self) -> bool:
        return self.ok and self.first <= TTFT_S and self.token <= ITL_S


@dataclass(slots=True, eq=False)
class Process:
    """A worker."""

    role: RoleName
    port: int
    process: asyncio.subprocess.Process
    started: float
    ready: bool = False
    ends: bool = False

    @property
    def name(self) -> str:
        return f"{self.role}-{self.port}"


@dataclass(slots=True)
class Cluster:
    """What a cluster does: processes that are wanted, come, are listed, end, and are scraped."""

    folder: Path
    scale: float
    api: FakeKubernetes
    ports: int
    workers: list[Process] = field(default_factory=list)
    router: int = 0
    ended: int = 0
    badly: int = 0
    """Workers that did not end by themselves, or not well."""
    hours: float = 0.0
    at: float = 0.0
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def of(self, role: RoleName) -> list[Process]:
        return [one for one in self.workers if one.role == role and not one.ends]

    async def scale_to(self, role: RoleName, count: int, running: Mapping[str, float]) -> None:
        there = self.of(role)
        for _ in range(count - len(there)):
            await self._start(role)
        # The unready ones first, then those with least to do.
        there.sort(key=lambda one: (one.ready, running.get(one.name, 0.0)))
        for one in there[: max(0, len(there) - count)]:
            one.ends = True
            self._list(one)
            task = asyncio.create_task(self._end(one))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        self._target()

    async def watch(self) -> None:
        """Count replica-hours, and list who has become ready."""
        async with aiohttp.ClientSession() as session:
            while True:
                now = time.monotonic()
                self.hours += len(self.workers) * (now - self.at) * self.scale / 3600
                self.at = now
                for one in self.workers:
                    if not one.ready and not one.ends and await _answers(session, one.port, "/ready"):
                        one.ready = True
                        self._list(one)
                await asyncio.sleep(0.1)

    async def _start(self, role: RoleName) -> None:
        self.ports += 1
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.scaled_worker", f"--role={role}", f"--port={self.ports}",
            f"--scale={self.scale}", f"--startup-s={STARTUP_S / 2}",
        )  # fmt: skip
        one = Process(role, self.ports, process, time.monotonic())
        self.workers.append(one)
        self._list(one)

    async def _end(self, one: Process) -> None:
        if one.ready:
            await asyncio.sleep(NOTICE_S / self.scale)
            one.process.terminate()
        else:
            one.process.kill()
        status = await one.process.wait()
        self.ended += 1
        self.badly += one.ready and status != 0
        self.workers.remove(one)
        self.api.delete(one.name)
        self._target()

    def _list(self, one: Process) -> None:
        item = a_slice(
            one.name, "127.0.0.1", role=one.role, ready=one.ready, serving=one.ready, terminating=one.ends
        )
        item["ports"] = [{"name": "http", "port": one.port}]
        self.api.put(item)

    def _target(self) -> None:
        """Prometheus' targets."""
        made = [_targets("router", self.router, "router")]
        made += [_targets(one.role, one.port, one.name) for one in self.workers if not one.ends]
        write = self.folder / "targets.tmp"
        write.write_text(json.dumps(made))
        write.rename(self.folder / "targets.json")


def _targets(role: str, port: int, pod: str) -> Any:
    labels = {"namespace": "models", "service": "chat", "role": role, "pod": pod}
    return {"targets": [f"127.0.0.1:{port}"], "labels": labels}


async def _answers(session: aiohttp.ClientSession, port: int, path: str) -> bool:
    try:
        async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
            return bool(answer.status == 200)
    except (aiohttp.ClientError, OSError):
        return False


class Measured:
    """The figures of the one question, as meant: rates are slower, and times longer, than they pass here."""

    def __init__(self, url: str, scale: float) -> None:
        self._url = url
        self._scale = scale
        self._prometheus = Prometheus()
        self._question = Question("models", "chat", 95, max(8, round(WINDOW_S / scale)))

    async def figures(self) -> Figures:
        try:
            found = await self._prometheus.ask(self._url, self._question.text, FIGURE)
        except MetricsLost as lost:
            return Figures({}, str(lost))
        times = dict.fromkeys(TIMES, self._scale) | dict.fromkeys(RATES, 1 / self._scale)
        return Figures({name: value * times.get(name, 1.0) for name, value in found.items()})

    async def running(self) -> Mapping[str, float]:
        return await self._ask(self._question.running, "pod")

    async def busy(self) -> Mapping[str, float]:
        """Share of the time that a worker of each role is at work: what its CPU would show."""
        window = max(8, round(60 / self._scale))
        return await self._ask(f"avg by (role) (rate({metrics.WORKER_STEP.name}_sum[{window}s]))", "role")

    async def _ask(self, query: str, label: str) -> Mapping[str, float]:
        try:
            return await self._prometheus.ask(self._url, query, label)
        except MetricsLost:
            return {}

    async def close(self) -> None:
        await self._prometheus.close()


class Scaler(Protocol):
    """Says how many workers each role is to have now."""

    async def wanted(self, cluster: Cluster, measured: Measured, now: float) -> dict[RoleName, int]: ...


class Baton:
    """The operator's decisions."""

    def __init__(self, now: float) -> None:
        self._policies: dict[RoleName, Policy] = {
            "prefill": Policy(least=0, most=MOST, objective_s=TTFT_S, queue_s=TTFT_S),
            "decode": Policy(least=0, most=MOST, objective_s=ITL_S),
        }
        self._memories = {name: Memory.new(now, startup_s=STARTUP_S) for name in ROLES}
        self.log: list[tuple[float, RoleName, int, str, str]] = []

    async def wanted(self, cluster: Cluster, measured: Measured, now: float) -> dict[RoleName, int]:
        figures = await measured.figures()
        if not cluster.of("decode") and not cluster.of("prefill"):
            held = await routers.held([f"http://127.0.0.1:{cluster.router}"])
            names = ("demand_prompt", "demand_answer", "queued_prompt", "in_flight", "waiting", "age")
            figures = Figures({**dict.fromkeys(names, 0.0), "routers": 1.0, "held": held.value or 0.0})
        roles: dict[RoleName, Role] = {}
        for name in ROLES:
            there = cluster.of(name)
            pods = Pods(replicas=len(there), ready=sum(one.ready for one in there), routers=1)
            seen = observed(name, figures, pods, self._policies[name].objective_s)
            roles[name] = Role(self._policies[name], self._memories[name], seen)
        made = decide_all(roles, lambda wished: {name: one.replicas for name, one in wished.items()}, now)
        for name, (decision, memory) in made.items():
            self._memories[name] = memory
            if decision.replicas != roles[name].seen.replicas:
                self.log.append((now, name, decision.replicas, decision.reason, decision.message))
        return {name: decision.replicas for name, (decision, _) in made.items()}


class Hpa:
    """A HorizontalPodAutoscaler for 70 % of the CPU, with its defaults."""

    TARGET, TOLERANCE, DOWN_S = 0.7, 0.1, 300.0

    def __init__(self) -> None:
        self._recommended: list[tuple[float, RoleName, int]] = []

    async def wanted(self, cluster: Cluster, measured: Measured, now: float) -> dict[RoleName, int]:
        busy = await measured.busy()
        made: dict[RoleName, int] = {}
        for name in ROLES:
            there = len(cluster.of(name))
            ready = sum(one.ready for one in cluster.of(name))
            ratio = busy[name] / self.TARGET if name in busy and ready else 1.0
            wish = there if abs(ratio - 1) <= self.TOLERANCE else math.ceil(ready * ratio)
            if there > ready and wish > there:
                wish = max(there, wish)  # those that start count as idle
            wish = max(1, min(MOST, wish, max(2 * there, there + 4)))
            self._recommended.append((now, name, wish))
            recent = [
                count for at, role, count in self._recommended if role == name and at > now - self.DOWN_S
            ]
            made[name] = max(wish, min(there, max(recent)))
        return made


class Static:
    """As many as the highest load needs, always."""

    async def wanted(self, cluster: Cluster, measured: Measured, now: float) -> dict[RoleName, int]:
        return dict(STATIC)


def _now(minute: float) -> Phase | None:
    return next((one for one in PHASES if minute < one.until), None)


async def _clients(port: int, scale: float, began: float, seed: int) -> list[Answer]:
    """They come when they come, whether or not the others were answered."""
    rng = random.Random(seed)
    answers: list[Answer] = []
    tasks = []
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        at = 0.0
        while (phase := _now(at / MINUTE)) is not None:
            rate = phase.rate(at / MINUTE)
            at += rng.expovariate(DENSEST)
            if rng.random() >= rate / DENSEST:
                continue
            await asyncio.sleep(max(0.0, began + at / scale - time.monotonic()))
            answers.append(one := Answer(at, phase.name))
            tasks.append(asyncio.create_task(_ask(session, port, scale, phase, one, rng.getrandbits(60))))
        await asyncio.wait(tasks, timeout=120)
        for task in tasks:
            task.cancel()
    return answers


async def _ask(
    session: aiohttp.ClientSession, port: int, scale: float, phase: Phase, made: Answer, seed: int
) -> None:
    body = {
        "model": MODEL, "stream": True, "max_tokens": phase.answer,
        "messages": [{"role": "user", "content": words(seed, phase.prompt)}],
    }  # fmt: skip
    start = time.monotonic()
    try:
        async with session.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                made.why = f"{answer.status} {(await answer.text())[:200]}"
                return
            last = b""
            async for piece in answer.content.iter_any():
                if math.isinf(made.first):
                    made.first = (time.monotonic() - start) * scale
                last = (last + piece)[-64:]
        whole = (time.monotonic() - start) * scale
        made.token = (whole - made.first) / max(1, phase.answer - 1)
        made.ok = last.rstrip().endswith(b"[DONE]")
        made.why = "" if made.ok else "cut"
    except (aiohttp.ClientError, OSError) as error:
        made.why = f"{type(error).__name__}: {error}"


async def _prometheus(folder: Path, port: int) -> asyncio.subprocess.Process:
    config = {
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s"},
        "scrape_configs": [
            {"job_name": "baton",
             "file_sd_configs": [{"files": [str(folder / "targets.json")], "refresh_interval": "1s"}]}
        ],
    }  # fmt: skip
    (folder / "prometheus.yml").write_text(json.dumps(config))
    log = (folder / "prometheus.log").open("ab")
    return await asyncio.create_subprocess_exec(
        "prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", stdout=log, stderr=log,
    )  # fmt: skip


async def _router(folder: Path, api: FakeKubernetes, port: int) -> asyncio.subprocess.Process:
    log = (folder / "router.log").open("ab")
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "baton_cli.main", "router", f"--port={port}", f"--kubernetes-api={api.url}",
        f"--kubernetes-account={api.account}", f"--kubernetes-selector={SELECTOR}", "--alone-tokens=0",
        "--hold-s=120", f"--hold-models={MODEL}", "--health-interval-s=0.5", "--wait-s=120",
        "--first-byte-s=20", f"--state={folder / 'state'}", stdout=log, stderr=log,
    )  # fmt: skip


async def run(kind: str, scale: float, base: int, seed: int) -> dict[str, Any]:
    """One policy over the whole load."""
    with tempfile.TemporaryDirectory(prefix="baton-scaling-") as name:
        folder = Path(name)
        async with FakeKubernetes(folder) as api:
            cluster = Cluster(folder, scale, api, base + 100)
            cluster.router = base
            cluster._target()
            router = await _router(folder, api, base)
            store = await _prometheus(folder, base + 1)
            measured = Measured(f"http://127.0.0.1:{base + 1}", scale)
            try:
                return await _played(kind, cluster, measured, store, folder, seed)
            finally:
                await measured.close()
                for task in list(cluster.tasks):
                    await task
                for process in (router, store, *(one.process for one in cluster.workers)):
                    if process.returncode is None:
                        process.send_signal(signal.SIGTERM)
                        await process.wait()


async def _played(
    kind: str,
    cluster: Cluster,
    measured: Measured,
    store: asyncio.subprocess.Process,
    folder: Path,
    seed: int,
) -> dict[str, Any]:
    scale, base = cluster.scale, cluster.router
    first = STATIC if kind == "static" else dict.fromkeys(ROLES, 1)
    cluster.at = time.monotonic()
    for role, count in first.items():
        await cluster.scale_to(role, count, {})
    watching = asyncio.create_task(cluster.watch())
    while not all(one.ready for one in cluster.workers) or not await _is_up(base):  # noqa: ASYNC110
        await asyncio.sleep(0.2)
    await asyncio.sleep(3)  # Prometheus, which looks every 2 s, has seen all of them once by then
    began, cluster.hours = time.monotonic(), 0.0
    policy: Scaler = Baton(0.0) if kind == "baton" else Hpa() if kind == "hpa" else Static()
    asking = asyncio.create_task(_clients(base, scale, began, seed))
    seen: list[tuple[float, int, int]] = []
    dark = False
    loads = []
    while (minute := (time.monotonic() - began) * scale / MINUTE) < PHASES[-1].until:
        if not dark and DARK[0] <= minute < DARK[1]:
            store.kill()
            await store.wait()
            dark = True
        elif dark and minute >= DARK[1] and store.returncode is not None:
            store = await _prometheus(folder, base + 1)
        wanted = await policy.wanted(cluster, measured, minute * MINUTE)
        running = await measured.running()
        for role, count in wanted.items():
            if count != len(cluster.of(role)):
                await cluster.scale_to(role, count, running)
        seen.append((minute, len(cluster.of("prefill")), len(cluster.of("decode"))))
        loads.append(psutil.getloadavg()[0])
        await asyncio.sleep(max(0.0, began + (len(seen) * INTERVAL_S) / scale - time.monotonic()))
    hours = cluster.hours
    answers = await asking
    watching.cancel()
    if store.returncode is None:
        store.terminate()
        await store.wait()
    if isinstance(policy, Baton):
        for now, role, count, reason, message in policy.log:
            print(f"  {now / MINUTE:5.1f} min {role:7} -> {count}  {reason}: {message}", flush=True)
    return _summary(kind, answers, seen, hours, cluster, loads)


async def _is_up(port: int) -> bool:
    async with aiohttp.ClientSession() as session:
        return await _answers(session, port, "/ready")


def _summary(
    kind: str,
    answers: list[Answer],
    seen: list[tuple[float, int, int]],
    hours: float,
    cluster: Cluster,
    loads: list[float],
) -> dict[str, Any]:
    during = [one for one in seen if DARK[0] + 0.5 <= one[0] < DARK[1]]
    fell = sum(after[1] < before[1] or after[2] < before[2] for before, after in pairwise(during))
    phases = {}
    for phase in PHASES:
        own = [one for one in answers if one.phase == phase.name]
        if own:
            phases[phase.name] = f"{sum(one.good for one in own) / len(own):.1%} of {len(own)}"
    firsts = sorted(one.first for one in answers if one.ok)
    return {
        "policy": kind,
        "requests": len(answers),
        "failed": sum(not one.ok for one in answers),
        "why": sorted({one.why for one in answers if not one.ok})[:5],
        "attained": f"{sum(one.good for one in answers) / len(answers):.2%}",
        "ttft_p50_p95_s": [round(statistics.quantiles(firsts, n=20)[at], 2) for at in (9, 18)],
        "replica_hours": round(hours, 2),
        "most": [max(one[at] for one in seen) for at in (1, 2)],
        "ended": cluster.ended,
        "ended_badly": cluster.badly,
        "fell_without_prometheus": fell,
        "by_phase": phases,
        "replicas": [list(one) for one in _changes(seen)],
        "machine_load": [round(min(loads), 1), round(max(loads), 1)],
    }


def _changes(seen: list[tuple[float, int, int]]) -> list[tuple[float, int, int]]:
    made: list[tuple[float, int, int]] = []
    for minute, prefill, decode in seen:
        if not made or made[-1][1:] != (prefill, decode):
            made.append((round(minute, 1), prefill, decode))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--policy", nargs="+", choices=["baton", "hpa", "static"], default=["baton"])
    parser.add_argument("--scale", type=float, default=9.0, help="times faster than meant")
    parser.add_argument("--port", type=int, default=9500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for number, kind in enumerate(options.policy):
        made = asyncio.run(run(kind, options.scale, options.port + 300 * number, options.seed))
        print(json.dumps(made, indent=1), flush=True)


if __name__ == "__main__":
    main()
