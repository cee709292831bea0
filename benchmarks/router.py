"""
What routers cost, side by side: processor time per request and time added to the first byte.

    python -m benchmarks.router \\
        --router 'baton=baton router --port {port} {decode:--decode=} {prefill:--prefill=}' \\
        --router 'sglang=sglang-router launch ... --port {port}'

Each router is started in turn on core 0, before four mock workers (two prefill, two decode) that answer at
once; workers and clients share core 1. `{decode:FLAG}` becomes FLAGurl for each decode worker, likewise
`{prefill:FLAG}`. A case is BODY:MODE: `short` or `long` (33 KB) prompts, `stream` or `whole` answers.
Processor time is that of all the router's processes; runs are interleaved, because machines are noisy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import shlex
import signal
import statistics
import string
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import Process
from pathlib import Path
from typing import cast

import httptools
import psutil
import uvloop

from benchmarks.serving import end

ROUTER_CORE, OTHER_CORE = 0, 1
PREFILL_PORTS, DECODE_PORTS = (9101, 9102), (9103, 9104)
EVENTS = 8
"""Of a streamed answer; they come all at once."""

WARM_S = 1.0
START_LIMIT_S = 60.0


def _answer(status: bytes, kind: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, kind, len(body)) + body


def _chunked(parts: Sequence[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (*parts, b""))


_CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
_EVENT = {**_CHUNK, "choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": None}]}
STREAMED = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    + _chunked([b"data: " + json.dumps(_EVENT).encode() + b"\n\n"] * EVENTS + [b"data: [DONE]\n\n"])
)
WHOLE = _answer(
    b"200 OK",
    b"application/json",
    json.dumps(
        {
            "id": "c", "object": "chat.completion", "created": 1, "model": "m",
            "choices": [
                {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
            ],
            "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12},
            "kv_transfer_params": {"remote_block_ids": [1], "remote_engine_id": "e", "remote_port": 1,
                                   "remote_host": "127.0.0.1", "do_remote_prefill": True,
                                   "do_remote_decode": False},
        }
    ).encode(),
)  # fmt: skip


class MockWorker(asyncio.Protocol):
    """Answers what any of the routers asks a worker, at once."""

    def __init__(self, role: str, port: int) -> None:
        load = {
            "role": role,
            "model": "m",
            "total_blocks": 100_000,
            "free_blocks": 100_000,
            "compatibility": "c",
            "epoch": "1",
            "control": f"127.0.0.1:{port}" if role == "prefill" else "",
        }
        about = {
            "model_path": "/none",
            "tokenizer_path": "/none",
            "is_generation": True,
            "served_model_name": "m",
            "model_id": "m",
            "version": "0",
            "internal_states": [{}],
            "dp_size": 1,
            "tp_size": 1,
        }
        model = {"id": "m", "object": "model", "created": 1, "owned_by": "x", "max_model_len": 131072}
        self._pages = {
            b"/load": _answer(b"200 OK", b"application/json", json.dumps(load).encode()),
            b"/v1/models": _answer(
                b"200 OK", b"application/json", json.dumps({"object": "list", "data": [model]}).encode()
            ),
        }
        self._other = _answer(b"200 OK", b"application/json", json.dumps(about).encode())

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by class
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._path = b""

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"POST":
            tail = b"".join(self._body)[-200:].replace(b" ", b"")
            self._transport.write(STREAMED if b'"stream":true' in tail else WHOLE)
        else:
            self._transport.write(self._pages.get(self._path, self._other))
        self._body.clear()
        self._path = b""


def _serve_mocks() -> None:
    os.sched_setaffinity(0, {OTHER_CORE})

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        for role, ports in (("prefill", PREFILL_PORTS), ("decode", DECODE_PORTS)):
            for port in ports:
                await loop.create_server(lambda r=role, p=port: MockWorker(r, p), "127.0.0.1", port)  # type: ignore[misc]
        await asyncio.Event().wait()

    uvloop.run(serve())


@dataclass(slots=True)
class Client(asyncio.Protocol):
    """Asks again as soon as it has an answer."""

    requests: Iterator[bytes]
    until: float
    sent: float = 0.0
    first: float = 0.0
    waits: list[float] = field(default_factory=list)
    errors: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    parser: httptools.HttpResponseParser | None = None
    transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.ask()

    def ask(self) -> None:
        assert self.transport is not None
        self.parser = httptools.HttpResponseParser(self)
        self.sent, self.first = time.perf_counter(), 0.0
        self.transport.write(next(self.requests))

    def data_received(self, data: bytes) -> None:
        assert self.parser is not None
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.first = self.first or time.perf_counter()

    def on_message_complete(self) -> None:
        assert self.parser is not None and self.transport is not None
        self.waits.append((self.first or time.perf_counter()) - self.sent)
        self.errors += self.parser.get_status_code() != 200
        if time.perf_counter() < self.until and self.parser.should_keep_alive():
            asyncio.get_running_loop().call_soon(self.ask)
        else:
            self.done.set()
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.errors += not self.done.is_set()
        self.done.set()


def bodies(kind: str, stream: bool, count: int = 400) -> list[bytes]:
    """Requests whose prompts begin alike in sixteen ways and end each in its own."""
    rng = random.Random(1)

    def words(number: int) -> str:
        return " ".join(
            "".join(rng.choices(string.ascii_lowercase, k=rng.randint(3, 9))) for _ in range(number)
        )

    beginnings = [words(4700 if kind == "long" else 20) for _ in range(16)]
    made = []
    for number in range(count):
        messages = [
            {"role": "system", "content": beginnings[number % 16]},
            {"role": "user", "content": f"q{number} {words(12)}"},
        ]
        body = json.dumps({"model": "m", "messages": messages, "max_tokens": 16, "stream": stream}).encode()
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        made.append(head + b"content-length: %d\r\n\r\n" % len(body) + body)
    return made


async def load(port: int, clients: int, seconds: float, requests: Sequence[bytes]) -> tuple[list[float], int]:
    """Seconds to the first byte of each answer, and how many went wrong."""
    loop = asyncio.get_running_loop()
    until = time.perf_counter() + seconds

    def endless(start: int) -> Iterator[bytes]:
        while True:
            yield requests[start % len(requests)]
            start += 7

    crowd = [Client(endless(number), until) for number in range(clients)]
    for client in crowd:
        await loop.create_connection(lambda one=client: one, "127.0.0.1", port)  # type: ignore[misc]
    await asyncio.wait_for(asyncio.gather(*(client.done.wait() for client in crowd)), seconds + 30)
    return [wait for client in crowd for wait in client.waits], sum(client.errors for client in crowd)


def command(template: str, port: int) -> list[str]:
    """
    >>> command("r {port} {decode:-d }", 5)
    ['r', '5', '-d', 'http://127.0.0.1:9103', '-d', 'http://127.0.0.1:9104']
    """

    def each(found: re.Match[str]) -> str:
        ports = PREFILL_PORTS if found[1] == "prefill" else DECODE_PORTS
        return " ".join(f"{found[2]}http://127.0.0.1:{one}" for one in ports)

    return shlex.split(re.sub(r"\{(prefill|decode):([^}]*)\}", each, template).replace("{port}", str(port)))


@contextmanager
def running(template: str, port: int, log: Path) -> Iterator[psutil.Process]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["taskset", "-c", str(ROUTER_CORE), *command(template, port)],
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    try:
        _await_answer(port, log)
        yield psutil.Process(process.pid)
    finally:
        end(process, signal.SIGTERM, patience_s=5)


def _await_answer(port: int, log: Path) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body, {"content-type": "application/json"}
    )
    end = time.monotonic() + START_LIMIT_S
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(request, timeout=3) as answer:
                if answer.status == 200:
                    return
        except OSError:
            time.sleep(0.3)
    raise SystemExit(f"the router did not answer within {START_LIMIT_S:g} s; its log is {log}")


def _processor_s(root: psutil.Process) -> float:
    return sum(sum(one.cpu_times()[:2]) for one in (root, *root.children(recursive=True)))


def _memory_mb(root: psutil.Process) -> float:
    return float(sum(one.memory_info().rss for one in (root, *root.children(recursive=True)))) / 2**20


def measure(
    process: psutil.Process, port: int, clients: int, seconds: float, requests: Sequence[bytes]
) -> dict[str, float]:
    uvloop.run(load(port, clients, WARM_S, requests))
    before = _processor_s(process)
    waits, errors = uvloop.run(load(port, clients, seconds, requests))
    used = _processor_s(process) - before
    ordered = sorted(waits)
    return {
        "cpu_us": round(1e6 * used / len(waits), 1),
        "per_s": round(len(waits) / seconds),
        "first_byte_p50_ms": round(1e3 * statistics.median(waits), 2),
        "first_byte_p99_ms": round(1e3 * ordered[int(0.99 * (len(ordered) - 1))], 2),
        "errors": errors,
        "memory_mb": round(_memory_mb(process), 1),
    }


def table(results: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """The medians over the repeats; ratios are of the first router's processor time to each other one's."""
    names = list(results)
    figures = {
        name: {case: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
               for case, rounds in cases.items()}
        for name, cases in results.items()
    }  # fmt: skip
    lines = [
        "| case | figure | " + " | ".join([*names, *(f"{names[0]} / {name}" for name in names[1:])]) + " |"
    ]
    lines.append("|---|---|" + "---|" * (2 * len(names) - 1))
    for case, first in figures[names[0]].items():
        for key, value in first.items():
            row = [figures[name].get(case, {}).get(key) for name in names]
            ratios = [f"{value / other:.2f}" if other and key == "cpu_us" else "" for other in row[1:]]
            cells = ["" if cell is None else f"{cell:g}" for cell in row]
            lines.append(f"| {case} | {key} | " + " | ".join([*cells, *ratios]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--router", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--cases", default="short:whole,short:stream,long:stream")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("build/router"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    routers = dict(one.split("=", 1) for one in options.router)
    results: dict[str, dict[str, list[dict[str, float]]]] = {name: {} for name in routers}
    mocks = Process(target=_serve_mocks, daemon=True)
    mocks.start()
    os.sched_setaffinity(0, {OTHER_CORE})
    try:
        for repeat in range(options.repeats):
            for number, (name, template) in enumerate(routers.items()):
                port = 31000 + 10 * number + 200 * repeat
                with running(template, port, options.out / f"{name}.log") as process:
                    for case in options.cases.split(","):
                        kind, _, mode = case.partition(":")
                        requests = bodies(kind, mode == "stream")
                        figures = measure(process, port, options.clients, options.seconds, requests)
                        results[name].setdefault(case, []).append(figures)
                        print(f"{name} {case} {json.dumps(figures)}", file=sys.stderr, flush=True)
    finally:
        mocks.terminate()
    print(table(results))


if __name__ == "__main__":
    main()
