"""Decode passes that are launched before the tokens of the last one are read, on fakes of CUDA."""

from __future__ import annotations

import itertools
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_engine.batch import Batch
from baton_engine.graphs import CaptureLimits, with_graphs
from baton_engine.kv.cache import KVCache
from baton_engine.model.decoder import Model
from baton_engine.requests import FinishReason
from baton_engine.scheduling.limits import EngineLimits
from tests.engine.fake_graphs import FakeGraphs, TensorModel
from tests.engine.fake_model import FakeModel
from tests.engine.fake_streams import FakeStream, on_device
from tests.engine.serving import Recipient, Serving, request_of


class Overlapping(Serving):
    """An engine on a fake device, with or without graphs."""

    def __init__(self, model: FakeModel | None = None, *, graphs: bool = False, **how: Any) -> None:
        self.cuda = FakeGraphs()

        def wrap(plain: Model, cache: KVCache) -> Model:
            on_device(cache, self.cuda)
            if not graphs:
                return plain
            limits = CaptureLimits(rows=16, memory=2**30, seconds=3600)
            return with_graphs(plain, cache, EngineLimits(max_model_len=64), limits, lambda: 2**30)

        how = {"max_model_len": 64, "overlap": True, **how}
        super().__init__(model=model or TensorModel(), wrap=wrap, **how)

    def __enter__(self) -> Overlapping:
        super().__enter__()
        return self

    @property
    def ahead(self) -> int:
        """Number of passes that were launched ahead."""
        return self.engine._pipeline.ahead


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("count", [1, 3, 16])
def test_overlap_gives_way_to_drafts_that_pay(count: int, graphs: bool) -> None:
    """Before a pass with drafts, the host reads the last one. Drafts look free by this clock."""
    clock = itertools.count().__next__
    with Overlapping(graphs=graphs, blocks=200, speculation_tokens=8, clock=clock) as serving:
        requests = [
            request_of(f"r{number}", 3 + number, seed=number, max_tokens=30) for number in range(count)
        ]
        answers = [serving.reference(request) for request in requests]
        predicted = [  # drafts are right, then wrong, then none
            replace(request, prediction=(*answer[:24], *range(60, 70)))
            for request, answer in zip(requests, answers, strict=True)
        ]
        assert serving.run(*predicted) == answers
        serving.at_rest()
        totals = serving.engine.snapshot().totals
        assert totals.draft_tokens > totals.accepted_tokens > 4 * count
        assert serving.ahead > 3
        assert totals.generated_tokens == 30 * count


def test_overlap_with_drafts_computes_a_prompt_in_chunks() -> None:
    """A pass with a part of a prompt alone samples nothing, and no drafts follow it."""
    clock = itertools.count().__next__
    with Overlapping(blocks=200, chunk_tokens=16, speculation_tokens=8, clock=clock) as serving:
        request = request_of("r", 40, max_tokens=5)
        assert serving.run(request) == [serving.reference(request)]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("count", [1, 3, 16, 24])
def test_overlap_gives_the_same_tokens(count: int, graphs: bool) -> None:
    """Greedy, sampled and penalized rows; some end by length, some by a stop id. 24 exceed the batch."""
    with Overlapping(graphs=graphs, blocks=200) as serving:
        requests = []
        for number in range(count):
            how: dict[str, Any] = {"max_tokens": 3 + 2 * (number % 5), "seed": number}
            if number % 3:
                how |= {"temperature": 1.0, "top_p": 0.9}
            if number % 4 == 3:
                how |= {"frequency_penalty": 0.7, "repetition_penalty": 1.2}
            if number % 5 == 4:
                how |= {"stop_ids": tuple(range(0, 97, 7)), "min_tokens": 2}
            requests.append(request_of(f"r{number}", 3 + number, **how))
        assert serving.run(*requests) == [serving.reference(request) for request in requests]
        assert serving.ahead > 0
        serving.at_rest()
        snapshot = serving.engine.snapshot()
        assert snapshot.forward_times.total_s <= snapshot.step_times.total_s
        assert snapshot.totals.generated_tokens == sum(
            len(serving.so_far(request.id)) for request in requests
        )


def test_overlap_retracts_and_continues() -> None:
    with Overlapping(blocks=14) as serving:
        requests = [request_of(f"r{number}", 6, seed=number, max_tokens=20) for number in range(4)]
        assert serving.run(*requests) == [serving.reference(request) for request in requests]
        assert serving.engine.snapshot().totals.retractions > 0
        assert serving.ahead > 0
        serving.at_rest()


def test_overlap_aborted_rows_leave_no_blocks() -> None:
    """The request ends while a pass with it has been launched ahead."""
    with Overlapping(max_model_len=512, blocks=400) as serving:
        long = [request_of(f"r{number}", 6, seed=number, max_tokens=400) for number in range(3)]
        serving.submit(*long)
        serving.wait(lambda: len(serving.so_far("r1")) > 20)
        serving.engine.abort("r1")
        serving.engine.finish("r0")
        assert serving.ended("r1").finish is FinishReason.ABORT
        assert serving.ended("r0").finish is FinishReason.STOP
        expected = serving.reference(long[2])
        assert serving.tokens("r2") == expected
        assert serving.so_far("r1") == serving.reference(long[1])[: len(serving.so_far("r1"))]
        serving.at_rest()


class NotingStream(FakeStream):
    """Notes when it is waited for."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self._seen = seen

    def synchronize(self) -> None:
        self._seen.append("finish")


def test_overlap_engine_ends_after_the_pass_under_way() -> None:
    """Its graph is freed next. Other ranks, which end next, compute their part of it."""
    seen: list[str] = []
    with Overlapping(graphs=True, max_model_len=512, blocks=400) as serving:
        serving.cuda.default = NotingStream(seen)
        serving.cuda.on_replay = lambda: seen.append("replay")
        serving.submit(request_of("r", 6, max_tokens=400))
        serving.wait(lambda: len(serving.so_far("r")) > 20)
    assert seen[-1] == "finish"
    assert seen.count("replay") >= 20 and seen.count("finish") == 1


def test_overlap_shares_prefixes_of_ended_rows() -> None:
    """Keys that a row wrote after its end are not part of the cached prefix."""
    with Overlapping() as serving:
        first = request_of("first", 9, max_tokens=12)
        (answer,) = serving.run(first)
        again = request_of("again", prompt=(*first.prompt, *answer, 5), max_tokens=12)
        assert serving.run(again) == [serving.reference(again)]
        assert serving.outputs["again"][-1].cached_tokens >= 16


def test_overlap_row_with_bad_logits_ends_alone() -> None:
    model = TensorModel()
    requests = [request_of(f"r{number}", 6, seed=number) for number in range(3)]
    answers = [model.greedy(request.prompt, 8) for request in requests]
    model.nan_on = next(token for token in answers[1][1:7] if token not in answers[0] + answers[2])
    with Overlapping(model) as serving:
        serving.submit(*requests)
        assert serving.ended("r1").finish is FinishReason.ERROR
        assert [serving.tokens(name) for name in ("r0", "r2")] == [answers[0], answers[2]]
        serving.at_rest()


class NarrowModel(TensorModel):
    """A model whose passes of more than two rows run out of memory."""

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        if len(batch.rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().forward(batch, cache)


def test_overlap_out_of_memory_is_survived() -> None:
    with Overlapping(NarrowModel()) as serving:
        requests = [request_of(f"r{number}", 6, seed=number) for number in range(5)]
        assert serving.run(*requests) == [serving.reference(request) for request in requests]
        assert serving.engine.snapshot().totals.out_of_memory > 0
        serving.at_rest()


def test_overlap_failed_device_ends_the_engine() -> None:
    """The error is raised when the host waits, with another pass launched already."""
    with Overlapping(max_model_len=512, blocks=400) as serving:
        serving.submit(request_of("r", 6, max_tokens=500))
        serving.wait(lambda: len(serving.so_far("r")) > 5)
        serving.cuda.broken = True
        assert serving.ended("r").finish is FinishReason.ERROR
        assert "the accelerator failed permanently" in serving.fatal[0]


def test_overlap_exported_prompts_are_not_launched_ahead() -> None:
    with Overlapping() as serving:
        recipient = Recipient()
        assert len(serving.run(request_of("r", 30, export=recipient))[0]) == 1
        assert serving.ahead == 0
        assert recipient.announced[-1][0] == 30
        serving.engine.release("r")
        serving.at_rest()


def test_overlap_grammar_rows_wait_with_their_selection_only() -> None:
    """Allowed ids are a token mask. Free rows beside them get their own tokens."""
    with Overlapping() as serving:
        free = [request_of(f"free{number}", 5, seed=number, temperature=1.0) for number in range(2)]
        masked = request_of("masked", 6, allowed_ids=(3, 5, 8, 13), bad_words=((3, 5), (8,)))
        serving.submit(*free, masked)
        assert [serving.tokens(request.id) for request in free] == [serving.reference(one) for one in free]
        tokens = serving.tokens("masked")
        assert len(tokens) == 8 and set(tokens) <= {3, 5, 13}
        assert (3, 5) not in set(pairwise(tokens))
        assert serving.ahead > 0
    with Serving(model=TensorModel(), max_model_len=64) as plain:
        plain.submit(request_of("masked", 6, allowed_ids=(3, 5, 8, 13), bad_words=((3, 5), (8,))))
        assert plain.tokens("masked") == tokens
