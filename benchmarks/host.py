"""
What a worker's host costs: tokens per second through the real HTTP server, with a model that costs nothing.

    python -m benchmarks.host [--settings '{"max_running": 256}'] [--streams 1,64,256] \\
        [--peer 'vllm=vllm serve {model} --port {port} --served-model-name tiny']

The server is a whole worker in a process of its own, as `baton serve` starts it. Its forward pass looks up
a table. For each number of streams, all begin at once and are read to their end, several times. The client
reads its sockets every 5 ms, so that it takes little of the processors that it shares with the server.

A peer is any server of the OpenAI API. It computes a tiny model of one layer, whose folder it is given, as it
cannot be given one that costs nothing.

Processor time is given per token, for the process that was started, which computes in Baton's worker, and for
its children. `ttft_ms` is the median time to the first token of single requests, one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import selectors
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from baton_api import collector
from baton_api.announcements import Announcer
from baton_engine import service, worker
from baton_engine.batch import Batch
from baton_engine.kv.cache import KVCache
from baton_engine.model.loading import LoadedWeights
from baton_engine.model.progress import SILENT
from baton_engine.settings import WorkerSettings
from baton_engine.spec import ModelSpec
from benchmarks.serving import table
from tests.engine.models import make_model

START_LIMIT_S = 300
READ_S = 0.005
"""Seconds between two reads of the client."""
LETTERS = slice(68, 90)
"""Tokens of the tiny model's tokenizer that are letters: each is an event of its stream."""
ASKED = 200
"""Requests for the time to the first token."""
PEERS_SIZES: dict[str, Any] = {
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
"""vLLM's attention on CPUs takes heads of 32 values and more."""
TOKENS = {1: 2000, 64: 500, 256: 250}
"""Tokens of each stream, by the number of streams."""


class FreeModel:
    """The next token is a function of the last one, looked up in a table."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        letters = torch.arange(spec.vocab)[LETTERS]
        generator = torch.Generator().manual_seed(1)
        following = letters[torch.randint(len(letters), (spec.vocab,), generator=generator)]
        self._logits = torch.zeros((spec.vocab, spec.vocab)).scatter_(1, following[:, None], 50.0)

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        return self._logits[batch.tokens[batch.wanted_at]]

    def hidden_states(self, batch: Batch, cache: KVCache) -> Tensor:
        return self.forward(batch, cache)

    def project(self, states: Tensor) -> Tensor:
        return states

    def prepare_adapter(self, weights: Any) -> None:
        raise NotImplementedError

    def interrupt(self) -> None:
        """A pass is too short to be interrupted."""


def serve(settings: WorkerSettings) -> None:
    """Run a worker with this model until a signal stops it."""

    def load_model(settings: WorkerSettings, checkpoint: Any, spec: ModelSpec, *_: object) -> LoadedWeights:
        return LoadedWeights(FreeModel(spec), "0" * 64, 1)

    worker.load_model = load_model  # type: ignore[attr-defined, assignment]  # this module is all that the process runs
    collector.run_rarely()  # as the command does
    asyncio.run(service.run(settings, Announcer(), SILENT))


@dataclass(frozen=True, slots=True)
class Server:
    """A running worker."""

    port: int
    process: psutil.Process

    def request(self, tokens: int, prompt: str) -> bytes:
        body = json.dumps(
            {
                "model": "tiny",
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
        )
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        return f"{head}connection: close\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()

    def cpu_s(self) -> tuple[float, float]:
        """Processor seconds so far: of the process that computes, and of its children."""
        children = self.process.children(recursive=True)
        own, others = self.process.cpu_times(), [child.cpu_times() for child in children]
        return own.user + own.system, sum(times.user + times.system for times in others)


def streams(server: Server, count: int, tokens: int) -> dict[str, float]:
    """Figures of `count` streams of `tokens` tokens."""
    selector, received, whole = selectors.DefaultSelector(), 0, 0
    for number in range(count):
        connection = socket.create_connection(("127.0.0.1", server.port))
        connection.sendall(server.request(tokens, f"Question {number}"))
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
    own, others = server.cpu_s()
    began, buffer, first = time.perf_counter(), bytearray(1 << 20), 0
    counted = began
    while selector.get_map():
        for key, _ in selector.select():
            assert isinstance(key.fileobj, socket.socket)
            size = key.fileobj.recv_into(buffer)
            received += buffer.count(b'"content":', 0, size)
            whole += buffer.count(b'"length"', 0, size)
            if not size:
                selector.unregister(key.fileobj)
                key.fileobj.close()
        if not first and received >= count:  # validation and prompts are not counted
            own, others = server.cpu_s()
            first, counted = received, time.perf_counter()
        time.sleep(READ_S)
    seconds = time.perf_counter() - counted
    ours, theirs = server.cpu_s()
    # An event may have several tokens; a reason that two reads divide is not counted.
    if whole < 0.9 * count:
        raise SystemExit(f"only {whole} of {count} streams have all of their {tokens} tokens")
    done = count * tokens - first
    return {
        "tok/s": round(done / seconds),
        "us/token, first process": round(1e6 * (ours - own) / done, 1),
        "us/token, its children": round(1e6 * (theirs - others) / done, 1),
    }


def first_tokens(server: Server) -> dict[str, float]:
    """The time to the first token of one request after the other."""
    times = []
    for number in range(ASKED):
        began = time.perf_counter()
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(server.request(1, f"Another question {number}"))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            received = b""
            while b"[DONE]" not in received:
                received += connection.recv(1 << 16)
            times.append(time.perf_counter() - began)
    return {"ttft_ms": round(1e3 * statistics.median(times), 2)}


@contextmanager
def running(settings: dict[str, Any], model: Path) -> Iterator[Server]:
    port = _free_port()
    given = {
        "model": str(model), "served_model_name": "tiny", "port": port, "device": "cpu", "dtype": "float32",
        "threads": 1, "max_running": 256, "kv_cache_tokens": 131_072, "speculation": "off",
        **settings,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if name in WorkerSettings.model_fields}
    with started(
        [sys.executable, "-m", "benchmarks.host", "--serve", json.dumps(given)], port, "/ready"
    ) as server:
        yield server


@contextmanager
def running_peer(command: str, model: Path) -> Iterator[Server]:
    """A server that `command` starts, with {model} and {port} filled in."""
    port = _free_port()
    with started(shlex.split(command.format(model=model, port=port)), port, "/health") as server:
        yield server


@contextmanager
def started(command: list[str], port: int, path: str) -> Iterator[Server]:
    process = subprocess.Popen(command)
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while not _ready(port, path):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit("The worker did not start.")
            time.sleep(0.2)
        yield Server(port, psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait(30)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _ready(port: int, path: str) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as connection:
            connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
            return b" 200 " in connection.recv(64)
    except OSError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--settings", type=json.loads, action="append", help="of the worker, as JSON; repeatable"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--streams", default="1,64,256")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(WorkerSettings(**json.loads(options.serve)))
        return
    counts = [int(count) for count in options.streams.split(",")]
    results: dict[str, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "tiny", max_position_embeddings=4096)
        for settings in options.settings or [{}]:
            with running(settings, model) as server:
                results[json.dumps(settings)] = measure(server, counts, options.repeats)
        if options.peer:
            model = make_model(Path(folder) / "one-layer", max_position_embeddings=4096, **PEERS_SIZES)
        for peer in options.peer:
            name, _, command = peer.partition("=")
            with running_peer(command, model) as server:
                results[name] = measure(server, counts, options.repeats)
    print(table(results))


def measure(server: Server, counts: list[int], repeats: int) -> dict[str, dict[str, float]]:
    """Medians over `repeats` after an uncounted round, by case."""
    results = {"1 request": first_tokens(server)}
    for count in counts:
        rounds = [streams(server, count, TOKENS.get(count, 250)) for _ in range(repeats + 1)]
        results[f"{count} streams"] = {
            figure: statistics.median(one[figure] for one in rounds[1:]) for figure in rounds[0]
        }
    return results


if __name__ == "__main__":
    main()
