"""
One server under measurement: what it calls its model, how its tokens count, and each load put on it.

The first requests are not measured. They show whether the server takes `ignore_eos`, which keeps answers as
long as they are meant to be, and how many tokens a word is.
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
"""Of the two prompts from which the tokens of a word are learned."""

PROBE_TOKENS = 2
PATH = "/v1/chat/completions"


@dataclass(slots=True)
class Session:
    """Made by `open_session`."""

    endpoint: Endpoint
    model: str
    measure: Measure
    ignore_eos: bool
    rng: random.Random

    async def closed(self, shape: Shape, clients: int, requests: int) -> LoadResult:
        return await load.closed(self._some(shape, requests), clients, self.send)

    async def open(self, shape: Shape, per_s: float, requests: int) -> LoadResult:
        """Requests come by chance, `per_s` a second on average."""
        times = load.poisson(self.rng, per_s)
        return await load.open_(zip(times, self._some(shape, requests), strict=False), self.send)

    async def trace(self, path: Path, minutes: float, speed: float) -> LoadResult:
        """Raises SetupError if there is nothing in it."""
        found = list(prompts.rows(path, minutes))
        if not found:
            raise SetupError(f"The first {minutes:g} minutes of {path} hold no request.")

        def arrivals() -> Iterator[tuple[float, BenchRequest]]:
            for row in found:
                text = prompts.of_blocks(row.blocks, prompts.BLOCK_TOKENS, row.prompt_tokens, self.measure)
                yield (row.at_s - found[0].at_s) / speed, BenchRequest(text, row.output_tokens)

        return await load.open_(arrivals(), self.send)

    async def send(self, asked: BenchRequest, due_s: float, late_s: float) -> Outcome:
        """One request, and what became of it."""
        return read(await self.ask(asked), due_s, late_s)

    async def ask(self, asked: BenchRequest) -> Answer:
        """The same as it came."""
        return await self.endpoint.post(PATH, self._body(asked))

    def _some(self, shape: Shape, count: int) -> Iterator[BenchRequest]:
        return itertools.islice(Prompts(shape, self.measure, self.rng), count)

    def _body(self, asked: BenchRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": asked.prompt}],
            "max_tokens": asked.output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body | {"ignore_eos": True} if self.ignore_eos else body


async def open_session(endpoint: Endpoint, model: str, seed: int) -> Session:
    """Raises SetupError if the server does not answer two requests."""
    if not model:
        listed = (await endpoint.get("/v1/models")).get("data") or []
        if not listed:
            raise SetupError(f"{endpoint.url} serves no model. Name one with --model.")
        model = str(listed[0]["id"])
    session = Session(endpoint, model, Measure(), True, random.Random(seed))
    few = await _probe(session, PROBE_WORDS[0])
    if few.error == "status 400":  # a server that takes no field that OpenAI has not
        session.ignore_eos = False
        few = await _probe(session, PROBE_WORDS[0])
    many = await _probe(session, PROBE_WORDS[1]) if not few.error else few
    for one in (few, many):
        if one.error:
            raise SetupError(f"{endpoint.url} does not answer a first request: {one.error}. {one.message}")
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
async def target(model: str, url: str, api_key: str, *, apart: bool) -> AsyncIterator[tuple[str, str]]:
    """
    `url` and its key; or, with a `model`, those of a router with a prefill and a decode worker that are
    started for it on this machine.

    `apart`: then a decode worker computes no prompt itself. Raises SetupError if they cannot start.
    """
    if not model:
        yield url, api_key
        return
    from baton_cli import up
    from baton_cli.display import Display
    from baton_cli.up import open_service

    display = Display(Console(stderr=True), logs=False)
    front = {"port": 0, "dashboard": False} | ({"local_prefill_max_tokens": 0} if apart else {})
    plan = up.make_plan(display, 1, 1, front, {"model": model})
    async with open_service(plan, display) as service:
        yield service.url, service.api_key
