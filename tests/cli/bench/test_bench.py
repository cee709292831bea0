"""From received answers to metrics: outcomes, lines, percentiles, prompts, loads; no server."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
from pathlib import Path

import pytest

from baton_api.errors import SetupError
from baton_api.profiles import Point
from baton_cli.bench import load
from baton_cli.bench.connection import BROKEN, Answer, Endpoint
from baton_cli.bench.load import BenchRequest, ClientCost, LoadResult, Measure, Outcome, Prompts, Shape, read
from baton_cli.bench.profiler import fit, fitted, step_s
from baton_cli.bench.report import Objective, level


def chunk(text: str = "", usage: dict[str, object] | None = None) -> bytes:
    data = {"choices": [{"delta": {"content": text}}] if text else [], "usage": usage}
    return b"data: " + json.dumps(data).encode() + b"\n\n"


USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
DONE = b"data: [DONE]\n\n"


def answer(*arrivals: tuple[float, bytes], status: int = 200, failure: str = "") -> Answer:
    return Answer(1.0, status, {}, list(arrivals), 9.0, failure)


def test_bench_whole_answer_is_read_with_its_times() -> None:
    cut = len(chunk("c")) // 2  # a line may come in two parts, and counts when it is whole
    parts = [(2.0, chunk("a")), (2.5, chunk("b") + chunk("c")[:cut]), (4.0, chunk("c")[cut:])]
    result = read(answer(*parts, (4.5, chunk(usage=USAGE) + DONE)), 0.5, 0.0)
    assert (result.ttft_s, result.total_s, result.gaps_s) == (1.0, 3.0, (0.5, 1.5))
    assert (result.prompt_tokens, result.cached_tokens, result.output_tokens) == (9, 4, 3)
    assert result.tpot_s == 1.0 and not result.error


@pytest.mark.parametrize(
    ("kind", "came"),
    [
        ("cut", answer((2.0, chunk("a")), failure=BROKEN)),
        ("cut", answer((2.0, chunk("a")))),
        ("connection lost", answer(status=0, failure=BROKEN)),
        ("no connection", answer(status=0, failure="no connection: refused")),
        ("too slow", answer((2.0, chunk("a")), failure="no end after 3 s")),
        ("status 429", answer((2.0, b'{"error": {"message": "too many"}}'), status=429)),
        ("status 502", answer((2.0, b"<html>"), status=502)),
        ("error in the stream", answer((2.0, b'data: {"error": {"message": "lost"}}\n\n'))),
    ],
)
def test_bench_incomplete_answer_has_an_error_kind(kind: str, came: Answer) -> None:
    result = read(came, 0.0, 0.0)
    assert result.error == kind
    assert result.message


def outcome(ttft_s: float, tokens: int = 11, tpot_s: float = 0.01, error: str = "") -> Outcome:
    return Outcome(
        due_s=0.0,
        late_s=0.0,
        ttft_s=ttft_s,
        total_s=ttft_s + (tokens - 1) * tpot_s,
        prompt_tokens=100,
        cached_tokens=25,
        output_tokens=tokens,
        error=error,
        message="x" * bool(error),
    )


CALM = ClientCost(0.1, 0.001, 0.0)


def test_bench_level_counts_good_and_failed_requests() -> None:
    outcomes = [outcome(0.1), outcome(0.3), outcome(0.1, tpot_s=0.5), outcome(0.0, error="status 503")]
    measured = level("4 clients", 4, LoadResult(2.0, outcomes, CALM), Objective(ttft_s=0.2, tpot_s=0.02))
    assert (measured.requests, measured.failed, measured.errors) == (4, 1, {"status 503": 1})
    assert (measured.good_share, measured.goodput_per_s) == (0.25, 0.5)
    assert (measured.requests_per_s, measured.output_tokens_per_s, measured.cached_share) == (1.5, 16.5, 0.25)
    assert measured.ttft is not None and (measured.ttft.p50, measured.ttft.most) == (0.1, 0.3)
    nothing = level("1", 1, LoadResult(1.0, [outcome(0.0, error="cut")], CALM), Objective())
    assert nothing.ttft is None and nothing.good_share == 0


@pytest.mark.parametrize(
    "cost", [ClientCost(0.9, 0.0, 0.0), ClientCost(0.1, 0.1, 0.0), ClientCost(0.1, 0.0, 0.1)]
)
def test_bench_busy_or_late_client_is_the_bottleneck(cost: ClientCost) -> None:
    assert cost.is_bottleneck and not CALM.is_bottleneck


def test_fit_recovers_a_line_without_negative_parts() -> None:
    chance = random.Random(3)
    for _ in range(50):
        truth = [chance.choice((0.0, chance.uniform(0.001, 0.1))), chance.uniform(1e-5, 1e-3), 1e-9]
        rows = [(1.0, n * length, n * length**2 / 2) for length in (64, 256, 1024, 4096) for n in (1, 4)]
        exact = [sum(c * x for c, x in zip(truth, row, strict=True)) for row in rows]
        noisy = [one * chance.uniform(0.95, 1.05) for one in exact]
        coefficients = fit(rows, noisy)
        assert min(coefficients) >= 0
        for row, seconds in zip(rows, exact, strict=True):
            assert sum(c * x for c, x in zip(coefficients, row, strict=True)) == pytest.approx(
                seconds, rel=0.2
            )
    assert fit([], []) == []


def test_lines_are_drawn_through_each_kind_of_points() -> None:
    points = [
        *(Point(what="prefill", tokens=t, streams=1, seconds=0.01 + 1e-4 * t) for t in (100, 200, 400)),
        *(Point(what="step", tokens=100, streams=s, seconds=0.005 + 1e-3 * s) for s in (1, 2, 4)),
        *(Point(what="transfer", tokens=t, streams=1, seconds=0.001 + 1e-6 * t) for t in (100, 800)),
    ]
    prefill, step, transfer = fitted(points)
    assert prefill.seconds(300, 300) == pytest.approx(0.04, rel=0.02)
    assert step.seconds(3, 300) == pytest.approx(0.008, rel=0.02)
    assert transfer.seconds(500) == pytest.approx(0.0015, rel=0.02)
    assert fitted([])[2].seconds(100) == 0


def test_steps_are_counted_while_all_streams_generate() -> None:
    # Two streams of 20 tokens, 0.1 s each, whose tokens come two by two; the second begins 0.5 s later.
    gaps = tuple(0.0 if n % 2 else 0.2 for n in range(20))
    one = Outcome(due_s=0, late_s=0, ttft_s=1.0, total_s=1.0 + sum(gaps), gaps_s=gaps)
    assert step_s([(0.0, one), (0.5, one)]) == pytest.approx(0.1, rel=0.3)
    assert step_s([(0.0, one), (60.0, one)]) is None


def test_prompts_have_the_wanted_lengths_and_shared_prefixes() -> None:
    measure = Measure(tokens_per_word=2.0, template=10.0)
    generated = Prompts(
        Shape(prompt=210, output=8, shared=100, groups=2, spread=0.1), measure, random.Random(1)
    )
    some = [next(generated) for _ in range(200)]
    lengths = [2 * len(one.prompt.split()) + 10 for one in some]
    assert statistics.mean(lengths) == pytest.approx(210, rel=0.03)
    assert min(lengths) < 200 and max(lengths) > 220
    begins = {" ".join(one.prompt.split()[:50]) for one in some}
    assert len(begins) == 2
    assert len({" ".join(one.prompt.split()[:60]) for one in some}) == 200


def test_trace_is_read_to_its_minute_and_errors_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 500, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}
    path.write_text(json.dumps(row) + "\n" + json.dumps({**row, "timestamp": 120_000}) + "\n")
    assert list(load.rows(path, 1.0)) == [load.Row(0.5, 700, 5, (1, 2))]
    assert len(list(load.rows(path, 3.0))) == 2
    measure = Measure(tokens_per_word=1.0)
    text = load.of_blocks((1, 2), 512, 700, measure)
    assert len(text.split()) == 700
    assert load.of_blocks((1, 3), 512, 700, measure).split()[:512] == text.split()[:512]
    path.write_text("{}\n")
    with pytest.raises(SetupError, match="line 1 is not in Mooncake's format"):
        list(load.rows(path, 1.0))
    with pytest.raises(SetupError, match="Cannot read the trace"):
        list(load.rows(tmp_path / "none", 1.0))


async def test_closed_loop_never_exceeds_its_clients() -> None:
    running, most = 0, 0

    async def send(request: BenchRequest, due_s: float, late_s: float) -> Outcome:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return outcome(0.1)

    played = await load.closed((BenchRequest("a", 1) for _ in range(50)), 4, send)
    assert (len(played.outcomes), most) == (50, 4)


async def test_open_loop_does_not_wait_for_answers() -> None:
    everyone = asyncio.Event()
    count = 0

    async def send(request: BenchRequest, due_s: float, late_s: float) -> Outcome:
        nonlocal count
        count += 1
        if count == 20:
            everyone.set()
        await everyone.wait()
        return outcome(0.1)

    times = zip(
        load.poisson(random.Random(0), 1000.0), (BenchRequest("a", 1) for _ in range(20)), strict=False
    )
    assert len((await load.open_(times, send)).outcomes) == 20


def test_people_come_at_the_rate_that_was_asked_for() -> None:
    times = load.poisson(random.Random(2), 5.0)
    last = [next(times) for _ in range(5000)][-1]
    assert last == pytest.approx(1000, rel=0.05)


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://x", "http://"])
def test_endpoint_invalid_address_is_rejected(url: str) -> None:
    with pytest.raises(SetupError, match="Invalid address"):
        Endpoint(url)


async def test_endpoint_missing_server_is_an_outcome() -> None:
    endpoint = Endpoint("http://127.0.0.1:9", timeout_s=5)
    result = read(await endpoint.post("/v1/chat/completions", {}), 0.0, 0.0)
    assert result.error == "no connection"
    with pytest.raises(SetupError, match="no connection"):
        await endpoint.get("/v1/models")
