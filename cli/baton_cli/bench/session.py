"""
A server under measurement: its model, its tokens per word, and the loads.

The first requests are not measured. They detect whether the server accepts `ignore_eos`, which fixes the
length of responses, and measure the tokens per word.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from baton_api.errors import SetupError
from baton_cli.bench import load, prompts
from baton_cli.bench.connection import Answer, Endpoint
from baton_cli.bench.load import LoadResult
from baton_cli.bench.outcomes import Outcome, read
from baton_cli.bench.prompts import BenchRequest, Measure, Prompts, Shape

PROBE_WORDS = (8, 40)
"""Words of the two prompts that measure the tokens per word."""

PROBE_TOKENS = 2
PATH = "/v1/chat/completions"


@dataclass(slots=True)
class Session:
    """A measured server. Create it by `open_session`."""

    endpoint: Endpoint
    model: str
    measure: Measure
    ignore_eos: bool
    rng: random.Random

    async def closed(self, shape: Shape, clients: int, requests: int) -> LoadResult:
        return await load.closed(self._some(shape, requests), clients, self.send)

    async def open(self, shape: Shape, per_s: float, requests: int) -> LoadResult:
        """Run an open loop with Poisson arrivals, `per_s` per second on average."""
        times = load.poisson(self.rng, per_s)
        return await load.open_(zip(times, self._some(shape, requests), strict=False), self.send)

    async def trace(self, path: Path, minutes: float, speed: float) -> LoadResult:
        """Replay a trace. Raises SetupError if it has no requests."""
        rows = list(prompts.rows(path, minutes))
        if not rows:
            raise SetupError(f"The first {minutes:g} minutes of {path} contain no request.")

        def arrivals() -> Iterator[tuple[float, BenchRequest]]:
            for row in rows:
                text = prompts.of_blocks(row.blocks, prompts.BLOCK_TOKENS, row.prompt_tokens, self.measure)
                yield (row.at_s - rows[0].at_s) / speed, BenchRequest(text, row.output_tokens)

        return await load.open_(arrivals(), self.send)

    async def send(self, request: BenchRequest, due_s: float, late_s: float) -> Outcome:
        """Send a request and return its outcome."""
        return read(await self.ask(request), due_s, late_s)

    async def ask(self, request: BenchRequest) -> Answer:
        """Send a request and return the response."""
        return await self.endpoint.post(PATH, self._body(request))

    def _some(self, shape: Shape, count: int) -> Iterator[BenchRequest]:
        return itertools.islice(Prompts(shape, self.measure, self.rng), count)

    def _body(self, request: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": request.prompt}],
            "max_tokens": request.output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body | {"ignore_eos": True} if self.ignore_eos else body


async def open_session(endpoint: Endpoint, model: str, seed: int) -> Session:
    """Send two requests and return a session. Raises SetupError if one fails."""
    if not model:
        listed = (await endpoint.get("/v1/models")).get("data") or []
        if not listed:
            raise SetupError(f"{endpoint.url} lists no model. Set one with --model.")
        model = str(listed[0]["id"])
    session = Session(endpoint, model, Measure(), True, random.Random(seed))
    few = await _probe(session, PROBE_WORDS[0])
    if few.error == "status 400":  # the server rejects fields that OpenAI does not have
        session.ignore_eos = False
        few = await _probe(session, PROBE_WORDS[0])
    many = await _probe(session, PROBE_WORDS[1]) if not few.error else few
    for probe in (few, many):
        if probe.error:
            raise SetupError(f"The first request to {endpoint.url} failed: {probe.error}. {probe.message}")
    if few.prompt_tokens and many.prompt_tokens > few.prompt_tokens:
        session.measure = Measure.learn(
            (PROBE_WORDS[0], few.prompt_tokens), (PROBE_WORDS[1], many.prompt_tokens)
        )
    return session


async def _probe(session: Session, words: int) -> Outcome:
    return await session.send(
        BenchRequest(prompts.text(session.rng.getrandbits(48), words), PROBE_TOKENS), 0.0, 0.0
    )


@contextlib.asynccontextmanager
async def target(
    model: str, url: str, api_key: str, *, disaggregated: bool
) -> AsyncIterator[tuple[str, str]]:
    """
    Yield URL and key of the service. With a `model`, start a service of one prefill and one decode worker.

    With `disaggregated`, the decode worker computes no prompts. Raises SetupError if the start fails.
    """
    if not model:
        yield url, api_key
        return
    from baton_cli import up
    from baton_cli.display import Display
    from baton_cli.up import open_service

    display = Display(Console(stderr=True), logs=False)
    router = {"port": 0, "dashboard": False} | ({"local_prefill_max_tokens": 0} if disaggregated else {})
    plan = up.make_plan(display, 1, 1, router, {"model": model})
    async with open_service(plan, display) as service:
        yield service.url, service.api_key
