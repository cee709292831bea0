"""
Routers side by side on one workload, before workers that take time and keep a cache but have no model.

    python -m benchmarks.replay --workload mooncake_conversation_trace.jsonl --minutes 20 --rates 0.8 1 1.4 \\
        --router 'baton=baton router --port {port} {decode:--decode=} {prefill:--prefill=}' \\
        --router 'sglang=python -m sglang_router.launch_router --port {port} ...'

`{decode:FLAG}` becomes FLAGurl for each decode worker, likewise `{prefill:FLAG}`. Workers restart for each
router, and runs are interleaved. Everything runs `--scale` times faster than modeled. Printed times are
modeled seconds, from the moment at which a client sends to the first event of its answer. Clients start by
the clock, whether or not the others were answered. They acknowledge data immediately (TCP_QUICKACK);
otherwise a router that waits for acknowledgments would be charged `--scale` times for it.

The workload is a Mooncake trace (a file) or one of `workloads.GENERATED`. Ratios are the first router's
results to each other one's.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import uvloop

from baton_api.workers import Role
from benchmarks import workloads
from benchmarks.answering import until_answering
from benchmarks.crowd import Crowd, ReplayedRequest, play
from benchmarks.model_cluster import MODEL
from benchmarks.model_worker import Timing
from benchmarks.serving import end

LENGTHS = 10
"""Classes of equally many requests by the length of the prompt, among which a router may be unfair."""


@dataclass(frozen=True, slots=True)
class Ports:
    """Ports of the processes of one run."""

    router: int
    prefill: Sequence[int]
    decode: Sequence[int]

    @classmethod
    def of(cls, base: int, prefill: int, decode: int) -> Ports:
        first = base + 10
        return cls(base, range(first, first + prefill), range(first + prefill, first + prefill + decode))

    def command(self, template: str) -> list[str]:
        """
        >>> Ports.of(5, 1, 2).command("r {port} {decode:-d } {prefill:-p}")
        ['r', '5', '-d', 'http://127.0.0.1:16', '-d', 'http://127.0.0.1:17', '-phttp://127.0.0.1:15']
        """

        def each(match: re.Match[str]) -> str:
            ports = self.prefill if match[1] == "prefill" else self.decode
            return " ".join(f"{match[2]}http://127.0.0.1:{one}" for one in ports)

        return shlex.split(
            re.sub(r"\{(prefill|decode):([^}]*)\}", each, template)
            .replace("{port}", str(self.router))
            .replace("{metrics}", str(self.router + 1))
        )


@contextmanager
def running(command: Sequence[str], log: Path) -> Iterator[psutil.Process]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield psutil.Process(process.pid)
    finally:
        end(process, signal.SIGTERM, timeout_s=5)


@dataclass(frozen=True, slots=True)
class Run:
    """One router, once."""

    workload: str
    minutes: float
    rate: float
    scale: float
    prefill: int
    decode: int
    capacity: int
    block_tokens: int
    renders: bool

    def workers(self, ports: Ports) -> list[str]:
        listening = ["--decode", *map(str, ports.decode)]
        if ports.prefill:
            listening += ["--prefill", *map(str, ports.prefill)]
        more = ["--capacity", str(self.capacity), "--block-tokens", str(self.block_tokens)]
        more += ["--renders"] if self.renders else []
        return [
            sys.executable, "-m", "benchmarks.model_server", *listening, "--scale", str(self.scale), *more
        ]  # fmt: skip

    def measure(self, template: str, ports: Ports, logs: Path, name: str) -> dict[str, float]:
        log = logs / f"{name}.log"
        with running(self.workers(ports), logs / f"{name}.workers.log"):
            until_answering(ports.decode[0], MODEL, logs / f"{name}.workers.log")
            with running(ports.command(template), log) as process:
                until_answering(ports.router, MODEL, log)
                crowd = Crowd(ports.router, self.scale * self.rate)
                before, start = processor_s(process), time.perf_counter()
                lags = uvloop.run(
                    play(
                        workloads.arrivals(self.workload, self.minutes), crowd, crowd.speed, time.perf_counter
                    )
                )
                took = time.perf_counter() - start
                used = processor_s(process) - before
                memory = _memory_mb(process)
                page = f"http://127.0.0.1:{ports.decode[0]}/usage"
                with urllib.request.urlopen(page, timeout=10) as answer:
                    usage = json.load(answer)
        return summarize(crowd.requests, usage["workers"], took, self.scale) | {
            "client_lag_p99_ms": round(1e3 * _at(sorted(lags), 0.99), 2),
            "worker_lag_p99_ms": round(1e3 * _at(sorted(usage["lags"]), 0.99), 2),
            "cpu_us": round(1e6 * used / len(crowd.requests), 1),
            "memory_mb": round(memory, 1),
        }


def summarize(
    requests: Sequence[ReplayedRequest], workers: Sequence[dict[str, Any]], took: float, scale: float
) -> dict[str, float]:
    """Summarize a run. `workers`: their `usage`; `took`: real seconds."""
    good = [one for one in requests if one.ok]
    waits = sorted(one.wait * scale for one in good)
    prefill = [one for one in workers if one["role"] == Role.PREFILL] or workers
    busy = [one["busy_s"] for one in prefill]
    return {
        "requests": len(requests),
        "errors": len(requests) - len(good),
        "ttft_mean_s": round(statistics.fmean(waits), 3),
        "ttft_p50_s": round(_at(waits, 0.5), 3),
        "ttft_p99_s": round(_at(waits, 0.99), 3),
        "within_5_s": round(sum(one <= 5 for one in waits) / len(waits), 3),
        "hit": round(sum(one.cached for one in good) / sum(one.tokens for one in good), 4),
        "fairness": round(fairness(good, scale), 3),
        "busy": round(sum(busy) / len(busy) / took, 3),
        "uneven": round(max(busy) * len(busy) / sum(busy), 3),
    }


def fairness(requests: Sequence[ReplayedRequest], scale: float) -> float:
    """
    Return Jain's index of the slowdown of requests of different lengths: 1 if all are equal.

    The slowdown is relative to an idle worker with an empty cache.
    """
    timing = Timing()
    ordered = sorted(requests, key=lambda one: one.tokens)
    means = []
    for number in range(LENGTHS):
        part = ordered[number * len(ordered) // LENGTHS : (number + 1) * len(ordered) // LENGTHS]
        if part:
            means.append(
                statistics.fmean(one.wait * scale / timing.prefill_s(one.tokens, one.tokens) for one in part)
            )
    return sum(means) ** 2 / (len(means) * sum(one**2 for one in means))


def _at(ordered: Sequence[float], share: float) -> float:
    return ordered[int(share * (len(ordered) - 1))]


def processor_s(root: psutil.Process) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in (root, *root.children(recursive=True)))


def _memory_mb(root: psutil.Process) -> float:
    return float(sum(one.memory_info().rss for one in (root, *root.children(recursive=True)))) / 2**20


def table(results: dict[str, dict[float, list[dict[str, float]]]]) -> str:
    """Means over the repeats."""
    names = list(results)
    lines = [
        "| rate | metric | " + " | ".join([*names, *(f"{names[0]} / {one}" for one in names[1:])]) + " |"
    ]
    lines.append("|---|---|" + "---|" * (2 * len(names) - 1))
    for rate, rounds in results[names[0]].items():
        for key in rounds[0]:
            row = [statistics.fmean(one[key] for one in results[name][rate]) for name in names]
            ratios = [f"{row[0] / other:.2f}" if other else "" for other in row[1:]]
            shown = ratios if key.startswith(("ttft", "hit", "cpu", "memory")) else [""] * len(ratios)
            lines.append(
                f"| {rate:g} | {key} | " + " | ".join([*(f"{one:.4g}" for one in row), *shown]) + " |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--router", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument(
        "--workload", required=True, help=f"a trace, or one of {', '.join(workloads.GENERATED)}"
    )
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="times the workload's own rate")
    parser.add_argument("--scale", type=float, default=20.0)
    parser.add_argument("--prefill", type=int, default=8, help="workers; 0: the decode workers do it all")
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--capacity", type=int, default=2000, help="blocks of each worker")
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument("--renders", action="store_true", help="workers return prompts' tokens, as vLLM's do")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--base-port", type=int, default=21000)
    parser.add_argument("--out", type=Path, default=Path("build/replay"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    routers = dict(one.split("=", 1) for one in options.router)
    results: dict[str, dict[float, list[dict[str, float]]]] = {name: {} for name in routers}
    numbers = iter(range(1000))
    for _ in range(options.repeats):
        for rate in options.rates:
            for name, template in routers.items():
                ports = Ports.of(options.base_port + 40 * next(numbers), options.prefill, options.decode)
                run = Run(
                    options.workload, options.minutes, rate, options.scale, options.prefill, options.decode,
                    options.capacity, options.block_tokens, options.renders,
                )  # fmt: skip
                measured = run.measure(template, ports, options.out, name)
                results[name].setdefault(rate, []).append(measured)
                print(json.dumps({"router": name, "rate": rate, **measured}), file=sys.stderr, flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
