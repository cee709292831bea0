"""
Serves the same prompts from several servers in one run, and prints them side by side.

    python benchmarks/serving.py --model FOLDER \\
        --server 'baton=baton serve {model} --port {port}' \\
        --server 'vllm=vllm serve {model} --port {port}'

Any OpenAI-compatible server is a peer. Each is started in turn on 127.0.0.1, measured, and stopped.
Prompts are random token ids, new each time, so that no prefix cache helps. A case is
STREAMS:PROMPT:OUTPUT: so many streams start at once with PROMPT random tokens in and OUTPUT out; with
`+BIG`, a prompt of BIG tokens arrives once all streams are generating: what do they feel of it?

Every figure is the median of the repeats, after one that is not counted. The first server named is
the one that ratios refer to.
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
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httptools

START_LIMIT_S = 300
SETTLE_S = 0.3
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
class Stream(asyncio.Protocol):
    """One streamed completion. It keeps arrival times and raw bytes; parsing waits for the end."""

    host: str
    port: int
    request: bytes
    sent: float = 0.0
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)
    first: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str = ""
    parser: httptools.HttpResponseParser | None = None
    transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.parser = httptools.HttpResponseParser(self)
        self.sent = time.perf_counter()
        transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        assert self.parser is not None
        self.parser.feed_data(data)

    def on_headers_complete(self) -> None:
        assert self.parser is not None
        if (status := self.parser.get_status_code()) != 200:
            self.failure = f"status {status}"

    def on_body(self, body: bytes) -> None:
        self.arrivals.append((time.perf_counter(), body))
        if b'"choices"' in body:
            self.first.set()

    def on_message_complete(self) -> None:
        self.finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self.finish()

    def finish(self) -> None:
        if self.transport is not None:
            self.transport.close()
        self.first.set()
        self.ended.set()

    def token_times(self) -> list[float]:
        """When each event with a token came; a closing event without text is not one."""
        if self.failure:
            raise SystemExit(f"{self.failure}: {b''.join(body for _, body in self.arrivals)[:500]!r}")
        times: list[float] = []
        for moment, body in self.arrivals:
            for line in body.split(b"\n"):
                if not line.startswith(b"data: {"):
                    continue
                choices = json.loads(line[6:]).get("choices")
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
        stream = Stream("127.0.0.1", self.port, head.encode() + body)
        await asyncio.get_running_loop().create_connection(lambda: stream, "127.0.0.1", self.port)
        return stream


def _milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 2)


async def _throughput(target: Target, case: Case) -> dict[str, float]:
    streams = [await target.stream(case.prompt, case.output) for _ in range(case.streams)]
    await asyncio.gather(*(stream.ended.wait() for stream in streams))
    times = [stream.token_times() for stream in streams]
    begun, all_decode, first_ends = (
        streams[0].sent,
        max(each[0] for each in times),
        min(each[-1] for each in times),
    )
    figures = {
        "ttft_ms": _milliseconds(
            statistics.median(each[0] - stream.sent for each, stream in zip(times, streams, strict=True))
        ),
        "prefill_tok_s": round(case.streams * case.prompt / (all_decode - begun), 1),
    }
    if first_ends > all_decode:
        while_all = sum(all_decode < moment <= first_ends for each in times for moment in each)
        figures["decode_tok_s"] = round(while_all / (first_ends - all_decode), 1)
    return figures


async def _interference(target: Target, case: Case) -> dict[str, float]:
    streams = [await target.stream(case.prompt, case.output) for _ in range(case.streams)]
    await asyncio.gather(*(stream.first.wait() for stream in streams))
    await asyncio.sleep(SETTLE_S)
    big = await target.stream(case.big, 1)
    await big.ended.wait()
    await asyncio.sleep(SETTLE_S)
    if any(stream.ended.is_set() for stream in streams):
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
    """The medians of a case's figures over `repeats`, after one run that is not counted."""
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


def end(process: subprocess.Popen[bytes], asking: signal.Signals, patience_s: float = 30) -> None:
    """End the group that `process` leads: by `asking` first, and then without asking."""
    for number in (asking, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(patience_s)
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


def served_name(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=10) as answer:
        return str(json.load(answer)["data"][0]["id"])


def table(results: dict[str, dict[str, dict[str, float]]]) -> str:
    """Rows are cases and figures, columns are servers, and how the first compares to each other one."""
    servers = list(results)
    first, others = servers[0], servers[1:]
    lines = [
        "| case | figure | " + " | ".join([*servers, *(f"{first} / {other}" for other in others)]) + " |",
        "|---|---|" + "---|" * (len(servers) + len(others)),
    ]
    for case, figures in results[first].items():
        for figure, value in figures.items():
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
        filled = command.format(model=options.model, port=options.port)
        with running(filled, options.port, options.out / f"{name.replace(' ', '-')}.log"):
            target = Target(options.port, served_name(options.port), options.vocabulary)
            for text in options.cases.split(","):
                case = Case.parse(text)
                figures = asyncio.run(measure(target, case, options.repeats))
                results[name][text] = figures
                print(f"{name} {case} {json.dumps(figures)}", file=sys.stderr, flush=True)
        (options.out / "results.json").write_text(json.dumps(results, indent=1))
    print(table(results))


if __name__ == "__main__":
    main()
