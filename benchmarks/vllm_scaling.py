"""
Scales decode workers of a real vLLM by the autoscaler's own decisions, from a real Prometheus.

    python -m benchmarks.vllm_scaling --vllm VENV/bin/python --model FOLDER

One prefill and one decode worker run behind Baton's router. Prometheus scrapes all of them every second, with
the chart's recording rules. Every two seconds the operator's query is asked and its decision is carried out:
a worker is started or ended. Load comes and goes, and at last Prometheus is killed under load. Windows are
shorter than the defaults, so that it takes minutes. Needs `prometheus` (on Debian: apt install prometheus).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from baton_operator.kinds.part import Duration
from baton_operator.kinds.worker_role import ScaleDown, ScaleUp
from baton_operator.scaling.decision import decide
from baton_operator.scaling.prometheus import METRIC_LABEL, MetricsLost, MetricsQuery, PrometheusClient
from baton_operator.scaling.sample import RoleMemory, ScalingPolicy
from baton_operator.scaling.signals import RolePods, ServiceMetrics, role_sample
from baton_operator.scaling.sizing import DecodeSlots
from benchmarks.vllm_workers import VllmWorker, VllmWorkers, WorkerSpec, await_answer, opened

RULES = Path(__file__).parents[1] / "charts/baton/rules/engines.yaml"
PREFILL_PORT, DECODE_PORTS, ROUTER_PORT, PROMETHEUS_PORT = 8611, (8621, 8622, 8623), 8600, 8690
SLOTS = 4
"""`--max-num-seqs` of a decode worker."""

INTERVAL_S = 2.0
STREAMS = 10
"""Concurrent requests under load: more than two workers' slots."""

POLICY = ScalingPolicy(
    least=1,
    most=len(DECODE_PORTS),
    objective_s=0.5,
    up=ScaleUp(stabilization_window=Duration("4s"), max_step=1, period=Duration("10s")),
    down=ScaleDown(stabilization_window=Duration("20s"), max_step=1, period=Duration("10s")),
)
PHASES = (("idle", 20.0, 0), ("load", 120.0, STREAMS), ("idle again", 90.0, 0), ("load", 90.0, STREAMS))
DARK_S = 40.0
"""Seconds under load after Prometheus was killed."""


@dataclass(slots=True)
class DecodeWorkers:
    """The decode workers that run or start."""

    workers: VllmWorkers
    model: Path
    running: list[VllmWorker] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)

    def scale(self, replicas: int) -> None:
        while len(self.running) < replicas:
            port = DECODE_PORTS[len(self.running)]
            slots = ("--max-num-seqs", str(SLOTS))
            self.running.append(self.workers.start(WorkerSpec(self.model, port, arguments=slots)))
        for worker in self.running[replicas:]:
            worker.signal(signal.SIGTERM)
            self.ready.discard(worker.spec.port)
        del self.running[replicas:]

    async def look(self, client: httpx.AsyncClient) -> None:
        """Find out who answers."""
        for worker in self.running:
            try:
                reply = await client.get(f"{worker.url}/health", timeout=1)
            except httpx.TransportError:
                continue
            if reply.is_success:
                self.ready.add(worker.spec.port)


def write_targets(folder: Path, decode: list[VllmWorker]) -> None:
    """Scrape targets with the labels that a PodMonitor of the chart gives."""
    targets = [("router", ROUTER_PORT), ("prefill", PREFILL_PORT)]
    targets += [("decode", worker.spec.port) for worker in decode]
    groups = [
        {
            "targets": [f"127.0.0.1:{port}"],
            "labels": {
                "namespace": "models", "service": "chat", "role": role,
                "worker": f"{role}-{port}", "pod": f"{role}-{port}",
            },
        }
        for role, port in targets
    ]  # fmt: skip
    written = folder / "targets.tmp"
    written.write_text(json.dumps(groups))
    written.rename(folder / "targets.json")


@contextmanager
def prometheus(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    rules = folder / "rules.yml"
    rules.write_text(re.sub(r"interval: \d+s", "interval: 1s", RULES.read_text()))
    discovery = {"files": [str((folder / "targets.json").resolve())], "refresh_interval": "1s"}
    config = {
        "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules.resolve())],
        "scrape_configs": [{"job_name": "baton", "honor_labels": False, "file_sd_configs": [discovery]}],
    }
    file = folder / "prometheus.yml"
    file.write_text(json.dumps(config))
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(
            [
                "prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address=127.0.0.1:{PROMETHEUS_PORT}",
            ],
            stdout=log, stderr=log,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def ask(client: httpx.AsyncClient, counts: dict[int, int]) -> None:
    """One client that asks until it is cancelled."""
    while True:
        prompt = [random.randint(300, 8000) for _ in range(300)]
        body = {"model": "vllm", "prompt": prompt, "max_tokens": 200, "ignore_eos": True}
        reply = await client.post(f"http://127.0.0.1:{ROUTER_PORT}/v1/completions", json=body)
        counts[reply.status_code] = counts.get(reply.status_code, 0) + 1
        if not reply.is_success:
            await asyncio.sleep(1)


class Autoscaler:
    """The operator's query and decision for the role decode."""

    def __init__(self, decode: DecodeWorkers, folder: Path) -> None:
        self._decode = decode
        self._folder = folder
        self._memory = RoleMemory.new(time.monotonic(), startup_s=30.0)
        self._prometheus = PrometheusClient()
        self._query = MetricsQuery(
            "models", "chat", 95, window_s=16, decode_slots=DecodeSlots(SLOTS, exact=True)
        )
        self._last = ""

    async def step(self, client: httpx.AsyncClient, phase: str, began: float) -> None:
        decode = self._decode
        await decode.look(client)
        url = f"http://127.0.0.1:{PROMETHEUS_PORT}"
        try:
            seen = ServiceMetrics(await self._prometheus.query(url, self._query.text, METRIC_LABEL))
        except MetricsLost as lost:
            seen = ServiceMetrics({}, str(lost))
        pods = RolePods(replicas=len(decode.running), ready=len(decode.ready), routers=1)
        sample = role_sample("decode", seen, pods, POLICY.objective_s)
        decision, self._memory = decide(POLICY, self._memory, sample, time.monotonic())
        change = f"{pods.replicas} -> {decision.replicas}, {pods.ready} ready"
        line = f"{phase}: {change}: {decision.message}"
        if line != self._last:
            print(f"{time.monotonic() - began:5.0f} s  {line}", flush=True)
            self._last = line
        if decision.replicas != pods.replicas:
            decode.scale(decision.replicas)
            write_targets(self._folder, decode.running)

    async def close(self) -> None:
        await self._prometheus.close()


async def play(decode: DecodeWorkers, folder: Path, server: subprocess.Popen[bytes]) -> dict[int, int]:
    """Replies by status."""
    counts: dict[int, int] = {}
    autoscaler = Autoscaler(decode, folder)
    began = time.monotonic()
    async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
        clients: list[asyncio.Task[None]] = []
        for phase, seconds, streams in (*PHASES, ("without Prometheus", DARK_S, STREAMS)):
            if phase == "without Prometheus":
                server.kill()
            clients += [asyncio.create_task(ask(client, counts)) for _ in range(streams - len(clients))]
            for one in clients[streams:]:
                one.cancel()
            del clients[streams:]
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                await autoscaler.step(client, phase, began)
                await asyncio.sleep(INTERVAL_S)
        for one in clients:
            one.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    await autoscaler.close()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, required=True, help="Python of vLLM's environment")
    parser.add_argument("--model", type=Path, required=True, help="a small model's folder")
    parser.add_argument("--out", type=Path, default=Path("build/vllm-scaling"))
    given = parser.parse_args()
    with opened(given.vllm, given.out) as workers:
        prefill = workers.start(WorkerSpec(given.model, PREFILL_PORT))
        decode = DecodeWorkers(workers, given.model)
        decode.scale(1)
        write_targets(given.out, decode.running)
        for worker in (prefill, *decode.running):
            worker.await_ready()
        command = [str(Path(sys.executable).with_name("baton")), "router", f"--port={ROUTER_PORT}"]
        command += [
            f"--prefill={prefill.url}",
            *(f"--decode=http://127.0.0.1:{port}" for port in DECODE_PORTS),
        ]
        with (given.out / "router.log").open("w") as log, prometheus(given.out) as server:
            router = subprocess.Popen([*command, "--local-prefill-max-tokens=0"], stdout=log, stderr=log)
            try:
                await_answer(f"http://127.0.0.1:{ROUTER_PORT}/ready")
                print(json.dumps({"replies by status": asyncio.run(play(decode, given.out, server))}))
            finally:
                router.terminate()
                router.wait()


if __name__ == "__main__":
    main()
