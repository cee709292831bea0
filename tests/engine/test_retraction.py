"""Memory runs out, requests are retracted and resume: clients must not notice."""

from __future__ import annotations

from typing import Any

import pytest

from baton_engine.requests import FinishReason
from tests.engine.serving import Serving, prompt_of, request_of


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.9, "presence_penalty": 0.7, "repetition_penalty": 1.3},
        {"temperature": 0.7, "min_tokens": 15, "stop_ids": frozenset(range(0, 97, 3))},
        {"temperature": 1.0, "logprobs": 3},
    ],
)
def test_retraction_gives_the_tokens_of_an_undisturbed_run(sampling: dict[str, Any]) -> None:
    """Hazard 8: they resumed with another state of the random numbers or the penalties."""
    requests = [request_of(f"{seed}", 8 + seed, seed=seed, max_tokens=30, **sampling) for seed in range(6)]
    with Serving(blocks=20, chunk_tokens=16) as serving:
        serving.submit(*requests)
        for request in requests:
            assert serving.tokens(request.id) == serving.reference(request)
        assert serving.at_rest().totals.retractions > 2


def test_retraction_client_sees_each_token_once() -> None:
    with Serving(blocks=12) as serving:
        requests = [request_of(f"{seed}", 8, seed=seed, max_tokens=20) for seed in range(4)]
        serving.run(*requests)
        assert serving.at_rest().totals.retractions > 0
        for request in requests:
            outputs = serving.outputs[request.id]
            assert [len(output.tokens) for output in outputs] == [1] * 20
            assert [output.finish for output in outputs[:-1]] == [None] * 19


def test_retraction_competing_requests_all_finish() -> None:
    with Serving(blocks=9, max_running=8) as serving:
        requests = [request_of(f"{seed}", 4, seed=seed, max_tokens=28) for seed in range(8)]
        for request, tokens in zip(requests, serving.run(*requests), strict=True):
            assert tokens == serving.model.greedy(request.prompt, 28)
        serving.at_rest()


def test_retraction_request_larger_than_the_cache_ends_by_length() -> None:
    with Serving(blocks=5) as serving:
        tokens = serving.run(request_of("a", 10, max_tokens=500))[0]
        assert tokens == serving.model.greedy(prompt_of(10), 7)  # 16 tokens are cached, one more is drawn
        assert serving.ended("a").finish is FinishReason.LENGTH
        serving.at_rest()


def test_retraction_request_can_be_aborted_or_finished() -> None:
    with Serving(blocks=10, max_running=4) as serving:
        serving.submit(request_of("a", 8, max_tokens=26), request_of("b", 8, seed=1, max_tokens=26))
        serving.until(lambda now: now.totals.retractions > 0)
        serving.engine.abort("a")
        serving.engine.finish("b")
        assert serving.ended("a").finish in (FinishReason.ABORT, FinishReason.LENGTH)
        assert serving.ended("b").finish in (FinishReason.STOP, FinishReason.LENGTH)
        serving.at_rest()
