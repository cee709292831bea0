"""Captured decode passes, by a fake of CUDA's graphs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from baton_engine.batch import Batch, BatchRow, StaticBatch
from baton_engine.captured_passes import CapturedPasses
from baton_engine.graphs import CaptureLimits, GraphModel, row_counts, with_graphs
from baton_engine.kv.cache import KVCache
from baton_engine.model.decoder import Model
from baton_engine.requests import FinishReason
from baton_engine.scheduling.limits import EngineLimits
from tests.engine.fake_graphs import FakeGraphs, TensorModel
from tests.engine.fake_model import SPEC, FakeModel, make_cache
from tests.engine.fake_streams import on_device
from tests.engine.greedy import CPU
from tests.engine.serving import Serving, request_of

LIMITS = CaptureLimits(rows=16, memory=2**30, seconds=60)
STOPPED = itertools.repeat(0.0)
"""A clock."""

ENGINE = EngineLimits(max_model_len=64, max_running=16)


def captured(model: Model, cache: KVCache, cuda: FakeGraphs, **how: Any) -> Model:
    arguments = {"limits": LIMITS, "taken": lambda: 2**30, "clock": lambda: 0.0, **how}
    return with_graphs(model, on_device(cache, cuda), ENGINE, **arguments)


class Graphs(Serving):
    """An engine whose decode passes are replayed."""

    def __enter__(self) -> Graphs:
        super().__enter__()
        return self

    def __init__(self, model: FakeModel | None = None, **how: Any) -> None:
        self.cuda = FakeGraphs()

        def wrap(plain: Model, cache: KVCache) -> Model:
            graphs = captured(plain, cache, self.cuda)
            assert isinstance(graphs, GraphModel)
            self.graphs = graphs
            return graphs

        super().__init__(model=model or TensorModel(), wrap=wrap, **{"max_model_len": 64, **how})


def test_row_counts_end_at_the_most() -> None:
    for most in range(300):
        counts = row_counts(most)
        assert counts == sorted(set(counts))
        assert not most or (counts[0] == 1 and counts[-1] == most)
        assert all(more <= max(2 * fewer, fewer + 32) for fewer, more in itertools.pairwise(counts))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16])
def test_graph_engine_gives_the_same_tokens(count: int) -> None:
    """Requests of other lengths end at other steps, so batches of many sizes are replayed."""
    with Graphs() as serving:
        requests = [
            request_of(f"r{number}", 3 + 2 * number, seed=number, max_tokens=4 + 3 * (number % 4))
            for number in range(count)
        ]
        assert serving.run(*requests) == [serving.reference(request) for request in requests]
        serving.at_rest()
        assert serving.graphs.replays > 0
        assert sum(graph.replays for graph in serving.cuda.captured) == serving.graphs.replays


def test_graph_engine_sampled_tokens_are_the_same() -> None:
    with Graphs() as serving:
        requests = [
            request_of(f"r{number}", 5, seed=number, temperature=1.0, top_p=0.9, frequency_penalty=0.5)
            for number in range(5)
        ]
        assert serving.run(*requests) == [serving.reference(request) for request in requests]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_graph_engine_replays_passes_with_drafts(count: int) -> None:
    """Tokens of a draft are rows of a captured pass. Those of 5 requests do not always fit one of 16 rows."""
    with Graphs(speculation_tokens=8, clock=itertools.count().__next__) as serving:
        requests = [request_of(f"r{number}", 5, seed=number, max_tokens=30) for number in range(count)]
        expected = [serving.reference(request) for request in requests]
        predicted = [
            replace(request, prediction=tuple(answer[:20]))
            for request, answer in zip(requests, expected, strict=True)
        ]
        before = serving.model.passes
        assert serving.run(*predicted) == expected
        totals = serving.engine.snapshot().totals
        assert totals.accepted_tokens > 10 * count
        plain = serving.model.passes - before - 1  # without that of the prompts
        assert (plain > 0) == (count == 5)
        assert serving.graphs.replays > 10
        serving.at_rest()


def test_graph_engine_retracts_and_continues() -> None:
    with Graphs(blocks=14) as serving:
        requests = [request_of(f"r{number}", 6, seed=number, max_tokens=20) for number in range(4)]
        assert serving.run(*requests) == [serving.reference(request) for request in requests]
        assert serving.engine.snapshot().totals.retractions > 0
        serving.at_rest()


def test_graph_rows_with_bad_logits_end_alone() -> None:
    model = TensorModel()
    requests = [request_of(f"r{number}", 6, seed=number) for number in range(3)]
    answers = [model.greedy(request.prompt, 8) for request in requests]
    model.nan_on = next(token for token in answers[1][1:7] if token not in answers[0] + answers[2])
    with Graphs(model) as serving:
        serving.submit(*requests)
        assert serving.ended("r1").finish is FinishReason.ERROR
        assert [serving.tokens(name) for name in ("r0", "r2")] == [answers[0], answers[2]]
        serving.at_rest()


def test_graph_serves_decode_rows_only() -> None:
    cache, cuda = make_cache(40), FakeGraphs()
    model = captured(TensorModel(), cache, cuda)
    static = StaticBatch(4, 4, 40, 4, CPU)
    row = BatchRow([3], 5, [1, 2], 1)
    cases: dict[str, tuple[list[BatchRow], bool]] = {
        "a decode row": ([row], True),
        "two rows": ([row, BatchRow([3], 0, [3], 1)], True),
        "too many rows": ([BatchRow([3], 0, [1 + place], 1) for place in range(5)], False),
        "a prompt": ([BatchRow([3, 4], 0, [1], 1)], False),
        "a row with its draft": ([BatchRow([3, 4, 5], 5, [1, 2], 3), row], True),
        "more tokens than rows": ([BatchRow([3, 4, 5], 5, [1, 2], 3), row, row], False),
        "a draft beyond the longest row": ([BatchRow([3, 4], 15, [1, 2, 3, 4, 5], 2)], False),
        "a draft beyond a long batch": ([BatchRow([3] * 3, 13, [1, 2, 3, 4], 3)], False),
        "a chunk without a result": ([BatchRow([3], 0, [1], 0)], False),
        "an adapter": ([BatchRow([3], 0, [1], 1, adapter=5)], False),
        "a long row": ([BatchRow([3], 16, [1, 2, 3, 4, 5], 1)], False),
        "a long batch": ([BatchRow([3], 14, [1, 2, 3, 4], 1)] * 3, False),
    }
    for name, (rows, fits) in cases.items():
        assert static.fits(Batch(rows, 4, CPU)) == fits, name
    assert isinstance(model, GraphModel)
    model.forward(Batch([BatchRow([3, 4], 0, [1], 1)], 4, CPU), cache)
    assert model.replays == 0


def load(static: StaticBatch, *rows: BatchRow) -> None:
    batch = Batch(rows, static.block_size, CPU)
    static.load(batch.values, batch.tables)


def test_static_batch_forgets_earlier_rows() -> None:
    static = StaticBatch(3, 4, 100, 4, CPU)
    load(static, BatchRow([7], 5, [1, 2], 1), BatchRow([8], 2, [3], 1))
    assert static.slots.tolist() == [9, 14, -1]
    load(static, BatchRow([9], 6, [1, 2], 1))
    assert (static.tokens.tolist(), static.positions.tolist()) == ([9, 0, 0], [6, 0, 0])
    assert static.slots.tolist() == [10, -1, -1]
    assert static.block_table[0, :2].tolist() == [1, 2]


def test_captured_passes_share_the_memory_of_their_logits() -> None:
    """On a device, 15 passes of up to 256 rows and 128k tokens had 640 MB of their own."""
    passes = CapturedPasses(TensorModel(), on_device(make_cache(20), FakeGraphs()), 64, lambda: 0)
    batch, results = Batch([BatchRow([3], 0, [1], 1)], 4, CPU), []
    for rows in (16, 8, 1):
        passes.capture(rows)
        results.append(passes.replay(rows, batch))
        assert results[-1].shape == (rows, SPEC.vocab)
    (memory,) = {result.untyped_storage().data_ptr() for result in results}
    assert results[0].untyped_storage().nbytes() == 16 * SPEC.vocab * 4
    passes.drop(16)
    passes.capture(4)
    smaller = passes.replay(4, batch).untyped_storage()
    assert smaller.data_ptr() != memory
    assert smaller.nbytes() == 4 * SPEC.vocab * 4


def test_capture_writes_nothing() -> None:
    cache = make_cache(20)
    captured(TensorModel(), cache, FakeGraphs())
    assert not cache.kv.any()


@pytest.mark.parametrize(
    ("limits", "clock", "taken", "rows", "message"),
    [
        (LIMITS, STOPPED, [2**30] * 7, [1, 2, 4, 8, 16], "Captured 5 decode passes"),
        (CaptureLimits(5, 2**30, 60), STOPPED, [0] * 6, [1, 2, 4, 5], "of up to 5 rows"),
        (
            CaptureLimits(16, 2**30, 2.5),
            itertools.count(),
            [0] * 4,
            [8, 16],
            "than --graph-seconds 2.5",
        ),
        (CaptureLimits(16, 50, 60), STOPPED, [900, 960, 940, 945, 949, 949, 949], [1, 2, 4, 8], "need 60"),
    ],
)
def test_capture_stays_within_its_limits(
    limits: CaptureLimits,
    clock: Iterator[float],
    taken: list[int],
    rows: list[int],
    message: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO"):
        how = {"limits": limits, "clock": clock.__next__, "taken": iter(taken).__next__}
        model = captured(TensorModel(), make_cache(20), FakeGraphs(), **how)
    assert isinstance(model, GraphModel)
    assert model.rows == rows
    assert message in caplog.text


def test_passes_with_adapters_share_the_limits_of_the_others(caplog: pytest.LogCaptureFixture) -> None:
    """Of 100 bytes the passes without adapters take 70: what comes after them has 30."""
    cuda = FakeGraphs()
    limits = CaptureLimits(rows=2, memory=100, seconds=60, adapter_rank=4)
    how = {"limits": limits, "taken": lambda: 35 * len(cuda.captured)}
    with caplog.at_level("INFO"):
        model = captured(TensorModel(), make_cache(20), cuda, **how)
    assert "Captured 2 decode passes of up to 2 rows" in caplog.text
    assert caplog.text.count("more than --graph-memory") == 2
    assert isinstance(model, GraphModel) and model.rows == [1, 2]


@pytest.mark.parametrize(
    "failure", [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("CUDA error: not permitted")]
)
def test_capture_failures_leave_the_model(failure: Exception, caplog: pytest.LogCaptureFixture) -> None:
    cuda, model = FakeGraphs(), TensorModel()
    cuda.failure = failure
    assert captured(model, make_cache(20), cuda) is model
    assert f"Passes of 16 rows and fewer are not captured: {failure}" in caplog.text


def test_capture_refuses_a_model_that_reads_results() -> None:
    """The fake model computes on the host."""

    class Reading(TensorModel):
        def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
            batch.tokens.tolist()
            return super().forward(batch, cache)

    model = Reading()
    assert captured(model, make_cache(20), FakeGraphs()) is model


def test_graphs_on_a_cpu_or_without_rows_are_none() -> None:
    model = TensorModel()
    assert with_graphs(model, make_cache(20), ENGINE, LIMITS, lambda: 0) is model
    assert captured(model, make_cache(20), FakeGraphs(), limits=CaptureLimits(0, 1, 1)) is model
