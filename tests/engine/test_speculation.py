"""
The law of speculation: outputs with drafts are those without, token by token.

The clock counts the model's passes: they are equally long, and those of a draft model take no time. Drafts
thus look free, and as many as possible are computed.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from baton_api.errors import ConstraintBroken
from baton_api.sampling import SamplingParams
from baton_engine.batch import Batch, BatchRow
from baton_engine.kv.cache import KVCache
from baton_engine.metrics.counters import EngineSnapshot
from baton_engine.requests import FinishReason, GrammarMatcher, LoadedAdapter, Output, Request
from baton_engine.scheduling.sequence import Sequence as DraftedSequence
from baton_engine.speculation.costs import LIFETIME
from baton_engine.speculation.draft_model import DraftModel
from baton_engine.speculation.head_drafts import HeadDrafts
from tests.engine.fake_model import FakeModel, make_cache
from tests.engine.fake_streams import FakeCuda, FakeStream, on_device
from tests.engine.greedy import CPU
from tests.engine.serving import Prefiller, Serving, prompt_of, request_of
from tests.seeds import seeds

FEW = tuple(range(3, 9))
"""A text of few tokens repeats itself, so that many drafts are accepted."""


ADAPTER = LoadedAdapter("pirate", "/pirate", "12" * 16, 8, 70)


class Alternating:
    """A grammar: even and odd tokens in turn, complete after 25 tokens."""

    ends: tuple[int, ...] = ()

    def __init__(self) -> None:
        self.pushed = 0

    @property
    def finished(self) -> bool:
        return self.pushed == 25

    def fill(self, mask: NDArray[np.int32]) -> bool:
        assert not self.finished, "asked for a mask after the end"
        mask.fill(0x55555555 if self.pushed % 2 == 0 else ~0x55555555)
        return True

    def push(self, token: int) -> None:
        if token % 2 != self.pushed % 2:
            raise ConstraintBroken(token)
        self.pushed += 1


KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 1.0},
    "truncated": {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "penalized": {
        "temperature": 0.8, "repetition_penalty": 1.1, "presence_penalty": 0.3, "frequency_penalty": 0.2,
    },
    "greedy and penalized": {"repetition_penalty": 1.2},
    "with logprobs": {"temperature": 0.7, "logprobs": 3},
    "with logprobs of ids": {"logprobs": 0, "logprob_ids": (5, 50)},
    "with a bias": {"temperature": 1.0, "logit_bias": ((4, 6.0), (5, 6.0), (6, -50.0))},
    "with stop ids": {"temperature": 1.0, "stop_ids": frozenset({3})},
    "with stop ids after a minimum": {"temperature": 1.0, "stop_ids": frozenset({3, 4}), "min_tokens": 14},
    "without bad words": {"temperature": 1.0, "bad_words": ((4, 5), (6,))},
    "short": {"max_tokens": 2},
    "one token": {"max_tokens": 1},
}  # fmt: skip


def requests_of(seed: int) -> list[Request]:
    """One request of each kind, with and without few tokens, a prediction, an adapter and a grammar."""
    numbers, requests = random.Random(seed), []
    for number, (kind, sampling) in enumerate(KINDS.items()):
        usual: dict[str, Any] = {
            "max_tokens": numbers.randrange(20, 50),
            "seed": seed * 100 + number,
            "temperature": 0.0,
        }
        if numbers.random() < 0.7:
            usual["allowed_ids"] = FEW
        prompt = prompt_of(numbers.randrange(1, 40), seed + number)
        if numbers.random() < 0.5:
            prompt = tuple(numbers.choices(FEW, k=len(prompt)))
        if numbers.random() < 0.5:
            usual["prediction"] = tuple(numbers.choices(FEW, k=30))
        if number % 4 == 1:
            usual["adapter"] = ADAPTER
        requests.append(request_of(kind, prompt=prompt, **{**usual, **sampling}))
    constrained: dict[str, Any] = {"temperature": 1.0, "allowed_ids": FEW, "max_tokens": 40}
    return [*requests, request_of("constrained", 9, seed=seed, **constrained, matcher=matcher_of())]


def matcher_of() -> GrammarMatcher:
    return Alternating()


def shown(outputs: Sequence[Output]) -> list[tuple[Any, ...]]:
    """All of the outputs but their times."""
    return [
        (output.tokens, output.finish, output.stop_id, output.cached_tokens, str(output.error))
        for output in outputs
    ]


def drafting(tokens: int, model: FakeModel | None = None, **how: Any) -> Serving:
    """An engine with drafts of at most `tokens` tokens."""
    model = model or FakeModel()
    return Serving(model=model, clock=lambda: model.passes, speculation_tokens=tokens, **how)


def answer_of(request: Request) -> list[int]:
    """The tokens of a request by an engine without drafts."""
    plain = Request(request.id, request.prompt, request.sampling)
    with Serving() as serving:
        return serving.run(plain)[0]


def serve(requests: Sequence[Request], tokens: int, **how: Any) -> tuple[dict[str, Any], Serving]:
    """Outputs of requests that are served together, with drafts of at most `tokens` tokens."""
    with drafting(tokens, **how) as serving:
        serving.submit(*requests)
        for request in requests:
            serving.ended(request.id)
        serving.at_rest()
    return {request.id: shown(serving.outputs[request.id]) for request in requests}, serving


@functools.cache
def served_plainly(seed: int) -> tuple[dict[str, Any], EngineSnapshot]:
    """Outputs without drafts, with which several tests compare theirs, and the engine's counters."""
    outputs, serving = serve(requests_of(seed), 0, blocks=513)
    return outputs, serving.engine.snapshot()


@pytest.mark.parametrize("seed", range(8))
def test_speculation_changes_no_output(seed: int) -> None:
    plain, without = served_plainly(seed)
    drafted, serving = serve(requests_of(seed), 1 + seed * 2, blocks=513)
    assert drafted == plain
    totals = serving.engine.snapshot().totals
    assert totals.draft_tokens > totals.accepted_tokens > 0
    assert without.totals.drafts == 0
    # The same blocks are known: no rejected token was published, and no verified one was missed.
    assert serving.engine.snapshot().cached_blocks == without.cached_blocks
    assert totals.generated_tokens == without.totals.generated_tokens


@pytest.mark.parametrize("seed", range(4))
def test_speculation_changes_no_output_of_retracted_requests(seed: int) -> None:
    plain, _ = served_plainly(seed)
    drafted, serving = serve(requests_of(seed), 8, blocks=30, chunk_tokens=16, max_running=9)
    assert [[one[:3] for one in outputs] for outputs in drafted.values()] == [
        [one[:3] for one in outputs] for outputs in plain.values()
    ]
    totals = serving.engine.snapshot().totals
    assert totals.retractions > 0
    assert totals.accepted_tokens > 0


def test_speculation_retracts_no_request() -> None:
    """The cache has exactly the blocks that the requests fill in the end."""
    requests = [request_of(f"{n}", 8, seed=n, max_tokens=25, allowed_ids=FEW) for n in range(4)]
    outputs, serving = serve(requests, 16, blocks=33, chunk_tokens=64)
    assert [len(one) for one in outputs.values()] == [25] * 4
    totals = serving.engine.snapshot().totals
    assert (totals.retractions, totals.accepted_tokens > 0) == (0, True)


def test_speculation_next_turn_finds_verified_tokens_only() -> None:
    """The fake model reads tokens and positions from the cache: a rejected token there would be found."""
    request = request_of("a", 10, max_tokens=30, allowed_ids=FEW, prediction=FEW * 6)
    with drafting(12) as serving:
        answer = tuple(serving.run(request)[0])
        totals = serving.engine.snapshot().totals
        assert totals.draft_tokens > totals.accepted_tokens
        again = request_of("b", prompt=(*request.prompt, *answer, 3))
        assert serving.run(again) == [serving.reference(again)]
        assert serving.outputs["b"][0].cached_tokens == (10 + 30 - 1) // 4 * 4


def test_speculation_predicted_answer_takes_few_passes() -> None:
    request = request_of("a", 10, max_tokens=40)
    with drafting(16) as serving:
        answer = serving.reference(request)
        assert serving.run(replace(request, prediction=tuple(answer))) == [answer]
        assert serving.model.passes <= 7  # the prompt, then 1, 2, 4, 8, 16 tokens and the rest
        totals = serving.engine.snapshot().totals
        assert totals.draft_tokens == totals.accepted_tokens
        assert totals.drafts < 6


def test_speculation_aborted_request_leaves_others_alone() -> None:
    requests = [request_of(f"{n}", 8, seed=n, max_tokens=200, allowed_ids=FEW) for n in range(3)]
    with drafting(8, blocks=257) as serving:
        serving.submit(*requests)
        serving.wait(lambda: len(serving.so_far("1")) > 3)
        serving.engine.abort("1")
        assert serving.ended("1").finish in (FinishReason.ABORT, FinishReason.LENGTH)
        expected = answer_of(requests[1])
        assert serving.so_far("1") == expected[: len(serving.so_far("1"))]
        for number in (0, 2):
            assert serving.tokens(f"{number}") == answer_of(requests[number])
        serving.at_rest()


class Contagious(FakeModel):
    """A token of infinite values makes the whole row NaN, as 0 times infinity does in attention."""

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        logits, place = super().forward(batch, cache), 0
        for row in batch.rows:
            if self.nan_on in row.tokens:
                logits[place : place + row.wanted] = float("nan")
            place += row.wanted
        return logits


def test_speculation_bad_draft_does_not_end_a_request() -> None:
    """A draft token whose logits are not finite is not part of the answer, which it must not end."""
    model = Contagious()
    request = request_of("a", 10, max_tokens=12)
    answer = model.greedy(request.prompt, 12)
    model.nan_on = next(token for token in range(97) if token not in (*answer, *request.prompt))
    drafted = replace(request, prediction=(*answer[:5], model.nan_on, *answer[6:]))
    outputs, serving = serve([drafted], 4, model=model)
    assert [tokens[0].token for tokens, *_ in outputs["a"]] == answer
    assert serving.engine.snapshot().totals.drafts > 1


def test_speculation_bad_logits_end_their_request_only() -> None:
    model = FakeModel()
    requests = [request_of(f"{n}", 10, seed=n, max_tokens=12) for n in range(3)]
    answers = [tuple(model.greedy(request.prompt, 12)) for request in requests]
    requests = [replace(one, prediction=answer) for one, answer in zip(requests, answers, strict=True)]
    model.nan_on = next(token for token in answers[1][4:] if all(token not in answers[n] for n in (0, 2)))
    outputs, _ = serve(requests, 4, model=model)
    last = outputs["1"][-1]
    assert last[1] is FinishReason.ERROR
    assert [one[0][0].token for one in outputs["1"][:-1]] == list(
        answers[1][: answers[1].index(model.nan_on) + 1]
    )
    for number in (0, 2):
        assert [one[0][0].token for one in outputs[f"{number}"]] == list(answers[number])


def test_speculation_of_a_fetched_prompt_is_that_of_a_local_one() -> None:
    with drafting(8, local_prefill_tokens=0) as serving:
        prefiller = Prefiller(serving)
        request = request_of("a", 11, max_tokens=30, remote=prefiller)
        answer = serving.reference(request)
        serving.submit(replace(request, prediction=tuple(answer)))
        prefiller.succeed(prefiller.fetch())
        assert serving.tokens("a") == answer
        assert serving.engine.snapshot().totals.accepted_tokens > 0


class Rounding(FakeModel):
    """Rows of several tokens are rounded otherwise, as by kernels of GPUs: their results have other bits."""

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        logits, place = super().forward(batch, cache), 0
        for row in batch.rows:
            if len(row.tokens) > 1:
                logits[place : place + row.wanted] *= 1 + 1e-6
            place += row.wanted
        return logits


def tokens_of(outputs: dict[str, Any]) -> dict[str, list[int]]:
    return {name: [choice.token for one in each for choice in one[0]] for name, each in outputs.items()}


@pytest.mark.parametrize("seed", range(3))
def test_speculation_of_rows_that_are_not_bit_equal(seed: int) -> None:
    """Tokens are those without drafts, unless two are equally likely. The same setting repeats all bits."""
    plain, _ = served_plainly(seed)
    drafted, serving = serve(requests_of(seed), 8, model=Rounding(), blocks=513)
    assert tokens_of(drafted) == tokens_of(plain)
    assert serving.engine.snapshot().totals.accepted_tokens > 0
    how = SamplingParams(temperature=0.5, seed=seed, logprobs=1, allowed_ids=FEW, max_tokens=50)
    one, again = (serve([Request("a", prompt_of(10), how)], 8, model=Rounding()) for _ in range(2))
    assert one[1].engine.snapshot().totals.accepted_tokens > 0
    assert one[0] == again[0]


def test_speculation_samples_from_the_distribution_of_the_model() -> None:
    """Answers of three tokens, each one of the three likeliest: 27 in all, by chi-square with fixed seeds."""
    model, prompt, numbers = Rounding(), prompt_of(6), random.Random(5)
    chances: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for answer, chance in chances.items():
            likely = model.logits([*prompt, *answer]).topk(3)
            for token, share in zip(likely.indices.tolist(), likely.values.softmax(0).tolist(), strict=True):
                longer[(*answer, token)] = chance * share
        chances = longer
    counts: Counter[tuple[int, ...]] = Counter()
    usual: dict[str, Any] = {"temperature": 1.0, "top_k": 3, "max_tokens": 3}
    with drafting(4, model, chunk_tokens=512) as serving:
        for first in range(0, 1200, 16):
            requests = [
                Request(
                    f"{seed}",
                    prompt,
                    SamplingParams(**usual, seed=seed),
                    prediction=numbers.choice(list(chances)),
                )
                for seed in range(first, first + 16)
            ]
            counts.update(map(tuple, serving.run(*requests)))
        assert serving.engine.snapshot().totals.accepted_tokens > 100
    assert set(counts) <= set(chances)
    total, distance = counts.total(), 0.0
    for answer, chance in chances.items():
        distance += (counts[answer] - total * chance) ** 2 / (total * chance)
    assert distance < 54.05  # exceeded with a probability of 0.001 for 26 degrees of freedom


@pytest.mark.parametrize("count", [64, 65])
def test_speculation_of_many_sequences_is_off(count: int) -> None:
    """They all begin and end together."""
    requests = [request_of(f"{n}", 4, seed=n, max_tokens=20) for n in range(count)]
    with drafting(8, blocks=600, max_running=65, chunk_tokens=512) as serving:
        requests = [replace(one, prediction=tuple(serving.reference(one))) for one in requests]
        serving.model.stops_at = 1
        serving.submit(*requests)
        serving.model.resume()
        for request in requests:
            serving.ended(request.id)
        assert bool(serving.engine.snapshot().totals.drafts) == (count == 64)


@pytest.mark.parametrize("draft", [None, FakeModel])
def test_speculation_passes_have_a_largest_size(draft: Callable[[], FakeModel] | None) -> None:
    model = FakeModel()
    requests = [request_of(f"{n}", 4, seed=n, max_tokens=60) for n in range(30)]
    requests = [replace(one, prediction=tuple(model.greedy(one.prompt, 60))) for one in requests]
    with drafting(
        16, model, draft=draft and draft(), blocks=700, max_running=30, chunk_tokens=512
    ) as serving:
        serving.run(*requests)
        assert 128 < max(model.sizes) <= serving.engine.limits.results == 256


class TimedStream(FakeStream):
    """Its work takes a second."""

    seconds = 0.0

    def synchronize(self) -> None:
        self.seconds += 1


@pytest.mark.parametrize("kind", ["model", "head"])
def test_passes_of_drafts_last_until_the_device_has_computed_them(kind: str) -> None:
    """The wait is that of the cache's device, which may have a limit."""
    cuda, model, cache = FakeCuda(), FakeModel(), make_cache(8)
    cuda.default = stream = TimedStream()
    on_device(cache, cuda)
    sequence = DraftedSequence(request_of("a", 6), cache.block_size, 7)
    sequence.grow([1, 2, 3])
    head: Any = None  # it selects rows if one of several requests ends
    make: Any = DraftModel if kind == "model" else partial(HeadDrafts, head)
    drafts = make(model, cache, lambda: stream.seconds)
    if kind == "head":
        model.forward(Batch([BatchRow(sequence.tokens(0, 6), 0, sequence.blocks, 0)], 4, CPU), cache)
    drafts.acceptance(sequence)
    assert len(drafts.draft([(sequence, 3)])[sequence]) == 3
    assert (stream.seconds, drafts.times.of(1)) == (3, 1)


class Similar(FakeModel):
    """Like the fake model after most texts."""

    def logits(self, tokens: list[int]) -> Tensor:
        return super().logits(tokens if sum(tokens) % 5 else [1])


@pytest.mark.parametrize("seed", seeds(6, quick=2))
@pytest.mark.parametrize("draft", [FakeModel, Similar, partial(FakeModel, seed=8)])
def test_draft_model_changes_no_output(seed: int, draft: Callable[[], FakeModel]) -> None:
    """The draft model checks tokens and positions in its own cache, as the model does."""
    plain, without = served_plainly(seed)
    drafted, serving = serve(requests_of(seed), 1 + seed * 2, blocks=513, draft=draft())
    assert drafted == plain
    assert serving.engine.snapshot().totals.draft_tokens > 0
    assert serving.engine.snapshot().cached_blocks == without.cached_blocks


@pytest.mark.parametrize("seed", range(3))
def test_draft_model_changes_no_output_of_retracted_requests(seed: int) -> None:
    plain, _ = served_plainly(seed)
    drafted, serving = serve(requests_of(seed), 8, blocks=30, chunk_tokens=16, max_running=9, draft=Similar())
    assert [[one[:3] for one in outputs] for outputs in drafted.values()] == [
        [one[:3] for one in outputs] for outputs in plain.values()
    ]
    totals = serving.engine.snapshot().totals
    assert totals.retractions > 0
    assert totals.accepted_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_model_equal_to_the_model_is_always_right(temperature: float) -> None:
    """Sampled drafts use the random numbers of the verification."""
    request = request_of("a", 10, max_tokens=60, temperature=temperature, top_p=0.95)
    with drafting(5, draft=FakeModel()) as serving:
        assert serving.run(request) == [serving.reference(request)]
        totals = serving.engine.snapshot().totals
        assert totals.draft_tokens == totals.accepted_tokens
        assert serving.model.passes < 30


def test_draft_model_computes_a_shared_prefix_once() -> None:
    draft = FakeModel()
    with drafting(5, draft=draft) as serving:
        prompt = prompt_of(60)
        first, second = (request_of(name, prompt=prompt, max_tokens=20) for name in "ab")
        assert serving.run(first) == [serving.reference(first)]
        computed = sum(draft.sizes)
        assert serving.run(second) == [serving.reference(second)]
        assert sum(draft.sizes) - computed < 40 < 60 < computed
        both = [request_of(name, prompt=prompt_of(50, 3), max_tokens=20) for name in "cd"]
        assert serving.run(*both) == [serving.reference(both[0])] * 2


class SlowToBegin(FakeModel):
    """Its first passes of one token are slow, as where kernels are compiled or weights read from a disk."""

    def __init__(self, passes: int) -> None:
        super().__init__()
        self._left, self.late = passes, 0.0

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        if self._left and batch.size == 1:
            self._left -= 1
            self.late += 1000.0
        return super().forward(batch, cache)


@pytest.mark.parametrize(("slow", "without"), [(1, 10), (2, 2 * LIFETIME + 200)])
def test_draft_model_that_is_slow_to_begin_is_tried_again(slow: int, without: int) -> None:
    """The first pass is not measured; a later one is forgotten after passes of the model without prompts."""
    model, draft = FakeModel(), SlowToBegin(slow)
    with Serving(
        model=model, draft=draft, clock=lambda: model.passes + draft.late, speculation_tokens=5
    ) as serving:
        while model.passes < without:
            serving.run(request_of(f"{model.passes}", 4, max_tokens=30))
        drafted = serving.engine.snapshot().totals.draft_tokens
        serving.run(request_of("a", 4, max_tokens=100))
        assert serving.engine.snapshot().totals.draft_tokens > drafted + 50


@pytest.mark.parametrize("fault", ["nan_on", "fail_on"])
def test_draft_model_that_fails_ends_no_request(fault: str) -> None:
    draft = FakeModel()
    setattr(draft, fault, 5)
    request = request_of("a", 10, max_tokens=60, allowed_ids=FEW)
    with drafting(5, draft=draft) as serving:
        assert serving.run(request) == [answer_of(request)]
