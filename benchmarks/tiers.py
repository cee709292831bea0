"""
Tiers: time to first token of what returns, by the source of its KV blocks, and what copying costs.

    python -m benchmarks.tiers --model FOLDER
    python -m benchmarks.tiers --model FOLDER --conversations "" --returning 4096 [--llama FOLDER --gguf FILE]
    python -m benchmarks.tiers --model FOLDER --conversations "" --streams 8
    python -m benchmarks.tiers --conversations "" --scan 10GiB

`baton up` serves the model by a prefill and a decode worker, once with and once without `--kv-peers`. A
conversation is TURNS:NEW:GENERATED: so many turns, each with NEW random tokens after the last answer of
GENERATED tokens. Each turn is then asked again with other new tokens: both workers have everything else by
then, so this is the time of computing the new tokens alone. Prompts that fill the KV caches come first, so
that no memory is new, and the first conversation is not counted.

With `--returning`, a prompt of so many tokens is asked again, with some new ones, after others have evicted
it from the pool, of one worker and of a pair, with tiers and without. Pools have the size of two prompts. The
memory before a disk has room for one. A cold disk has nothing in the page cache. `--llama`, a folder with
llama.cpp's programs, has llama-server beside it, with one slot of the same size: without its cache of
prompts, with it, and with the slot saved to a file before others take it. Restoring it counts.

With `--streams`, so many streams decode beside prompts of others, whose blocks are copied to tiers: tokens
per second, and the longest pause of a stream. With `--scan`, a disk tier of this size is opened that has a
header in each slot, with nothing in the page cache.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

from baton_api.metrics import TIERS
from baton_api.setting_types import parse_size
from baton_engine.tiers.disk import DiskStore
from baton_engine.tiers.index import TierIndex
from baton_engine.tiers.slab import HEADERS, PAGE, Header, slots_of
from benchmarks.serving import running, served_name

FILLING = 4
"""Number of the prompts that fill the KV cache."""

NEW = 32
"""New tokens of a prompt that returns."""

DISK = "--kv-memory-tier {prompt} --kv-disk-tier {folder} --kv-disk-tier-size 2GiB"

TIERED = {"no tier": "", "memory": "--kv-memory-tier 1GiB", "disk": DISK, "cold disk": DISK}

LLAMA = {
    "no tier": "--cache-ram 0",
    "memory": "--cache-ram 1024",
    "disk": "--cache-ram 0 --slot-save-path {folder}",
    "cold disk": "--cache-ram 0 --slot-save-path {folder}",
}

STREAMED = 400
"""Tokens of each stream."""

BESIDE, EVERY_S = 512, 0.5
"""Tokens of the prompts beside streams, and seconds from one to the next."""

SERVERS = {"peers": "--kv-peers", "no peers": "--no-kv-peers"}


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer."""

    ttft_ms: float
    tokens: list[int]
    cached: int
    peer: int
    """Those of the cached tokens that the prefill worker read from the decode worker."""
    restored: int
    """Those that were restored from a tier."""


@dataclass(frozen=True, slots=True)
class Client:
    port: int
    model: str

    def ask(self, prompt: list[int], length: int) -> Turn:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": length,
            "ignore_eos": True,
            "temperature": 1,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        tokens: list[int] = []
        usage: dict[str, Any] = {}
        sent, first = time.perf_counter(), 0.0
        for event in _events(self.port, "/v1/completions", body):
            first = first or time.perf_counter()
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or ()
        details = usage["prompt_tokens_details"]
        by_source = details.get("cached_tokens_by_source", {})
        ttft_ms = 1000 * (first - sent)
        restored = sum(by_source.get(tier, 0) for tier in TIERS)
        return Turn(ttft_ms, tokens, details["cached_tokens"], by_source.get("peer", 0), restored)

    def stream(self, prompt: list[int], length: int) -> tuple[list[int], list[float]]:
        """Return greedy tokens, and when each came."""
        fields = {"temperature": 0, "return_token_ids": True, "ignore_eos": True, "stream": True}
        body = {"model": self.model, "prompt": prompt, "max_tokens": length, **fields}
        tokens: list[int] = []
        times: list[float] = []
        for event in _events(self.port, "/v1/completions", body):
            for choice in event["choices"]:
                tokens += (new := choice.get("token_ids") or ())
                times += [time.perf_counter()] * len(new)
        return tokens, times


@dataclass(frozen=True, slots=True)
class Llama:
    """llama-server with one slot."""

    port: int

    def ask(self, prompt: list[int], length: int) -> Turn:
        """A turn whose cached tokens are all of the slot, wherever they came from."""
        body = {
            "prompt": prompt,
            "n_predict": length,
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": True,
            "return_tokens": True,
        }
        tokens: list[int] = []
        sent, first, cached = time.perf_counter(), 0.0, 0
        for event in _events(self.port, "/completion", body):
            first = first or time.perf_counter()
            tokens += event["tokens"]
            cached = event.get("timings", {}).get("cache_n", cached)
        return Turn(1000 * (first - sent), tokens, cached, 0, 0)

    def slot(self, action: str) -> float:
        """Save or restore it. Returns milliseconds."""
        sent = time.perf_counter()
        with _posted(self.port, f"/slots/0?action={action}", {"filename": "slot"}) as answer:
            answer.read()
        return 1000 * (time.perf_counter() - sent)


def _posted(port: int, path: str, body: dict[str, Any]) -> HTTPResponse:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    answer: HTTPResponse = urllib.request.urlopen(request, timeout=300)
    return answer


def _events(port: int, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with _posted(port, path, body) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])


def random_tokens(count: int) -> list[int]:
    return [random.randrange(300, 8000) for _ in range(count)]


def converse(client: Client, turns: int, new: int, generated: int) -> list[tuple[Turn, Turn]]:
    """Return each turn after the first, and its repetition with other new tokens."""
    answer = client.ask(prompt := random_tokens(new), generated)
    pairs = []
    for turn in range(1, turns):
        last = turn == turns - 1
        prompt = [*prompt, *answer.tokens]
        answer = client.ask([*prompt, *(fresh := random_tokens(new))], 1 if last else generated)
        pairs.append((answer, client.ask([*prompt, *random_tokens(new)], 1)))
        prompt += fresh
    return pairs


def come_back(client: Client, length: int, cold: Path | None) -> Turn:
    """
    Ask a prompt, two others of the same length that evict it, and then the prompt again.

    `cold` is a folder whose files leave the page cache before.
    """
    prompt = random_tokens(length)
    for other in (prompt, random_tokens(length), random_tokens(length)):
        client.ask(other, 1)
    chill(() if cold is None else cold.rglob("blocks"))
    return client.ask([*prompt, *random_tokens(NEW)], 1)


def slot_comes_back(client: Llama, length: int, folder: Path | None, cold: bool) -> Turn:
    """As `come_back`. With a folder, the slot is saved to a file there, and restored for the prompt."""
    prompt = random_tokens(length)
    client.ask(prompt, 1)
    if folder is not None:
        client.slot("save")
    for other in (random_tokens(length), random_tokens(length)):
        client.ask(other, 1)
    chill([folder / "slot"] if folder is not None and cold else ())
    restored_ms = client.slot("restore") if folder is not None else 0.0
    turn = client.ask([*prompt, *random_tokens(NEW)], 1)
    return replace(turn, ttft_ms=turn.ttft_ms + restored_ms)


def chill(files: Iterable[Path]) -> None:
    """Take files from the page cache."""
    for path in files:
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compare_returning(options: argparse.Namespace, length: int) -> None:
    print("| server | tier | cached | restored | TTFT ms, each |")
    print("|---|---|---|---|---|")
    flags = f"--port {options.port} --max-total-tokens {2 * length}"
    for command, tier in itertools.product(options.commands, options.tiers):
        name = f"{command}-{tier.replace(' ', '-')}"
        with tempfile.TemporaryDirectory(dir=options.out) as folder:
            flag = TIERED[tier].format(folder=folder, prompt=length * options.token_bytes)
            baton = f"{Path(sys.executable).with_name('baton')} {command} {options.model} {flags} {flag}"
            with running(baton, options.port, options.out / f"{name}.log"):
                client = Client(options.port, served_name(options.port))
                cold = Path(folder) if tier.startswith("cold") else None
                turns = [come_back(client, length, cold) for _ in range(options.repeats + 1)][1:]
        _print_turns(command, tier, turns)
    for tier in options.tiers if options.llama else ():
        with tempfile.TemporaryDirectory(dir=options.out) as folder:
            flag = LLAMA[tier].format(folder=folder)
            program = options.llama / "llama-server"
            usual = f"-m {options.gguf} --port {options.port} -np 1 -c {2 * length} -t {os.cpu_count()}"
            log = options.out / f"llama-{tier.replace(' ', '-')}.log"
            with running(f"{program} {usual} {flag} {options.llama_flags}", options.port, log):
                saved, cold = Path(folder) if "disk" in tier else None, tier.startswith("cold")
                slot = Llama(options.port)  # it has warmed up, and allocated its memory
                turns = [slot_comes_back(slot, length, saved, cold) for _ in range(options.repeats)]
        _print_turns("llama-server", tier, turns)


def _print_turns(server: str, tier: str, turns: list[Turn]) -> None:
    each = ", ".join(f"{turn.ttft_ms:.0f}" for turn in turns)
    sizes = " | ".join(
        f"{statistics.median(getattr(turn, name) for turn in turns):.0f}" for name in ("cached", "restored")
    )
    print(f"| {server} | {tier} | {sizes} | {each} |", flush=True)


@dataclass(frozen=True, slots=True)
class Streamed:
    """Streams that ran beside others."""

    tokens: list[list[int]]
    rate: float
    """Tokens per second, while all of them ran."""
    pause_ms: float
    """The longest one of any of them, from when all of them had begun."""
    beside: int
    """Prompts of others that were answered meanwhile."""

    @classmethod
    def of(
        cls, client: Client, prompts: list[list[int]], length: int, others: Iterable[list[int]]
    ) -> Streamed:
        """Stream the answers to `prompts`, and ask the others meanwhile."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            streams = [threads.submit(client.stream, prompt, length) for prompt in prompts]
            beside = 0
            began = time.perf_counter()
            for number, other in enumerate(others):
                time.sleep(max(0.0, began + number * EVERY_S - time.perf_counter()))
                client.ask(other, 1)
                if any(stream.done() for stream in streams):
                    break
                beside += 1
            answers = [stream.result() for stream in streams]
        start = max(times[0] for _, times in answers)
        end = min(times[-1] for _, times in answers)
        during = [[moment for moment in times if start <= moment <= end] for _, times in answers]
        pauses = [after - before for times in during for before, after in itertools.pairwise(times)]
        rate = sum(map(len, during)) / (end - start)
        return cls([tokens for tokens, _ in answers], rate, 1000 * max(pauses), beside)


def compare_streams(options: argparse.Namespace) -> None:
    """Servers take turns."""
    print("| server | tier | prompts beside | tokens/s, each | longest pause ms, each |")
    print("|---|---|---|---|---|")
    room = options.streams * (64 + STREAMED) + 8 * BESIDE
    found: dict[str, list[Streamed]] = {}
    for tier in [*options.tiers, *reversed(options.tiers)]:
        with tempfile.TemporaryDirectory(dir=options.out) as folder:
            flag = TIERED[tier].format(folder=folder, prompt=2 * BESIDE * options.token_bytes)
            command = f"serve {options.model} --port {options.port} --max-total-tokens {room} {flag}"
            log = options.out / f"streams-{tier.replace(' ', '-')}.log"
            with running(f"{Path(sys.executable).with_name('baton')} {command}", options.port, log):
                client = Client(options.port, served_name(options.port))
                for _ in range(options.repeats + 1):
                    others = (random_tokens(BESIDE) for _ in itertools.count())
                    prompts = [random_tokens(64) for _ in range(options.streams)]
                    streamed = Streamed.of(client, prompts, STREAMED, others)
                    found.setdefault(tier, []).append(streamed)
                found[tier].pop(-options.repeats - 1)
    for tier, each in found.items():
        rates = ", ".join(f"{one.rate:.0f}" for one in each)
        pauses = ", ".join(f"{one.pause_ms:.0f}" for one in each)
        beside = ", ".join(str(one.beside) for one in each)
        print(f"| baton serve | {tier} | {beside} | {rates} | {pauses} |", flush=True)


def scan(options: argparse.Namespace) -> None:
    """Time the start of a disk tier whose slots all have headers of its model."""
    block = 16 * options.token_bytes
    with tempfile.TemporaryDirectory(dir=options.out) as name:
        folder, model = Path(name), b"of 16 bytes ...."
        DiskStore(folder, options.scan, block, model).close()
        with (folder / HEADERS).open("r+b", buffering=0) as headers:
            slots = slots_of(options.scan, block)
            headers.seek(PAGE)
            for slot in range(slots):
                header = Header(model, (slot + 1).to_bytes(16), slot.to_bytes(16), slot, slot + 1)
                headers.write(header.encoded(slot))
        for _ in range(options.repeats):
            chill(folder.iterdir())
            began = time.perf_counter()
            store = DiskStore(folder, options.scan, block, model)
            seconds = time.perf_counter() - began
            index = TierIndex(store.free, store.medium, None, store.found)
            whole = time.perf_counter() - began
            store.close()
            counts = f"{slots} headers, of which {len(index)} were found"
            print(f"{counts}: opened in {seconds:.3f} s, {whole:.3f} s with its index", flush=True)


def rows(name: str, rounds: Iterable[list[tuple[Turn, Turn]]]) -> list[str]:
    lines = []
    for number, pairs in enumerate(zip(*rounds, strict=True), start=2):
        turn = statistics.median(first.ttft_ms for first, _ in pairs)
        alone = statistics.median(again.ttft_ms for _, again in pairs)
        cached = statistics.median(first.cached for first, _ in pairs)
        peer = statistics.median(first.peer for first, _ in pairs)
        sources = f"{cached - peer:.0f} | {peer:.0f}"
        lines.append(f"| {name} | {number} | {sources} | {turn:.0f} | {alone:.0f} | {turn / alone:.2f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--conversations", default="2:600:2048,8:400:400")
    parser.add_argument("--returning", type=int, nargs="*", default=[], help="tokens of returning prompts")
    parser.add_argument("--tiers", nargs="+", choices=TIERED, default=[*TIERED])
    parser.add_argument("--commands", nargs="+", choices=("serve", "up"), default=["serve", "up"])
    parser.add_argument("--token-bytes", type=int, default=23_040, help="bytes of a token in the KV cache")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp's programs")
    parser.add_argument("--gguf", type=Path, help="the model for llama-server")
    parser.add_argument("--llama-flags", default="", help="further flags of llama-server")
    parser.add_argument("--streams", type=int, default=0, help="streams beside the cleaner")
    parser.add_argument("--scan", type=parse_size, default=0, help="size of a disk tier that is opened")
    parser.add_argument("--port", type=int, default=8340)
    parser.add_argument("--flags", default="--kv-cache-memory=180MiB", help="further flags of `baton up`")
    parser.add_argument("--fill", type=int, default=8192, help="tokens that fill the KV cache")
    parser.add_argument("--out", type=Path, default=Path("build/tiers"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    baton = (
        f"{Path(sys.executable).with_name('baton')} up {options.model} --port {options.port} {options.flags}"
    )
    for length in options.returning:
        compare_returning(options, length)
    if options.streams:
        compare_streams(options)
    if options.scan:
        scan(options)
    conversations = [text for text in options.conversations.split(",") if text]
    if not conversations:
        return
    print("| server | turn | cached | of a peer | TTFT ms | new tokens alone, ms | ratio |")
    print("|---|---|---|---|---|---|---|")
    for (name, flag), text in itertools.product(SERVERS.items(), conversations):
        turns, new, generated = (int(number) for number in text.split(":"))
        log = options.out / f"{name.replace(' ', '-')}.log"
        with running(f"{baton} {flag}", options.port, log):
            client = Client(options.port, served_name(options.port))
            for _ in range(FILLING):
                client.ask(random_tokens(options.fill // FILLING), 1)
            rounds = [converse(client, turns, new, generated) for _ in range(options.repeats + 1)]
        print("\n".join(rows(f"{name}, {text}", rounds[1:])), flush=True)


if __name__ == "__main__":
    main()
