"""
Compares a pair of vLLM workers behind the router with a single worker, token by token.

    python -m benchmarks.vllm_pair --prefill http://127.0.0.1:8601 --decode http://127.0.0.1:8602 --model NAME

The workers are running already. The router is started here and sends every prompt to the pair. Prompts have
lengths around vLLM's blocks and chunks, and some share a prefix. First the decode worker answers the same
prompts by itself, with another salt, so that neither run finds the other's blocks. The counters `vllm:nixl_*`
show how much was moved.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BLOCK = 128
"""Tokens of a block of vLLM on a CPU."""

CHUNK = 2048
"""Tokens of a chunk of vLLM by default."""

LENGTHS = (1, 2, 16, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 700, CHUNK - 1, CHUNK, CHUNK + 1, 3000)
VOCABULARY = 2, 40_000
START_LIMIT_S = 60.0
COUNTERS = ("vllm:nixl_xfer_time_seconds_count", "vllm:nixl_bytes_transferred_sum")


def prompts(count: int, rng: random.Random) -> list[list[int]]:
    """Random token ids; every third prompt begins with the one before it."""
    all_prompts: list[list[int]] = []
    for number in range(count):
        length = LENGTHS[number % len(LENGTHS)]
        tokens = [rng.randint(*VOCABULARY) for _ in range(length)]
        all_prompts.append(all_prompts[-1] + tokens[:200] if number % 3 == 2 else tokens)
    return all_prompts


def complete(url: str, model: str, prompt: list[int], salt: str, tokens: int) -> list[int]:
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "cache_salt": salt}
    return list(post(f"{url}/v1/completions", {**body, "return_token_ids": True})["choices"][0]["token_ids"])


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        reply: dict[str, Any] = json.load(answer)
        return reply


def counters(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    return {name: sum(float(one.split()[-1]) for one in lines if one.startswith(name)) for name in COUNTERS}


@contextmanager
def router(prefill: str, decode: str) -> Iterator[str]:
    """A router that sends every prompt to the pair."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("baton")),
        "router",
        "--prefill",
        prefill,
        "--decode",
        decode,
    ]
    process = subprocess.Popen([*command, "--port", str(port), "--local-prefill-max-tokens", "0"])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{url}/ready", timeout=5).close()
                break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prefill", required=True, help="URL of the prefill worker")
    parser.add_argument("--decode", required=True, help="URL of the decode worker")
    parser.add_argument("--model", required=True)
    parser.add_argument("--count", type=int, default=60, help="prompts")
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    questions = prompts(given.count, random.Random(given.seed))
    single = [complete(given.decode, given.model, one, "single", given.tokens) for one in questions]
    before = counters(given.decode)
    with router(given.prefill, given.decode) as url:
        paired = [complete(url, given.model, one, "paired", given.tokens) for one in questions]
    moved = {name: counters(given.decode)[name] - before[name] for name in COUNTERS}
    differing = [number for number in range(given.count) if single[number] != paired[number]]
    for number in differing:
        common = next(at for at in range(given.tokens) if single[number][at] != paired[number][at])
        print(f"prompt {number} of {len(questions[number])} tokens differs at token {common}")
    print(f"{given.count - len(differing)} of {given.count} answers are equal; {json.dumps(moved)}")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
