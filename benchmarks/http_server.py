"""
Cost of a server's HTTP side: requests per second, and microseconds per streamed token.

    python -m benchmarks.http_server --server 'now=baton serve {model} --port {port} --max-running 256' \\
        --server 'before=OTHER/bin/baton serve {model} --port {port} --max-running 256'

The model is tiny and random, so that it contributes little to the results. For each number of
clients: each asks again as soon as it has an answer of one token (requests); then each has one stream of
TOKENS tokens (streams). CPU time is that of all the server's processes. The client shares the machine, so
a ratio of two servers is more meaningful than a number. Every number is the median of the repeats.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httptools
import psutil

from benchmarks.serving import running, served_name, table
from tests.engine.models import make_model

PROMPT = "The quick brown fox jumps over the lazy dog."


@dataclass(slots=True)
class Connection(asyncio.Protocol):
    """One kept-alive connection that counts what comes over it."""

    request: bytes
    left: int
    """Requests still to be sent."""
    tokens: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)
    failure: str = ""
    parser: httptools.HttpResponseParser | None = None
    transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._send()

    def _send(self) -> None:
        assert self.transport is not None
        self.left -= 1
        self.parser = httptools.HttpResponseParser(self)
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        assert self.parser is not None
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        assert self.parser is not None
        if self.parser.get_status_code() != 200:
            self.failure = body.decode(errors="replace")
        self.tokens += body.count(b"data: {")

    def on_message_complete(self) -> None:
        if self.failure or not self.left:
            self.done.set()
        else:
            # Not from within the parser: it has yet to return from what it was fed.
            asyncio.get_running_loop().call_soon(self._send)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.is_set():
            self.failure = self.failure or f"the connection was lost: {exc}"
            self.done.set()


@dataclass(frozen=True, slots=True)
class Target:
    """A running server and the processes that it consists of."""

    port: int
    model: str
    pid: int

    def request(self, *, tokens: int, stream: bool) -> bytes:
        body = json.dumps(
            {
                "model": self.model,
                "messages": [{"role": "user", "content": PROMPT}],
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": stream,
            }
        ).encode()
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def cpu_s(self) -> float:
        """Processor seconds so far of the server and its children."""
        root = psutil.Process(self.pid)
        return sum(sum(one.cpu_times()[:2]) for one in (root, *root.children(recursive=True)))


async def _run(target: Target, request: bytes, clients: int, each: int) -> tuple[float, float, int]:
    """Seconds, the server's processor seconds, and the events of streams."""
    loop = asyncio.get_running_loop()
    connections = [Connection(request, each) for _ in range(clients)]
    cpu, began = target.cpu_s(), time.perf_counter()
    for connection in connections:
        await loop.create_connection(lambda one=connection: one, "127.0.0.1", target.port)  # type: ignore[misc]
    await asyncio.gather(*(connection.done.wait() for connection in connections))
    seconds, cpu = time.perf_counter() - began, target.cpu_s() - cpu
    for connection in connections:
        if connection.failure:
            raise SystemExit(connection.failure[:500])
        if connection.transport is not None:
            connection.transport.close()
    return seconds, cpu, sum(connection.tokens for connection in connections)


async def measure(target: Target, clients: int, requests: int, tokens: int) -> dict[str, float]:
    each = -(-requests // clients)
    seconds, cpu, _ = await _run(target, target.request(tokens=1, stream=False), clients, each)
    numbers = {
        "requests_per_s": round(clients * each / seconds, 1),
        "cpu_us_per_request": round(1e6 * cpu / (clients * each), 1),
    }
    seconds, cpu, events = await _run(target, target.request(tokens=tokens, stream=True), clients, 1)
    if events < clients * tokens / 2:  # a token may be part of a character, which comes with the next one
        raise SystemExit(f"{clients} streams of {tokens} tokens brought {events} events")
    numbers["us_per_token"] = round(1e6 * seconds / (clients * tokens), 1)
    numbers["cpu_us_per_token"] = round(1e6 * cpu / (clients * tokens), 1)
    return numbers


@contextmanager
def model_folder(given: Path | None) -> Iterator[Path]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory() as folder:
        yield make_model(Path(folder) / "tiny")


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, help="a folder; without one, a tiny random model is made")
    parser.add_argument("--server", action="append", required=True, metavar="NAME=COMMAND")
    parser.add_argument("--clients", default="1,32,256")
    parser.add_argument("--requests", type=int, default=1024, help="of all clients together")
    parser.add_argument("--tokens", type=int, default=128, help="of each stream")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--port", type=int, default=8340)
    parser.add_argument("--out", type=Path, default=Path("build/front"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, dict[str, float]]] = {}
    with model_folder(options.model) as model:
        for server in options.server:
            name, _, command = server.partition("=")
            log = options.out / f"{name.replace(' ', '-')}.log"
            with running(command.format(model=model, port=options.port), options.port, log) as process:
                target = Target(options.port, served_name(options.port), process.pid)
                results[name] = {}
                for clients in map(int, options.clients.split(",")):
                    rounds = [
                        asyncio.run(measure(target, clients, options.requests, options.tokens))
                        for _ in range(options.repeats + 1)
                    ]
                    results[name][f"{clients} clients"] = numbers = medians(rounds[1:])
                    print(f"{name} {clients} {json.dumps(numbers)}", file=sys.stderr, flush=True)
    print(table(results))


if __name__ == "__main__":
    main()
