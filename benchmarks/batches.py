"""
Batches against the same requests sent directly, and the influence of a batch on other requests.

    baton up MODEL --port 8000
    python -m benchmarks.batches throughput --requests 5000 --tokens 128
    python -m benchmarks.batches interactive --rate 4 --seconds 60
    python -m benchmarks.batches interactive --rate 1 --seconds 15 --pause 30

`throughput` finds the concurrency with which a client is fastest, sends all requests with it, and then
runs them as a batch. The ratio counts the whole time of the batch, validation and rendering included.
`interactive` measures the time to the first token of streamed requests that arrive at random, without a batch
and with a running one. With `--pause` they start when the batch uses all the capacity that it can get.
Both need an otherwise idle service.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from baton_cli.batch_service import BatchService
from baton_http.upstream import Upstream

CHAT = "/v1/chat/completions"
PROBE = 10
"""Part of the requests with which each number at once is tried: one in so many."""

QUIET_S = 12.0
"""Seconds without other requests after which the router no longer limits the batch."""

SHORT = 16
"""Tokens of an interactive answer."""


def bodies(model: str, count: int, tokens: int) -> list[dict[str, Any]]:
    """Requests that all differ, with answers of the same length."""
    return [
        {
            "model": model,
            "messages": [{"role": "user", "content": f"Tell me about the number {number}."}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
        }
        for number in range(count)
    ]


# --- Throughput ---


def throughput(url: str, model: str, count: int, tokens: int, at_once: list[int]) -> None:
    requests = bodies(model, count, tokens)
    rates = {}
    for concurrency in at_once:
        rate = rates[concurrency] = by_hand(url, requests[: max(concurrency, count // PROBE)], concurrency)
        print(f"by hand, {concurrency:4} at once: {rate:8.1f} requests/s, with some of them", flush=True)
    best = max(rates, key=lambda one: rates[one])
    hand = by_hand(url, requests, best)
    print(f"by hand, {best:4} at once: {hand:8.1f} requests/s, {hand * tokens:.0f} tokens/s", flush=True)
    time.sleep(QUIET_S)
    batch, running = as_batch(url, requests)
    print(f"as a batch            : {batch:8.1f} requests/s, {batch * tokens:.0f} tokens/s")
    print(f"as a batch, once it ran: {running:7.1f} requests/s")
    print(f"ratio: {batch / hand:.3f} ({running / hand:.3f} once it ran)")


def by_hand(url: str, requests: list[dict[str, Any]], concurrency: int) -> float:
    """Requests per second of a client that has always so many under way."""
    parts = urlsplit(url)

    async def send() -> float:
        upstream = Upstream(parts.hostname or "", parts.port or 80)
        left = iter(requests)

        async def one_after_another() -> None:
            for body in left:
                status, answer = await post(upstream, body)
                assert status == 200, answer

        began = time.perf_counter()
        await asyncio.gather(*(one_after_another() for _ in range(concurrency)))
        upstream.close()
        return len(requests) / (time.perf_counter() - began)

    return asyncio.run(send())


async def post(upstream: Upstream, body: dict[str, Any]) -> tuple[int, bytes]:
    content = json.dumps(body).encode()
    exchange = await upstream.request(head(upstream, len(content)), content)
    answer = b""
    while piece := await exchange.read():
        answer += piece
    return exchange.status, answer


def head(upstream: Upstream, length: int) -> bytes:
    kind = "content-type: application/json"
    lines = (f"POST {CHAT} HTTP/1.1", f"host: {upstream.name}", kind, f"content-length: {length}", "", "")
    return "\r\n".join(lines).encode()


def as_batch(url: str, requests: list[dict[str, Any]]) -> tuple[float, float]:
    """Requests per second from the creation to the end, and from the first to the last result."""
    service = BatchService(url, "", lambda reason: None)
    began = time.perf_counter()
    id = submit(service, requests)
    first = last = None
    while True:
        batch = service.batch(id)
        done = batch["request_counts"]["completed"]
        now = time.perf_counter()
        if done and first is None:
            first = now, done
        if done == len(requests) and last is None:
            last = now
        if batch["status"] == "completed":
            break
        assert batch["status"] in ("validating", "in_progress", "finalizing"), batch
        time.sleep(0.05)
    service.close()
    assert first is not None and last is not None and batch["request_counts"]["failed"] == 0
    running = (len(requests) - first[1]) / max(0.001, last - first[0])
    return len(requests) / (time.perf_counter() - began), running


def submit(service: BatchService, requests: list[dict[str, Any]]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "requests.jsonl"
        with path.open("w") as file:
            for number, body in enumerate(requests):
                line = {"custom_id": str(number), "method": "POST", "url": CHAT, "body": body}
                file.write(json.dumps(line) + "\n")
        uploaded = service.upload(path, lambda done, of: None)
    id: str = service.create(uploaded["id"], CHAT, {})["id"]
    return id


# --- What people notice ---


def interactive(url: str, model: str, rate: float, seconds: float, tokens: int, pause: float) -> None:
    service = BatchService(url, "", lambda reason: None)
    first_tokens(url, model, rate, min(5.0, seconds), seed=0)  # to warm up
    without = first_tokens(url, model, rate, seconds, seed=1)
    show("without a batch", without)
    id = submit(service, bodies(model, 50_000, tokens))
    while not service.batch(id)["request_counts"]["completed"]:
        time.sleep(0.2)
    time.sleep(pause)
    before = service.batch(id)["request_counts"]["completed"]
    beside = first_tokens(url, model, rate, seconds, seed=1)
    show("beside a batch", beside)
    done = service.batch(id)["request_counts"]["completed"] - before
    assert done, "the batch did nothing all the while"
    service.cancel(id)
    service.close()
    print(f"the batch had {done / seconds:.1f} requests/s meanwhile")
    print(f"p99 ratio: {quantile(beside, 0.99) / quantile(without, 0.99):.2f}")


def first_tokens(url: str, model: str, rate: float, seconds: float, seed: int) -> list[float]:
    """Seconds to the first token of each request; the same ones at the same times for the same seed."""
    rng = random.Random(seed)
    parts = urlsplit(url)

    async def ask(upstream: Upstream, number: int) -> float:
        body = bodies(model, 1, SHORT)[0]
        body["messages"] = [{"role": "user", "content": f"Question {seed}-{number}: what is the time?"}]
        content = json.dumps({**body, "stream": True}).encode()
        began = time.perf_counter()
        exchange = await upstream.request(head(upstream, len(content)), content)
        assert exchange.status == 200
        seen, first = b"", 0.0
        while piece := await exchange.read():
            seen += piece
            if not first and b'"content":"' in seen.replace(b" ", b"").replace(b'"content":""', b""):
                first = time.perf_counter() - began
        return first

    async def run() -> list[float]:
        upstream = Upstream(parts.hostname or "", parts.port or 80)
        asking, number = [], 0
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            asking.append(asyncio.create_task(ask(upstream, number)))
            number += 1
            await asyncio.sleep(rng.expovariate(rate))
        times = await asyncio.gather(*asking)
        upstream.close()
        return [one for one in times if one]

    return asyncio.run(run())


def show(when: str, times: list[float]) -> None:
    middle, high = statistics.median(times) * 1000, quantile(times, 0.99) * 1000
    print(
        f"{when:>16}: {len(times)} requests, first token p50 {middle:.0f} ms, p99 {high:.0f} ms", flush=True
    )


def quantile(times: list[float], share: float) -> float:
    return sorted(times)[min(len(times) - 1, int(share * len(times)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("throughput", "interactive"))
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--at-once", default="16,32,64,128,256", help="numbers that are tried by hand")
    parser.add_argument("--rate", type=float, default=4.0, help="requests per second that people send")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that the batch has all for itself")
    given = parser.parse_args()
    model = httpx.get(f"{given.url}/v1/models", trust_env=False).json()["data"][0]["id"]
    if given.what == "throughput":
        at_once = [int(one) for one in given.at_once.split(",")]
        throughput(given.url, model, given.requests, given.tokens, at_once)
    else:
        interactive(given.url, model, given.rate, given.seconds, given.tokens, given.pause)


if __name__ == "__main__":
    main()
