"""
Load on a server: prompts, a session that measures them, closed and open loops and traces, and outcomes.

In a closed loop each client sends its next request after a response; that measures maximum throughput. In an
open loop requests arrive at random times at a given rate, so queueing is realistic.

The first requests are not measured. They detect whether the server accepts `ignore_eos`, which fixes the
length of responses, and measure the tokens per word.

Prompts are random words, so two of them share only their intended prefix. Tokens per word and the overhead of
the chat template are measured once, from the `usage` of two responses.

Only complete responses count: a stream without `[DONE]` was cut, whatever its status.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from baton_api.errors import SetupError
from baton_cli.bench.connection import Answer, Endpoint, explained

# fmt: off
WORDS = [
    "time", "person", "year", "way", "day", "thing", "man", "world", "life", "hand", "part", "child",
    "eye", "woman", "place", "work", "week", "case", "point", "government", "company", "number", "group",
    "problem", "fact", "water", "room", "mother", "area", "money", "story", "month", "lot", "right",
    "study", "book", "word", "business", "issue", "side", "kind", "head", "house", "service", "friend",
    "father", "power", "hour", "game", "line", "end", "member", "law", "car", "city", "community", "name",
    "president", "team", "minute", "idea", "body", "information", "back", "parent", "face", "level",
    "office", "door", "health", "art", "war", "history", "party", "result", "change", "morning", "reason",
    "research", "girl", "guy", "moment", "air", "teacher", "force", "education",
]
# fmt: on

PREFIX_SEED = 1_000_003
"""Separates the seeds of prefixes and trace blocks from those of requests."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of requests, in tokens."""

    prompt: int
    output: int
    shared: int = 0
    """Tokens of the prefix that a group shares."""
    groups: int = 1
    """Number of different prefixes."""
    spread: float = 0.0
    """Relative variation of lengths (0-1)."""


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request."""

    prompt: str
    output: int


@dataclass(frozen=True, slots=True)
class Measure:
    """Converts tokens to words, for one server and model."""

    tokens_per_word: float = 1.3
    template: float = 0.0
    """Tokens of a prompt in addition to its words."""

    @classmethod
    def learn(cls, few: tuple[int, int], many: tuple[int, int]) -> Measure:
        """
        Learn from two prompts: words, and tokens as the server counted them.

        >>> Measure.learn((10, 25), (110, 175))
        Measure(tokens_per_word=1.5, template=10.0)
        """
        tokens_per_word = (many[1] - few[1]) / (many[0] - few[0])
        return cls(tokens_per_word, few[1] - tokens_per_word * few[0])

    def words(self, tokens: float) -> int:
        """Return the words for a number of tokens; at least 1."""
        return max(1, round(tokens / self.tokens_per_word))


def text(seed: int, words: int) -> str:
    """Return random words. Texts of different seeds share no prefix."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


class Prompts:
    """An endless iterator of requests. All randomness comes from `rng`."""

    def __init__(self, shape: Shape, measure: Measure, rng: random.Random) -> None:
        self._shape = shape
        self._measure = measure
        self._rng = rng

    def __iter__(self) -> Prompts:
        return self

    def __next__(self) -> BenchRequest:
        shape, measure = self._shape, self._measure
        total = self._length(shape.prompt)
        shared = min(shape.shared, total)
        begin = ""
        if shared:
            group = self._rng.randrange(shape.groups)
            begin = text(PREFIX_SEED + group, measure.words(shared)) + " "
        rest = measure.words(max(1.0, total - shared - measure.template))
        return BenchRequest(begin + text(self._rng.getrandbits(48), rest), self._length(shape.output))

    def _length(self, middle: int) -> int:
        spread = self._shape.spread
        return max(1, round(middle * self._rng.uniform(1 - spread, 1 + spread)))


def of_blocks(blocks: tuple[int, ...], block_tokens: int, tokens: int, measure: Measure) -> str:
    """Return a prompt of blocks with `block_tokens` tokens, cut to `tokens`."""
    prompt = " ".join(text(PREFIX_SEED + (1 << 32) + block, measure.words(block_tokens)) for block in blocks)
    return " ".join(prompt.split(" ")[: measure.words(max(1.0, tokens - measure.template))])


BLOCK_TOKENS = 512
"""Tokens of a block of a trace."""


@dataclass(frozen=True, slots=True)
class Row:
    """One request of a trace."""

    at_s: float
    """Time since the start of the trace."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """Ids of the blocks of its prompt, 512 tokens each."""


def rows(path: Path, minutes: float) -> Iterator[Row]:
    """
    Yield the requests in the first minutes of a trace in Mooncake's format. Raises SetupError.

    A line has `timestamp` (milliseconds), `input_length`, `output_length` (tokens) and `hash_ids`.
    Each id stands for 512 tokens; prompts with the same first ids share a prefix.
    """
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                row = _row(line, f"{path}, line {number}")
                if row.at_s >= minutes * 60:
                    return
                yield row
    except OSError as error:
        raise SetupError(f"Cannot read the trace {path}: {error.strerror}.") from error


def _row(line: str, where: str) -> Row:
    try:
        given = json.loads(line)
        blocks = tuple(int(block) for block in given["hash_ids"])
        return Row(given["timestamp"] / 1e3, int(given["input_length"]), int(given["output_length"]), blocks)
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(
            f"{where} is not in Mooncake's format. Expected timestamp, input_length, output_length, hash_ids."
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a request. The times of a failed request are not valid."""

    due_s: float
    """Scheduled start, from the start of the load."""
    late_s: float
    """Delay of the actual start."""
    ttft_s: float = 0.0
    total_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    """Times between arrivals of text."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""
    """Kind of the error. Empty after a success."""
    message: str = ""

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first one; 0 for a single token."""
        return (self.total_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


Send = Callable[[BenchRequest, float, float], Awaitable[Outcome]]
"""Sends a request, given its scheduled start and its delay."""

LAG_INTERVAL_S = 0.02
"""Interval of the measurements of the event loop's lag."""


@dataclass(frozen=True, slots=True)
class ClientCost:
    """The cost of the client itself."""

    cpu_share: float
    """Ratio of one core."""
    lag_p99_s: float
    """Lag of the event loop."""
    late_p99_s: float
    """Delay of requests."""

    CPU_LIMIT = 0.8
    LATE_LIMIT_S = 0.05

    @property
    def is_bottleneck(self) -> bool:
        """Whether the client limited the results."""
        return self.cpu_share > self.CPU_LIMIT or max(self.lag_p99_s, self.late_p99_s) > self.LATE_LIMIT_S


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The outcomes of a load."""

    seconds: float
    """From the first request to the last response."""
    outcomes: list[Outcome]
    client: ClientCost


async def closed(requests: Iterable[BenchRequest], clients: int, send: Send) -> LoadResult:
    """Run a closed loop."""
    waiting = iter(requests)

    async def client(began: float) -> list[Outcome]:
        done = []
        for request in waiting:
            done.append(await send(request, time.perf_counter() - began, 0.0))
        return done

    async def play(began: float) -> list[Outcome]:
        by_client = await asyncio.gather(*(client(began) for _ in range(clients)))
        return sorted(itertools.chain.from_iterable(by_client), key=lambda outcome: outcome.due_s)

    return await _watched(play)


async def open_(arrivals: Iterable[tuple[float, BenchRequest]], send: Send) -> LoadResult:
    """Run an open loop: send each request at its time, independent of the others."""

    async def play(began: float) -> list[Outcome]:
        running: list[asyncio.Task[Outcome]] = []
        async with asyncio.TaskGroup() as group:
            for due_s, request in arrivals:
                await asyncio.sleep(max(0.0, began + due_s - time.perf_counter()))
                late_s = time.perf_counter() - began - due_s
                running.append(group.create_task(_sent(send, request, due_s, late_s)))
        return [task.result() for task in running]

    return await _watched(play)


async def _sent(send: Send, request: BenchRequest, due_s: float, late_s: float) -> Outcome:
    return await send(request, due_s, late_s)


def poisson(rng: random.Random, per_s: float) -> Iterator[float]:
    """Yield the times of a Poisson process, without end."""
    at_s = 0.0
    while True:
        at_s += rng.expovariate(per_s)
        yield at_s


async def _watched(play: Callable[[float], Awaitable[list[Outcome]]]) -> LoadResult:
    lags: list[float] = []
    watch = asyncio.create_task(_watch(lags))
    cpu, began = time.process_time(), time.perf_counter()
    try:
        outcomes = await play(began)
    finally:
        watch.cancel()
    seconds = time.perf_counter() - began
    late = [outcome.late_s for outcome in outcomes]
    cost = ClientCost((time.process_time() - cpu) / seconds, _p99(lags), _p99(late))
    return LoadResult(seconds, outcomes, cost)


async def _watch(lags: list[float]) -> None:
    while True:
        due = time.perf_counter() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        lags.append(time.perf_counter() - due)


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))] if values else 0.0


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
        return await closed(self._some(shape, requests), clients, self.send)

    async def open(self, shape: Shape, per_s: float, requests: int) -> LoadResult:
        """Run an open loop with Poisson arrivals, `per_s` per second on average."""
        times = poisson(self.rng, per_s)
        return await open_(zip(times, self._some(shape, requests), strict=False), self.send)

    async def trace(self, path: Path, minutes: float, speed: float) -> LoadResult:
        """Replay a trace. Raises SetupError if it has no requests."""
        trace = list(rows(path, minutes))
        if not trace:
            raise SetupError(f"The first {minutes:g} minutes of {path} contain no request.")

        def arrivals() -> Iterator[tuple[float, BenchRequest]]:
            for row in trace:
                text = of_blocks(row.blocks, BLOCK_TOKENS, row.prompt_tokens, self.measure)
                yield (row.at_s - trace[0].at_s) / speed, BenchRequest(text, row.output_tokens)

        return await open_(arrivals(), self.send)

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
    return await session.send(BenchRequest(text(session.rng.getrandbits(48), words), PROBE_TOKENS), 0.0, 0.0)


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


def read(answer: Answer, due_s: float, late_s: float) -> Outcome:
    """Parse a response. Token counts come from `usage`, or else from the number of arrivals."""
    error, message = failure(answer)
    if error:
        return Outcome(due_s=due_s, late_s=late_s, error=error, message=message[:300])
    times: list[float] = []
    usage: dict[str, Any] = {}
    done = False
    last = answer.sent
    for moment, data in events(answer):
        if data == b"[DONE]":
            done = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            message = str((chunk["error"] or {}).get("message", ""))
            return Outcome(due_s=due_s, late_s=late_s, error="error in the stream", message=message[:300])
        usage = chunk.get("usage") or usage
        if any(map(_has_text, chunk.get("choices") or ())):
            times.append(moment)
            last = moment
    if not done:
        return Outcome(due_s=due_s, late_s=late_s, error="cut", message="The stream ended without [DONE].")
    details = usage.get("prompt_tokens_details") or {}
    return Outcome(
        due_s=due_s,
        late_s=late_s,
        ttft_s=(times[0] if times else last) - answer.sent,
        total_s=last - answer.sent,
        gaps_s=tuple(later - before for before, later in itertools.pairwise(times)),
        prompt_tokens=usage.get("prompt_tokens") or 0,
        cached_tokens=details.get("cached_tokens") or 0,
        output_tokens=usage.get("completion_tokens") or len(times),
    )


def failure(answer: Answer) -> tuple[str, str]:
    """Return kind and message of an error. Empty for a response that can be parsed."""
    if answer.failure.startswith("no connection"):
        return "no connection", answer.failure
    if answer.failure.startswith("no end"):
        return "too slow", answer.failure
    if answer.status and answer.status != 200:
        return f"status {answer.status}", explained(answer)
    if answer.failure:
        return "cut" if answer.arrivals else "connection lost", answer.failure
    return "", ""


def events(answer: Answer) -> Iterator[tuple[float, bytes]]:
    """Yield the `data:` lines of a stream with their arrival times."""
    rest = b""
    for moment, part in answer.arrivals:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield moment, line[5:].strip()


def _has_text(choice: dict[str, Any]) -> bool:
    """Return whether a chunk has text or tool calls. The first one may contain only the role."""
    delta = choice.get("delta") or {}
    text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
    return bool(text or delta.get("tool_calls"))
