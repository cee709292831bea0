"""
Cost of routers, side by side: processor time per request and time added to the first byte.

    python -m benchmarks.router --peers /path/to/venv --routers baton,sglang,vllm
    python -m benchmarks.router --open-streams 9000

Each router is started in turn on core 0, before four mock workers that answer at once. Workers and clients
share core 1. A case is MODE:PROMPT:ANSWER:

- MODE: `pd` has two prefill and two decode workers, `plain` has four that do both.
- PROMPT: `short` or `long` (33 KB), or `kept` or `stateless` requests to /v1/responses, whose answers are
  whole.
- ANSWER: `stream` or `whole`.

Processor time is that of all the router's processes, with 64 clients in a closed loop. The time added to the
first byte is that of one client, less its waiting time without the router. Peers run their best policy,
`cache_aware`.
Runs are interleaved, as machines are noisy. `--peers` is an environment with sglang-router and vllm-router.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import uvloop

from benchmarks import mock_worker, router_load
from benchmarks.answering import until_answering
from benchmarks.mock_worker import DECODE_PORTS, PLAIN_PORTS, PREFILL_PORTS
from benchmarks.serving import end

ROUTER_CORE, OTHER_CORE = 0, 1
WARM_S = 3.0
"""Until every worker has seen every beginning, and what it takes is known."""

SINGLE_CLIENT_S = 1.0
"""Of one client by itself, for the time to its first bytes."""

OPENING_AT_ONCE = 200
"""Streams that are being opened at a time."""

COMMANDS = {
    "baton": {
        "pd": "{python} -m baton_cli.main router --port {port} {decode:--decode=} {prefill:--prefill=}",
        "plain": "{python} -m baton_cli.main router --port {port} {plain:--decode=}",
    },
    "sglang": {
        "pd": "{peers} -m sglang_router.launch_router --host 127.0.0.1 --port {port} --policy cache_aware "
        "--log-level error --pd-disaggregation {prefill:--prefill=} {decode:--decode=}",
        "plain": "{peers} -m sglang_router.launch_router --host 127.0.0.1 --port {port} --policy cache_aware "
        "--log-level error --worker-urls {plain:}",
    },
    "vllm": {
        "pd": "{peers} -m vllm_router.launch_router --host 127.0.0.1 --port {port} --policy cache_aware "
        "--log-level error --vllm-pd-disaggregation {prefill:--prefill=} {decode:--decode=}",
        "plain": "{peers} -m vllm_router.launch_router --host 127.0.0.1 --port {port} --policy cache_aware "
        "--log-level error --worker-urls {plain:}",
    },
}
CASES = ",".join(
    f"{mode}:{prompt}:{answer}"
    for mode in ("pd", "plain")
    for prompt in ("short", "long")
    for answer in ("whole", "stream")
)

Measurements = dict[str, float]


def command(template: str, port: int, peers: str = "python") -> list[str]:
    """
    >>> command("r {port} {decode:-d }", 5)
    ['r', '5', '-d', 'http://127.0.0.1:9103', '-d', 'http://127.0.0.1:9104']
    """
    ports = {"prefill": PREFILL_PORTS, "decode": DECODE_PORTS, "plain": PLAIN_PORTS}

    def each(match: re.Match[str]) -> str:
        return " ".join(f"{match[2]}http://127.0.0.1:{one}" for one in ports[match[1]])

    text = re.sub(r"\{(prefill|decode|plain):([^}]*)\}", each, template)
    for name, value in {"port": port, "python": sys.executable, "peers": peers}.items():
        text = text.replace(f"{{{name}}}", str(value))
    return shlex.split(text)


@contextmanager
def running(words: Sequence[str], port: int, log: Path) -> Iterator[psutil.Process]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", str(ROUTER_CORE), *words],
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        until_answering(port, "m", log)
        yield psutil.Process(process.pid)
    finally:
        end(process, signal.SIGTERM, timeout_s=5)


def _processor_s(root: psutil.Process) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in (root, *root.children(recursive=True)))


def _memory_mb(root: psutil.Process) -> float:
    return float(sum(one.memory_info().rss for one in (root, *root.children(recursive=True)))) / 2**20


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def single_client(
    ports: Sequence[int], requests: Sequence[bytes], quick: bool = False
) -> tuple[float, float]:
    """Median and 99th percentile of one client's waits, in milliseconds."""
    waits, _ = uvloop.run(router_load.load(ports, 1, SINGLE_CLIENT_S, requests, quick))
    return 1e3 * statistics.median(waits), 1e3 * _percentile(waits, 0.99)


def measure(process: psutil.Process, port: int, case: str, clients: int, seconds: float) -> Measurements:
    mode, prompt, answer = case.split(":")
    requests = router_load.requests(prompt, answer == "stream")
    uvloop.run(router_load.load([port], clients, WARM_S, requests))
    before = _processor_s(process)
    waits, errors = uvloop.run(router_load.load([port], clients, seconds, requests))
    used = _processor_s(process) - before
    direct = single_client(PLAIN_PORTS[:1] if mode == "plain" else DECODE_PORTS[:1], requests)
    added, quick = single_client([port], requests), single_client([port], requests, quick=True)
    return {
        "cpu_us": round(1e6 * used / len(waits), 1),
        "per_s": round(len(waits) / seconds),
        "first_byte_p50_ms": round(1e3 * statistics.median(waits), 2),
        "first_byte_p99_ms": round(1e3 * _percentile(waits, 0.99), 2),
        "added_p50_ms": round(added[0] - direct[0], 2),
        "added_p99_ms": round(added[1] - direct[1], 2),
        "added_p50_quickack_ms": round(quick[0] - direct[0], 2),
        "errors": errors,
        "memory_mb": round(_memory_mb(process), 1),
    }


def table(results: dict[str, dict[str, list[Measurements]]]) -> str:
    """The medians over the repeats, and how the first router's processor time is to the best other one's."""
    names = list(results)
    lines = [f"| case | figure | {' | '.join(names)} | to the better peer |"]
    lines.append("|---|---|" + "---|" * (len(names) + 1))
    for case, rounds in results[names[0]].items():
        for key in rounds[0]:
            row = [
                statistics.median(one[key] for one in results[name][case]) if case in results[name] else None
                for name in names
            ]
            peers = [cell for cell in row[1:] if cell]
            ratio = f"{(row[0] or 0) / min(peers):.2f}" if peers and key == "cpu_us" else ""
            cells = ["" if cell is None else f"{cell:g}" for cell in row]
            lines.append(f"| {case} | {key} | " + " | ".join([*cells, ratio]) + " |")
    return "\n".join(lines)


def compare(options: argparse.Namespace) -> None:
    results: dict[str, dict[str, list[Measurements]]] = {name: {} for name in options.routers.split(",")}
    cases = options.cases.split(",")
    peers = str(options.peers / "bin" / "python")
    for repeat in range(options.repeats):
        for mode in sorted({case.partition(":")[0] for case in cases}):
            for number, name in enumerate(results):
                port = 31000 + 10 * number + 200 * repeat + 100 * (mode == "plain")
                words = command(options.command.get((name, mode)) or COMMANDS[name][mode], port, peers)
                with running(words, port, options.out / f"{name}-{mode}.log") as process:
                    for case in (one for one in cases if one.startswith(mode)):
                        measured = measure(process, port, case, options.clients, options.seconds)
                        results[name].setdefault(case, []).append(measured)
                        print(f"{name} {case} {json.dumps(measured)}", file=sys.stderr, flush=True)
    print(table(results))


async def _hold(port: int, count: int, process: psutil.Process) -> str:
    """Open so many streams, look at the router's memory, and let all of them come to their end."""
    loop = asyncio.get_running_loop()
    before = _memory_mb(process)
    streams = [
        router_load.Listener(
            router_load.request([{"role": "user", "content": f"stream {number}"}], stream=True, hold=True)
        )
        for number in range(count)
    ]
    for first in range(0, count, OPENING_AT_ONCE):
        some = streams[first : first + OPENING_AT_ONCE]
        for stream in some:
            await loop.create_connection(lambda one=stream: one, "127.0.0.1", port)  # type: ignore[misc]
        await asyncio.wait_for(asyncio.gather(*(stream.begun.wait() for stream in some)), 60)
    held = _memory_mb(process)
    for worker in DECODE_PORTS:
        url = f"http://127.0.0.1:{worker}/release"
        await asyncio.to_thread(lambda url=url: urllib.request.urlopen(url, timeout=10).close())  # type: ignore[misc]
    await asyncio.wait_for(asyncio.gather(*(stream.ended.wait() for stream in streams)), 120)
    whole = sum(stream.whole for stream in streams)
    each = 1024 * (held - before) / count
    return (
        f"{count} open streams: {whole} came to their end; "
        f"memory {before:.0f} MB before, {held:.0f} MB with them: {each:.1f} KiB for each"
    )


def hold(options: argparse.Namespace) -> None:
    port = 31900
    mock_worker.more_files()
    with running(command(COMMANDS["baton"]["pd"], port), port, options.out / "streams.log") as process:
        print(uvloop.run(_hold(port, options.open_streams, process)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--routers", default="baton", help="of baton, sglang and vllm")
    parser.add_argument("--peers", type=Path, default=Path(sys.prefix))
    parser.add_argument("--router", action="append", default=[], metavar="NAME:MODE=COMMAND")
    parser.add_argument("--cases", default=CASES)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--open-streams", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("build/router"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.command = {}
    for one in options.router:
        key, _, words = one.partition("=")
        options.command[tuple(key.split(":"))] = words
    mocks = mock_worker.started(OTHER_CORE)
    os.sched_setaffinity(0, {OTHER_CORE})
    try:
        if options.open_streams:
            hold(options)
        else:
            compare(options)
    finally:
        mocks.terminate()


if __name__ == "__main__":
    main()
