"""
`baton bench --find`: measure a model on the machines of a Baton service, and write a profile.

Prefill, decode steps and transfers are measured through the router, whose responses contain the times of
each phase (`server-timing`). Lines are fitted to the measurements. The service must be otherwise idle.
"""

from __future__ import annotations

import asyncio
import itertools
import platform
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.text import Text

from baton_api import __version__, headers, metrics, profiles
from baton_api.errors import SetupError
from baton_api.profiles import Objectives, Point, PrefillLine, Profile, StepLine, TransferLine
from baton_api.workers import Role
from baton_cli import router_workers
from baton_cli.bench import load
from baton_cli.bench.command import BenchPlan, BenchTarget, Say
from baton_cli.bench.connection import Answer, Endpoint
from baton_cli.bench.load import BenchRequest, Outcome, Session, open_session, read, target
from baton_cli.bench.report import significant
from baton_cli.router_workers import ANSWER_S, Row, reported_load


def find(where: BenchTarget, wanted: BenchPlan, path: Path, repeats: int, as_json: bool) -> None:
    """Measure the performance of a model, and write a profile."""
    console = Console()
    with Console(stderr=True).status("") as status:
        profile = asyncio.run(_find(where, wanted, repeats, status.update))
    profiles.write(profile, path)
    if as_json:
        sys.stdout.write(path.read_text())
        return
    console.print(Text.assemble((profile.model, "bold"), f" on {profile.machine}\n"))
    for line in described(profile):
        console.print(Text(line), soft_wrap=True)
    console.print(Text(f"\nWritten to {path}: baton router --profile {path}", style="dim"), soft_wrap=True)


async def _find(where: BenchTarget, wanted: BenchPlan, repeats: int, say: Say) -> Profile:
    say("starting" if where.started else f"reading the workers of {where.url}")
    async with target(where.started, where.url, where.api_key, disaggregated=True) as (url, key):
        endpoint = Endpoint(url, key, wanted.timeout_s)
        try:
            capacity = await asyncio.to_thread(lambda: DecodeCapacity.of(router_workers.read(url, key)))
            session = await open_session(endpoint, where.model, wanted.seed)
            return await Profiler(session, capacity, repeats, say).find(wanted.objectives)
        finally:
            endpoint.close()


def described(profile: Profile) -> Iterator[str]:
    """Describe a profile by prefill, step and transfer times, and by capacity."""
    objectives, capacity = profile.objectives, profile.capacity
    for length in sorted(
        {point.tokens for point in profile.points if point.what == "transfer"} or {objectives.prompt_tokens}
    ):
        yield f"prefill of {length} tokens: {significant(1e3 * profile.prefill.seconds(length, length))} ms"
    for streams in sorted({point.streams for point in profile.points if point.what == "step"}):
        seconds = profile.step.seconds(streams, streams * objectives.prompt_tokens)
        yield (
            f"decode step of {streams} streams with {objectives.prompt_tokens} tokens: "
            f"{significant(1e3 * seconds)} ms, {streams / seconds if seconds else 0:.0f} tokens/s"
        )
    moved = profile.transfer.seconds(objectives.prompt_tokens)
    yield f"transfer of {objectives.prompt_tokens} tokens: {significant(1e3 * moved)} ms"
    yield (
        f"capacity with a time to first token of {1e3 * objectives.ttft_s:g} ms and "
        f"{1e3 * objectives.itl_s:g} ms per token, {objectives.prompt_tokens} in "
        f"({100 * objectives.cached_share:.0f} % cached), {objectives.output_tokens} out:"
    )
    yield f"  prefill worker: {capacity.prefill_tokens_per_s:.0f} tokens/s"
    yield f"  decode worker: {capacity.decode_tokens_per_s:.0f} tokens/s, {capacity.decode_streams} streams"
    yield (
        f"  {significant(capacity.prefill_per_decode, 2)} prefill workers per decode worker"
        if capacity.prefill_per_decode
        else "  this machine cannot meet these objectives"
    )


def fit(inputs: Sequence[Sequence[float]], outcomes: Sequence[float]) -> list[float]:
    """
    Fit non-negative coefficients to measurements, and return them; all 0 without measurements.

    The relative error is minimized, so that short prompts count as much as long ones. There are few columns,
    so every subset is tried. Outcomes are above 0.

    >>> [round(one, 6) for one in fit([(1, 1), (1, 2), (1, 4)], [3.0, 5.0, 9.0])]
    [1.0, 2.0]
    """
    width = len(inputs[0]) if inputs else 0
    rows = [[value / outcome for value in row] for row, outcome in zip(inputs, outcomes, strict=True)]
    best, least = [0.0] * width, float(len(rows))
    for count in range(1, width + 1):
        for chosen in itertools.combinations(range(width), count):
            solution = _least_squares([[row[column] for column in chosen] for row in rows])
            if solution is None or min(solution) < 0:
                continue
            coefficients = [0.0] * width
            for column, value in zip(chosen, solution, strict=True):
                coefficients[column] = value
            error = sum((sum(c * x for c, x in zip(coefficients, row, strict=True)) - 1) ** 2 for row in rows)
            if error < least * (1 - 1e-9):
                best, least = coefficients, error
    return best


def _least_squares(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Solve for outcomes of 1. Returns None if the columns are linearly dependent."""
    width = len(rows[0])
    matrix = [
        [sum(row[i] * row[j] for row in rows) for j in range(width)] + [sum(row[i] for row in rows)]
        for i in range(width)
    ]
    scales = [matrix[i][i] ** 0.5 or 1.0 for i in range(width)]
    for i in range(width):
        matrix[i] = [
            value / scales[i] / (scales[j] if j < width else 1.0) for j, value in enumerate(matrix[i])
        ]
    for i in range(width):
        pivot = max(range(i, width), key=lambda row: abs(matrix[row][i]))
        if abs(matrix[pivot][i]) < 1e-9:
            return None
        matrix[i], matrix[pivot] = matrix[pivot], matrix[i]
        for j in range(width):
            if j != i:
                share = matrix[j][i] / matrix[i][i]
                matrix[j] = [a - share * b for a, b in zip(matrix[j], matrix[i], strict=True)]
    return [matrix[i][width] / matrix[i][i] / scales[i] for i in range(width)]


LENGTHS = (64, 256, 1024, 4096)
"""Measured prompt lengths in tokens."""

AT_ONCE = (1, 4)
"""Numbers of prompts sent at once."""

STREAMS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 1024)
ANSWER_TOKENS = 32
LEAST_STEPS = 8
"""Minimum number of steps in which all streams generate."""

LONGEST_ANSWER = 256
"""Output length is doubled up to this limit until all streams overlap."""

USED_SHARE = 0.7
"""Maximum fraction of the KV cache that a measurement uses, so that no request is queued."""

DEFAULT_STREAMS = 64
"""Running streams of a worker that does not report its limit."""


@dataclass(frozen=True, slots=True)
class DecodeCapacity:
    """The capacity of one decode worker."""

    kv_tokens: int
    context: int
    """Prompt and output tokens of a stream together."""
    streams: int

    @classmethod
    def of(cls, workers: Sequence[Row]) -> DecodeCapacity:
        """
        Read the capacity of the first decode worker. Blocks.

        Raises SetupError if no decode worker is ready, or its KV cache is unknown.
        """
        decodes = [row for row in workers if row["role"] != Role.PREFILL and row["load"]]
        if not decodes:
            raise SetupError("Cannot measure: no decode worker is ready.")
        load = reported_load(decodes[0])
        if load is None:
            raise SetupError(
                f"Cannot measure: the size of the KV cache of {decodes[0]['worker']} is unknown, because the "
                "worker exposes no metrics. Start SGLang with --enable-metrics."
            )
        return cls(
            load["total_blocks"] * load["block_size"],
            load["max_model_len"] or max(LENGTHS),
            _running_limit(f"http://{decodes[0]['worker']}") or DEFAULT_STREAMS,
        )

    def holds(self, streams: int, tokens: int) -> bool:
        return (
            streams <= self.streams
            and tokens <= self.context
            and streams * tokens <= USED_SHARE * self.kv_tokens
        )


def _running_limit(worker: str) -> int:
    """Return how many streams a worker runs. 0: its metrics do not say it, or it cannot be reached."""
    with httpx.Client(trust_env=False, timeout=ANSWER_S) as client:
        found = router_workers.samples(client, worker)
    return round(sum(sample.value for sample in found if sample.name == metrics.WORKER_RUNNING_LIMIT.name))


@dataclass(frozen=True, slots=True)
class Timing:
    """Times of a prompt as the router reports them."""

    prefill_s: float
    transfer_s: float

    @classmethod
    def of(cls, answer: Answer) -> Timing:
        """
        Parse `server-timing`.

        >>> answer = Answer(0.0, headers={"server-timing": "queue;dur=0.5, prefill;dur=14.0"})
        >>> Timing.of(answer)
        Timing(prefill_s=0.014, transfer_s=0.0)
        """
        parts = [
            part.strip().partition(";dur=") for part in answer.headers.get(headers.TIMING, "").split(",")
        ]
        took = {name: float(value) / 1e3 for name, separator, value in parts if separator}
        return cls(took.get("prefill", 0.0), took.get("transfer", 0.0))


class Profiler:
    """Measures one service. `say` receives progress messages."""

    def __init__(
        self, session: Session, capacity: DecodeCapacity, repeats: int, say: Callable[[str], object]
    ) -> None:
        self._session = session
        self._capacity = capacity
        self._repeats = repeats
        self._say = say

    async def find(self, objectives: Objectives) -> Profile:
        """Run all measurements. Raises SetupError if a request fails."""
        points = [point async for point in self._prompts()]
        points += [point async for point in self._steps()]
        prefill, step, transfer = fitted(points)
        capacity = self._capacity
        return Profile(
            model=self._session.model,
            machine=machine(),
            baton=__version__,
            measured_at=time.time(),
            prefill=prefill,
            step=step,
            transfer=transfer,
            kv_tokens=capacity.kv_tokens,
            max_streams=capacity.streams,
            objectives=objectives,
            capacity=profiles.capacity(
                prefill, step, transfer, capacity.kv_tokens, capacity.streams, objectives
            ),
            points=tuple(points),
        )

    async def _prompts(self) -> AsyncIterator[Point]:
        """Measure prefill of each length, alone and concurrently, and transfers."""
        for length, count in itertools.product(LENGTHS, AT_ONCE):
            if not self._capacity.holds(count, length + ANSWER_TOKENS):
                continue
            self._say(f"prompts of {length} tokens, {count} at once")
            rounds = [await self._round(length, count) for _ in range(self._repeats + 1)][1:]
            tokens = round(statistics.median(measured[0] for measured in rounds))
            seconds = statistics.median(measured[1] for measured in rounds)
            yield Point(what="prefill", tokens=tokens, streams=count, seconds=seconds)
            moved = statistics.median(measured[2] for measured in rounds)
            if count == 1 and moved:
                yield Point(what="transfer", tokens=tokens, streams=1, seconds=moved)

    async def _round(self, length: int, count: int) -> tuple[int, float, float]:
        """Return the tokens of a prompt, the time of all prompts, and the transfer time of the last one."""
        requests = [BenchRequest(self._text(length), 1) for _ in range(count)]
        began = time.perf_counter()
        answers = await asyncio.gather(*map(self._ask, requests))
        timings = [Timing.of(answer) for answer, _ in answers]
        together = max(answer.sent + outcome.ttft_s for answer, outcome in answers) - began
        single = timings[0].prefill_s or answers[0][1].ttft_s
        tokens = round(statistics.mean(outcome.prompt_tokens for _, outcome in answers))
        return tokens, single if count == 1 else together, timings[-1].transfer_s

    async def _steps(self) -> AsyncIterator[Point]:
        for context, count in itertools.product(CONTEXTS, STREAMS):
            if not self._capacity.holds(count, context + LONGEST_ANSWER):
                continue
            self._say(f"{count} streams with {context} tokens each")
            rounds = [
                measured for _ in range(self._repeats) if (measured := await self._stream(context, count))
            ]
            if rounds:
                tokens = round(statistics.median(tokens for tokens, _ in rounds))
                seconds = statistics.median(seconds for _, seconds in rounds)
                yield Point(what="step", tokens=tokens, streams=count, seconds=seconds)

    async def _stream(self, context: int, count: int) -> tuple[int, float] | None:
        """Return the context of a stream in tokens and the time of a step. None if streams do not overlap."""
        texts = [self._text(context) for _ in range(count)]
        # Fill the prefix caches first, so that all streams begin to generate at about the same time.
        await asyncio.gather(*(self._ask(BenchRequest(text, 1)) for text in texts))
        length = ANSWER_TOKENS
        while length <= LONGEST_ANSWER:
            answers = await asyncio.gather(*(self._ask(BenchRequest(text, length)) for text in texts))
            seconds = step_s([(answer.sent, outcome) for answer, outcome in answers])
            if seconds is not None:
                tokens = statistics.mean(
                    outcome.prompt_tokens + outcome.output_tokens / 2 for _, outcome in answers
                )
                return round(tokens), seconds
            length *= 2
        return None

    async def _ask(self, request: BenchRequest) -> tuple[Answer, Outcome]:
        answer = await self._session.ask(request)
        outcome = read(answer, 0.0, 0.0)
        if outcome.error:
            raise SetupError(f"Cannot measure: a request failed ({outcome.error}): {outcome.message}")
        return answer, outcome

    def _text(self, tokens: int) -> str:
        measure = self._session.measure
        words = measure.words(max(1.0, tokens - measure.template))
        return load.text(self._session.rng.getrandbits(48), words)


def fitted(points: Sequence[Point]) -> tuple[PrefillLine, StepLine, TransferLine]:
    """Fit lines to the measured points."""
    of = {what: [point for point in points if point.what == what] for what in ("prefill", "step", "transfer")}
    prefill = (
        fit(
            [
                (1.0, point.streams * point.tokens, point.streams * point.tokens**2 / 2)
                for point in of["prefill"]
            ],
            [point.seconds for point in of["prefill"]],
        )
        or [0.0] * 3
    )
    step = (
        fit(
            [(1.0, point.streams, point.streams * point.tokens) for point in of["step"]],
            [point.seconds for point in of["step"]],
        )
        or [0.0] * 3
    )
    transfer = (
        fit([(1.0, point.tokens) for point in of["transfer"]], [point.seconds for point in of["transfer"]])
        or [0.0] * 2
    )
    return (
        PrefillLine(base_s=prefill[0], token_s=prefill[1], pair_s=prefill[2]),
        StepLine(base_s=step[0], stream_s=step[1], token_s=step[2]),
        TransferLine(start_s=transfer[0], token_s=transfer[1]),
    )


def step_s(streams: Sequence[tuple[float, Outcome]]) -> float | None:
    """
    Return the time of a decode step while all streams generate, given each stream with its start.

    Several tokens may arrive together, so tokens are counted over the whole period. None if it is too short.
    """
    begin = max(sent + outcome.ttft_s for sent, outcome in streams)
    end = min(sent + outcome.total_s for sent, outcome in streams)
    moments = itertools.chain.from_iterable(
        itertools.accumulate(outcome.gaps_s, initial=sent + outcome.ttft_s) for sent, outcome in streams
    )
    tokens = sum(begin < moment <= end for moment in moments)
    if end <= begin or tokens < LEAST_STEPS * len(streams):
        return None
    return (end - begin) * len(streams) / tokens


def machine() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else f"{platform.machine()} {platform.processor()}".strip()
