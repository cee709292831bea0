"""
Time to first token of a conversation's later turns on a pair, by the source of their KV blocks.

    python -m benchmarks.tiers --model FOLDER
    python -m benchmarks.tiers --model FOLDER --conversations "" --returning 4096

`baton up` serves the model by a prefill and a decode worker, once with and once without `--kv-peers`. A
conversation is TURNS:NEW:GENERATED: so many turns, each with NEW random tokens after the last answer of
GENERATED tokens. Each turn is then asked again with other new tokens: both workers have everything else by
then, so this is the time of computing the new tokens alone. Prompts that fill the KV caches come first, so
that no memory is new, and the first conversation is not counted.

With `--returning`, a prompt of so many tokens is asked again, with some new ones, after others have evicted
it from the pool, of one worker and of a pair, with tiers and without. Pools have the size of two prompts. The
memory before a disk has room for one. A cold disk has nothing in the page cache.
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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton_api.metrics import TIERS
from benchmarks.serving import running, served_name

FILLING = 4
"""Number of the prompts that fill the KV cache."""

NEW = 32
"""New tokens of a prompt that returns."""

DISK = "--kv-memory-tier {prompt} --kv-disk-tier {folder} --kv-disk-tier-size 2GiB"

TIERED = {"no tier": "", "memory": "--kv-memory-tier 1GiB", "disk": DISK, "cold disk": DISK}

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
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        tokens: list[int] = []
        usage: dict[str, Any] = {}
        sent, first = time.perf_counter(), 0.0
        with urllib.request.urlopen(request, timeout=300) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                first = first or time.perf_counter()
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or ()
        details = usage["prompt_tokens_details"]
        by_source = details.get("cached_tokens_by_source", {})
        ttft_ms = 1000 * (first - sent)
        restored = sum(by_source.get(tier, 0) for tier in TIERS)
        return Turn(ttft_ms, tokens, details["cached_tokens"], by_source.get("peer", 0), restored)


def _random(count: int) -> list[int]:
    return [random.randrange(300, 8000) for _ in range(count)]


def converse(client: Client, turns: int, new: int, generated: int) -> list[tuple[Turn, Turn]]:
    """Return each turn after the first, and its repetition with other new tokens."""
    answer = client.ask(prompt := _random(new), generated)
    pairs = []
    for turn in range(1, turns):
        last = turn == turns - 1
        prompt = [*prompt, *answer.tokens]
        answer = client.ask([*prompt, *(fresh := _random(new))], 1 if last else generated)
        pairs.append((answer, client.ask([*prompt, *_random(new)], 1)))
        prompt += fresh
    return pairs


def come_back(client: Client, length: int, cold: Path | None) -> Turn:
    """
    Ask a prompt, two others of the same length that evict it, and then the prompt again.

    `cold` is a folder whose files leave the page cache before.
    """
    prompt = _random(length)
    for other in (prompt, _random(length), _random(length)):
        client.ask(other, 1)
    for path in () if cold is None else cold.rglob("blocks"):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return client.ask([*prompt, *_random(NEW)], 1)


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
        each = ", ".join(f"{turn.ttft_ms:.0f}" for turn in turns)
        sizes = " | ".join(
            f"{statistics.median(getattr(turn, name) for turn in turns):.0f}"
            for name in ("cached", "restored")
        )
        print(f"| {command} | {tier} | {sizes} | {each} |", flush=True)


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
                client.ask(_random(options.fill // FILLING), 1)
            rounds = [converse(client, turns, new, generated) for _ in range(options.repeats + 1)]
        print("\n".join(rows(f"{name}, {text}", rounds[1:])), flush=True)


if __name__ == "__main__":
    main()
