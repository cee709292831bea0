"""
Serves the same prompts from several servers in one run, and prints them side by side.

    python -m benchmarks.serving --model FOLDER \\
        --server 'baton=baton serve {model} --port {port}' \\
        --server 'vllm=vllm serve {model} --port {port}'

Any OpenAI-compatible server is a peer. Each is started in turn on 127.0.0.1, measured, and stopped.
Prompts are random token ids, new each time, so that no prefix cache helps. A case is
STREAMS:PROMPT:OUTPUT: this number of streams starts at once with PROMPT random tokens in and OUTPUT out. With
`+BIG`, a prompt of BIG tokens arrives once all streams are generating, and its influence on them is measured.

Every number is the median of the repeats, after one that is not counted. Ratios refer to the first server.
The memory of a server's processes, with the pages of files that they map, is read after the last case.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shlex
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from baton_cli.bench.connection import Answer, Connection
from baton_cli.bench.load import events

START_LIMIT_S = 300
SETTLE_S = 1.0
"""Quiet time between the streams' first tokens and the big prompt, and after its answer."""


@dataclass(frozen=True, slots=True)
class Case:
    """So many streams of so many tokens in and out, and perhaps a big prompt among them."""

    streams: int
    prompt: int
    output: int
    big: int = 0

    @classmethod
    def parse(cls, text: str) -> Case:
        """
        >>> Case.parse("8:64:1500+4096")
        Case(streams=8, prompt=64, output=1500, big=4096)
        """
        shape, _, big = text.partition("+")
        streams, prompt, output = (int(number) for number in shape.split(":"))
        return cls(streams, prompt, output, int(big or 0))

    def __str__(self) -> str:
        return f"{self.streams}:{self.prompt}:{self.output}" + (f"+{self.big}" if self.big else "")


@dataclass(slots=True)
class Stream:
    """One streamed completion: `baton bench`'s connection keeps arrival times and bytes; parsing waits."""

    connection: Connection
    task: asyncio.Task[Answer]

    @property
    def sent(self) -> float:
        return self.connection.answer.sent

    @property
    def ended(self) -> bool:
        return self.task.done()

    async def begun(self) -> None:
        """A first token has come, or none will."""
        await self.connection.begun.wait()

    async def whole(self) -> None:
        await asyncio.wait([self.task])

    def finish(self) -> None:
        self.connection.close()

    def token_times(self) -> list[float]:
        """When each event with a token came; a closing event without text is not one."""
        answer = self.connection.answer
        if answer.status != 200:
            raise SystemExit(f"status {answer.status}: {answer.body[:500]!r}")
        times: list[float] = []
        for moment, data in events(answer):
            if not data.startswith(b"{"):
                continue
            choices = json.loads(data).get("choices")
            if choices and (choices[0].get("text") or not choices[0].get("finish_reason")):
                times.append(moment)
        return times


@dataclass(frozen=True, slots=True)
class Target:
    """A running server."""

    port: int
    model: str
    vocabulary: int

    async def stream(self, prompt: int, output: int) -> Stream:
        body = json.dumps(
            {
                "model": self.model,
                "prompt": [random.randrange(300, self.vocabulary) for _ in range(prompt)],
                "max_tokens": output,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(Connection, "127.0.0.1", self.port)
        stream = Stream(connection, loop.create_task(connection.ask(head.encode() + body)))
        await asyncio.sleep(0)  # now it is sent
        return stream


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 2)


async def _throughput(target: Target, case: Case) -> dict[str, float]:
    streams = [await target.stream(case.prompt, case.output) for _ in range(case.streams)]
    await asyncio.gather(*(stream.whole() for stream in streams))
    times = [stream.token_times() for stream in streams]
    begun, all_decode, first_ends = (
        streams[0].sent,
        max(each[0] for each in times),
        min(each[-1] for each in times),
    )
    numbers = {
        "ttft_ms": _milliseconds(
            statistics.median(each[0] - stream.sent for each, stream in zip(times, streams, strict=True))
        ),
        "prefill_tok_s": round(case.streams * case.prompt / (all_decode - begun), 1),
    }
    if first_ends > all_decode:
        # Under load an event may have several tokens, and every stream has as many.
        while_all = sum(
            sum(all_decode < moment <= first_ends for moment in each) * case.output / len(each)
            for each in times
        )
        numbers["decode_tok_s"] = round(while_all / (first_ends - all_decode), 1)
    return numbers


async def _interference(target: Target, case: Case) -> dict[str, float]:
    streams = [await target.stream(case.prompt, case.output) for _ in range(case.streams)]
    await asyncio.gather(*(stream.begun() for stream in streams))
    await asyncio.sleep(SETTLE_S)
    big = await target.stream(case.big, 1)
    await big.whole()
    await asyncio.sleep(SETTLE_S)
    if any(stream.ended for stream in streams):
        raise SystemExit(f"case {case}: a stream ended before the big prompt was answered; use more OUTPUT")
    for stream in streams:
        stream.finish()
    times = [stream.token_times() for stream in streams]
    begun, answered = big.sent, big.token_times()[0]
    gaps = [(a, b) for each in times for a, b in itertools.pairwise(each)]
    settled = max(each[0] for each in times)
    before = [b - a for a, b in gaps if a >= settled and b <= begun]
    during = [b - a for a, b in gaps if b > begun and a < answered]

    def rate(start: float, end: float) -> float:
        return sum(start < moment <= end for each in times for moment in each) / (end - start)

    return {
        "big_ttft_ms": _milliseconds(answered - begun),
        "gap_before_ms": _milliseconds(max(before)),
        "gap_during_ms": _milliseconds(max(during)),
        "tok_s_before": round(rate(settled, begun), 1),
        "tok_s_during": round(rate(begun, answered), 1),
    }


async def measure(target: Target, case: Case, repeats: int) -> dict[str, float]:
    """Return the medians of a case's numbers over `repeats`, after one run that is not counted."""
    run = _interference if case.big else _throughput
    rounds: list[dict[str, float]] = []
    for _ in range(repeats + 1):
        rounds.append(await run(target, case))
        await asyncio.sleep(SETTLE_S)
    return {name: statistics.median(r[name] for r in rounds[1:]) for name in rounds[0]}


@contextmanager
def running(command: str, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server of `command` as a process group of its own, from answering to ended."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            shlex.split(command), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            _await_health(process, port, log)
            yield process
        finally:
            end(process, signal.SIGINT)


def end(process: subprocess.Popen[bytes], asking: signal.Signals, timeout_s: float = 30) -> None:
    """End the group that `process` leads: by `asking` first, and then without asking."""
    for number in (asking, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(timeout_s)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def _await_health(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    for _ in range(START_LIMIT_S * 2):
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}; its log is {log}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(0.5)
    raise SystemExit(f"the server did not answer within {START_LIMIT_S} s; its log is {log}")


def memory_of(root: psutil.Process) -> int:
    """
    Bytes of memory of a process and all that descend from it, whatever their groups are.

    A page that several processes map is divided among them (PSS). Only Linux reports it.
    """
    total = 0
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # it has ended
            total += process.memory_full_info().pss
    return total


def served_name(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Return a table: rows are cases and numbers, columns are servers and ratios to the first one."""
    servers = list(results)
    first, others = servers[0], servers[1:]
    lines = [
        "| case | figure | " + " | ".join([*servers, *(f"{first} / {other}" for other in others)]) + " |",
        "|---|---|" + "---|" * (len(servers) + len(others)),
    ]
    for case, numbers in results[first].items():
        for figure, value in numbers.items():
            row = [results[server].get(case, {}).get(figure) for server in servers]
            ratios = [f"{value / other:.2f}" if other else "" for other in row[1:]]
            cells = ["" if cell is None else f"{cell:g}" for cell in row]
            lines.append(f"| {case} | {figure} | " + " | ".join([*cells, *ratios]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder that every server takes")
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument(
        "--cases",
        default="1:64:64,8:64:64,32:64:64,1:1024:1,1:4096:1,8:64:1500+1024,8:64:1500+4096",
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--port", type=int, default=8330)
    parser.add_argument("--vocabulary", type=int, default=8000, help="random ids are below this")
    parser.add_argument("--out", type=Path, default=Path("build/serving"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for server in options.server:
        name, _, command = server.partition("=")
        results[name] = {}
        random.seed(1)  # all servers get the same prompts: whether a token has text depends on them
        filled = command.format(model=options.model, port=options.port)
        with running(filled, options.port, options.out / f"{name.replace(' ', '-')}.log") as process:
            target = Target(options.port, served_name(options.port), options.vocabulary)
            for text in options.cases.split(","):
                case = Case.parse(text)
                numbers = asyncio.run(measure(target, case, options.repeats))
                results[name][text] = numbers
                print(f"{name} {case} {json.dumps(numbers)}", file=sys.stderr, flush=True)
            results[name]["at the end"] = {"memory_mb": round(memory_of(psutil.Process(process.pid)) / 1e6)}
        (options.out / "results.json").write_text(json.dumps(results, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
