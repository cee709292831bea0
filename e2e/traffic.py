"""
Constant traffic during failures and changes of the cluster: requests per second, completed or failed.

Requests start by the clock, not after the previous one, so stalls are visible. Each is a stream, and fails
unless it ends with a finish reason and `[DONE]`. There are no retries, except in tests of clients that retry:
like the OpenAI SDK, these try again until an answer has begun.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from types import TracebackType

import httpx

from baton_api import headers
from e2e.services import NAME

TIMEOUT_S = 120.0
TOKENS = 4
RETRY_S = 0.5
"""Seconds before a retry, as in the SDK."""


@dataclass(slots=True)
class Outcome:
    """Results of the requests."""

    answered: int = 0
    by_worker: Counter[str] = field(default_factory=Counter)
    """Answers by worker: address and port."""
    failures: Counter[str] = field(default_factory=Counter)
    failed_at: list[float] = field(default_factory=list)
    """Times of failures on the monotonic clock."""
    longest_s: float = 0.0

    def of(self, addresses: Collection[str]) -> int:
        """Return the number of answers of the workers at these addresses (without ports)."""
        return sum(
            count for worker, count in self.by_worker.items() if worker.rpartition(":")[0] in addresses
        )

    def __str__(self) -> str:
        failed = sum(self.failures.values())
        summary = f"{self.answered} answered, {failed} failed, the slowest took {self.longest_s:.1f} s"
        return summary + "".join(f"\n  {count} x {why}" for why, count in self.failures.most_common())


class Traffic:
    """Sends requests to `url` while its context is open. All requests have ended when the context ends."""

    def __init__(
        self, url: str, per_second: float, *, retries: int = 0, context: str = "", tokens: int = TOKENS
    ) -> None:
        """
        Store the settings of the requests.

        `retries`: retries of a client that gets no answer. `context`: text after each question. `tokens`:
        maximum tokens of an answer.
        """
        self.outcome = Outcome()
        self._retries = retries
        self._context = context
        self._tokens = tokens
        self._url = f"{url}/v1/chat/completions"
        self._pause_s = 1 / per_second
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="traffic")

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        print(f"\n{self.outcome}")

    async def _run(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        timeout = httpx.Timeout(TIMEOUT_S)
        async with (
            httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False) as client,
            asyncio.TaskGroup() as requests,
        ):
            due = time.monotonic()
            number = 0
            while not self._over.is_set():
                requests.create_task(self._ask(client, number))
                number += 1
                due += self._pause_s
                await asyncio.sleep(due - time.monotonic())

    async def _ask(self, client: httpx.AsyncClient, number: int) -> None:
        body = {
            "model": NAME,
            "messages": [{"role": "user", "content": f"Tell me of the number {number}.{self._context}"}],
            "max_tokens": self._tokens,
            "stream": True,
        }
        began = time.monotonic()
        why, worker = "", ""
        for left in reversed(range(self._retries + 1)):
            begun = False
            try:
                async with client.stream("POST", self._url, json=body) as answer:
                    begun = True
                    worker = answer.headers.get(headers.WORKER, "")
                    lines = [line async for line in answer.aiter_lines() if line.startswith("data: ")]
                    why = _wrong(answer.status_code, lines)
            except httpx.HTTPError as error:
                why = f"{'in the stream' if begun else 'before it'}: {type(error).__name__}: {error}"
            if begun or not why:
                break
            await asyncio.sleep(RETRY_S if left else 0.0)
        if why:
            self.outcome.failures[why] += 1
            self.outcome.failed_at.append(time.monotonic())
            return
        self.outcome.answered += 1
        self.outcome.by_worker[worker] += 1
        self.outcome.longest_s = max(self.outcome.longest_s, time.monotonic() - began)


def _wrong(status: int, lines: list[str]) -> str:
    """Return the defect of an answer, or an empty string if it is complete."""
    if status != 200:
        return f"status {status}"
    if not lines or lines[-1] != "data: [DONE]":
        return f"a stream that ended with {lines[-1] if lines else 'nothing'}"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk.get("choices", ())]
    return "" if any(reasons) else "a stream without a finish_reason"
