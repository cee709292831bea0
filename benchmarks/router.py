"""
Cost of routers, side by side: processor time per request and time added to the first byte.

    python -m benchmarks.router --peers /path/to/venv --routers baton,sglang,vllm
    python -m benchmarks.router --open-streams 9000

Each router is started in turn on core 0, before four mock workers whose prompts take no time. Workers and
clients share core 1. A case is MODE:PROMPT:ANSWER:

- MODE: `pd` has two prefill and two decode workers, `plain` has four that do both. With `openai`, Baton does
  not know these four for its own; for peers it is the same as `plain`.
- PROMPT: `short` or `long` (33 KB), or `kept` or `stateless` requests to /v1/responses, whose answers are
  whole.
- ANSWER: `whole`, or the number of tokens of a stream. Each token comes in a write of its own, with 5 ms
  between two tokens of a stream (`benchmarks.mock_worker`).

Processor time is that of all the router's processes, with 64 clients in a closed loop, for each answer. That
of the busiest process bounds the answers per second where each process has a core. The time of a long answer
beyond that of one token is given for each further token, too. The time added to the first byte is that of one
client, less its waiting time without the router. Peers run their best policy, `cache_aware`.
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
        "openai": "{python} -m baton_cli.main router --port {port} --engine openai {plain:--worker=}",
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
for peer in ("sglang", "vllm"):
    COMMANDS[peer]["openai"] = COMMANDS[peer]["plain"]
CASES = ",".join(
    f"{mode}:short:{answer}" for mode in ("pd", "plain", "openai") for answer in ("whole", 1, 50, 300)
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


def _processor_s(root: psutil.Process) -> dict[int, float]:
    """Processor seconds of each process."""
    return {one.pid: sum(one.cpu_times()[:2]) for one in (root, *root.children(recursive=True))}


def _memory_mb(root: psutil.Process) -> float:
    return float(sum(one.memory_info().rss for one in (root, *root.children(recursive=True)))) / 2**20


def _percentile(values: Sequence[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def answer_tokens(case: str) -> int:
    """
    Tokens of the case's answers; 0 if they are whole.

    >>> answer_tokens("pd:short:300"), answer_tokens("pd:short:whole")
    (300, 0)
    """
    answer = case.rpartition(":")[2]
    return 0 if answer == "whole" else int(answer)


def single_client(
    ports: Sequence[int], requests: Sequence[bytes], tokens: int, quick: bool = False
) -> tuple[float, float]:
    """Median and 99th percentile of one client's waits, in milliseconds."""
    waits, _ = uvloop.run(router_load.load(ports, 1, SINGLE_CLIENT_S, requests, tokens, quick))
    return 1e3 * statistics.median(waits), 1e3 * _percentile(waits, 0.99)


def measure(process: psutil.Process, port: int, case: str, clients: int, seconds: float) -> Measurements:
    mode, prompt, _ = case.split(":")
    tokens = answer_tokens(case)
    uvloop.run(router_load.load([port], clients, WARM_S, router_load.requests(prompt, min(tokens, 1))))
    requests = router_load.requests(prompt, tokens)
    before = _processor_s(process)
    waits, errors = uvloop.run(router_load.load([port], clients, seconds, requests, tokens))
    used = [seconds - before.get(pid, 0.0) for pid, seconds in _processor_s(process).items()]
    measured = {
        "cpu_us": round(1e6 * sum(used) / len(waits), 1),
        "busiest_us": round(1e6 * max(used) / len(waits), 1),
        "per_s": round(len(waits) / seconds),
        "first_byte_p50_ms": round(1e3 * statistics.median(waits), 2),
        "first_byte_p99_ms": round(1e3 * _percentile(waits, 0.99), 2),
        "errors": errors,
        "memory_mb": round(_memory_mb(process), 1),
    }
    if tokens > 1:
        return measured
    direct = single_client((DECODE_PORTS if mode == "pd" else PLAIN_PORTS)[:1], requests, tokens)
    added, quick = (single_client([port], requests, tokens, quick) for quick in (False, True))
    return {
        **measured,
        "added_p50_ms": round(added[0] - direct[0], 2),
        "added_p99_ms": round(added[1] - direct[1], 2),
        "added_p50_quickack_ms": round(quick[0] - direct[0], 2),
    }


def note_token_costs(measured: dict[str, Measurements]) -> None:
    """Add to long answers the cost of each token beyond the first, in µs, by the case of one token."""
    for case, costs in measured.items():
        tokens, short = answer_tokens(case), measured.get(f"{case.rpartition(':')[0]}:1")
        if tokens > 1 and short is not None:
            costs["token_us"] = round((costs["cpu_us"] - short["cpu_us"]) / (tokens - 1), 2)


def table(results: dict[str, dict[str, list[Measurements]]]) -> str:
    """The medians over the repeats, and how the first router's processor time is to each other one's."""
    names = list(results)
    ratios = [f"{names[0]} / {name}" for name in names[1:]]
    lines = [f"| case | figure | {' | '.join([*names, *ratios])} |"]
    lines.append("|---|---|" + "---|" * (len(names) + len(ratios)))
    for case, rounds in results[names[0]].items():
        for key in rounds[0]:
            row = [statistics.median(one[key] for one in results[name][case]) for name in names]
            compared = key in ("cpu_us", "token_us", "first_byte_p99_ms") and all(row)
            cells = [f"{cell:g}" for cell in row]
            cells += [f"{row[0] / peer:.2f}" if compared else "" for peer in row[1:]]
            lines.append(f"| {case} | {key} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compare(options: argparse.Namespace) -> None:
    results: dict[str, dict[str, list[Measurements]]] = {name: {} for name in options.routers.split(",")}
    cases = options.cases.split(",")
    peers = str(options.peers / "bin" / "python")
    for repeat in range(options.repeats):
        for place, mode in enumerate(dict.fromkeys(case.partition(":")[0] for case in cases)):
            for number, name in enumerate(results):
                port = 31000 + 10 * number + 300 * repeat + 100 * place
                words = command(options.command.get((name, mode)) or COMMANDS[name][mode], port, peers)
                with running(words, port, options.out / f"{name}-{mode}.log") as process:
                    measured = {
                        case: measure(process, port, case, options.clients, options.seconds)
                        for case in cases
                        if case.startswith(mode)
                    }
                note_token_costs(measured)
                for case, costs in measured.items():
                    results[name].setdefault(case, []).append(costs)
                    print(f"{name} {case} {json.dumps(costs)}", file=sys.stderr, flush=True)
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
    parser.add_argument("--seconds", type=float, default=3.0)
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
