"""
Cost of metrics, logs and traces for a router: processor time per request and throughput.

    python -m benchmarks.observing --rounds 7

One router for each variant runs all the time, on core 0, before the mock workers of `benchmarks.router`,
which share core 1 with the clients. Each round measures one after the other, so that other work of the
machine affects all of them alike. Ratios refer to the variant that it extends, in the same round:

    bare      the same router without counters, only for comparison
    metrics   the default; the cost of a page of metrics is measured separately
    logs      metrics, and a line for each request (`--log-requests`)
    sampled   metrics, and spans of one request in a hundred, as is usual
    traced    metrics, and spans of every request
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import socket
import socketserver
import statistics
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import uvloop

from benchmarks import mock_worker, router_load
from benchmarks.router import COMMANDS, OTHER_CORE, WARM_S, command, running

PORT = 31950
PAGES = 50
CASE = "short", 1
"""Prompts, and tokens of each answer, which is a stream."""

COLUMNS = ("cpu_us", "per_s")
BEFORE = {"metrics": "bare", "logs": "metrics", "sampled": "metrics", "traced": "metrics"}

BARE = """
import sys
from baton_api.metrics import counters
for name, nothing in (("LabeledCounter", ("add", "more")), ("LabeledHistogram", ("observe",))):
    for one in nothing:
        setattr(getattr(counters, name), one, lambda self, *ignored: None)
from baton_cli.main import main
sys.argv = ["baton", *sys.argv[1:]]
main()
"""


class _Sink(socketserver.StreamRequestHandler):
    """Takes whatever is posted."""

    def handle(self) -> None:
        while line := self.rfile.readline():
            length = 0
            while line.strip():
                name, _, value = line.decode().partition(":")
                if name.lower() == "content-length":
                    length = int(value)
                line = self.rfile.readline()
            self.rfile.read(length)
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")


def _sink(server: socket.socket) -> None:
    os.sched_setaffinity(0, {OTHER_CORE})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Sink, bind_and_activate=False) as serving:
        serving.socket = server
        serving.serve_forever()


@contextlib.contextmanager
def collecting() -> Iterator[str]:
    """A collector in a process of its own, and its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = multiprocessing.get_context("fork").Process(target=_sink, args=(server,), daemon=True)
        process.start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            process.terminate()
            process.join()


def ways(collector: str) -> dict[str, list[str]]:
    """The command of each router."""
    commands = {}
    for number, (name, flags) in enumerate(
        {
            "bare": [],
            "metrics": [],
            "logs": ["--log-requests", "--log-format=json"],
            "sampled": [f"--tracing-endpoint={collector}", "--tracing-ratio=0.01"],
            "traced": [f"--tracing-endpoint={collector}"],
        }.items()
    ):
        words = command(COMMANDS["baton"]["pd"], PORT + number)
        if name == "bare":
            words[1:3] = ["-c", BARE]
        commands[name] = [*words, *flags]
    return commands


def page_ms(process: psutil.Process, port: int) -> float:
    """Milliseconds of processor time for one page of metrics."""
    before = sum(process.cpu_times()[:2])
    for _ in range(PAGES):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            page.read()
    return float(1e3 * (sum(process.cpu_times()[:2]) - before) / PAGES)


def measure(process: psutil.Process, port: int, seconds: float, clients: int) -> dict[str, float]:
    requests = router_load.requests(*CASE)
    before = sum(process.cpu_times()[:2])
    waits, errors = uvloop.run(router_load.load([port], clients, seconds, requests, CASE[1]))
    used = sum(process.cpu_times()[:2]) - before
    assert not errors, f"{errors} requests went wrong"
    return {"cpu_us": 1e6 * used / len(waits), "per_s": len(waits) / seconds}


def table(rounds: Sequence[dict[str, dict[str, float]]]) -> str:
    lines = ["| way | us of CPU a request | to | requests/s | to |", "|---|---|---|---|---|"]
    for name in rounds[0]:
        cells = [name]
        for figure in COLUMNS:
            cells.append(f"{statistics.median(one[name][figure] for one in rounds):.4g}")
            before = BEFORE.get(name)
            ratios = [one[name][figure] / one[before][figure] for one in rounds] if before else []
            cells.append(f"{statistics.median(ratios):.3f} of {before}" if ratios else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("build/observing"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    mocks = mock_worker.started(OTHER_CORE)
    os.sched_setaffinity(0, {OTHER_CORE})
    rounds: list[dict[str, dict[str, float]]] = []
    try:
        with collecting() as collector, contextlib.ExitStack() as stack:
            routers = {
                name: stack.enter_context(running(words, PORT + number, options.out / f"{name}.log"))
                for number, (name, words) in enumerate(ways(collector).items())
            }
            for number, process in enumerate(routers.values()):
                measure(process, PORT + number, WARM_S, options.clients)
            for _ in range(options.rounds):
                measured = {}
                for number, (name, process) in enumerate(routers.items()):
                    measured[name] = measure(process, PORT + number, options.seconds, options.clients)
                rounds.append(measured)
                print(json.dumps(measured), file=sys.stderr, flush=True)
            page = page_ms(routers["metrics"], PORT + list(routers).index("metrics"))
    finally:
        mocks.terminate()
    print(table(rounds))
    print(f"One page of metrics: {page:.1f} ms of CPU")
    print(f"load {os.getloadavg()[0]:.1f}, {options.rounds} rounds of {options.seconds:g} s")


if __name__ == "__main__":
    main()
