"""Prompt outputs: logprobs and vectors of a request's prompt, however the prompt was computed."""

from __future__ import annotations

import random
from collections import abc
from typing import Any

import numpy as np
import pytest
import torch

from baton_api.errors import ContextTooLong, InternalError
from baton_engine.requests import FinishReason, Output, Pooling, PromptLogprobs, Request
from baton_engine.scheduling.sequence import Sequence
from tests.engine.fake_model import FakeModel
from tests.engine.serving import Prefiller, Serving, prompt_of, request_of

CHUNK = 32


def scored(
    name: str, prompt: tuple[int, ...], alternatives: int = 3, *, max_tokens: int = 4, **fields: Any
) -> Request:
    return request_of(name, prompt=prompt, prompt_logprobs=alternatives, max_tokens=max_tokens, **fields)


def pooled(name: str, prompt: tuple[int, ...], pooling: Pooling) -> Request:
    return request_of(name, prompt=prompt, pooling=pooling)


def logits_of(model: FakeModel, prompt: abc.Sequence[int]) -> torch.Tensor:
    """[n, V] after each token."""
    return torch.stack([model.logits(list(prompt[: end + 1])) for end in range(len(prompt))])


def result_in(outputs: abc.Sequence[Output]) -> PromptLogprobs:
    """It comes once, and with the first output."""
    assert [output.prompt_output is not None for output in outputs] == [True] + [False] * (len(outputs) - 1)
    result = outputs[0].prompt_output
    assert isinstance(result, PromptLogprobs)
    return result


def check(model: FakeModel, prompt: abc.Sequence[int], alternatives: int, result: PromptLogprobs) -> None:
    values = logits_of(model, prompt)[:-1].log_softmax(-1)
    targets = torch.tensor(prompt[1:])
    expected = values.gather(1, targets[:, None])
    np.testing.assert_allclose(result.logprobs, expected[:, 0], atol=1e-6)
    assert result.ranks.tolist() == ((values > expected).sum(-1) + 1).tolist()
    top = values.topk(alternatives)
    assert result.top_ids.tolist() == top.indices.tolist()
    np.testing.assert_allclose(result.top, top.values, atol=1e-6)


def vector_in(output: Output) -> np.ndarray:
    assert output.finish is FinishReason.STOP and output.tokens == ()
    assert isinstance(output.prompt_output, np.ndarray) and output.prompt_output.dtype == np.float32
    return output.prompt_output


def check_vector(model: FakeModel, prompt: abc.Sequence[int], pooling: Pooling, vector: np.ndarray) -> None:
    states = logits_of(model, prompt)
    last_or_first = (
        states[-1] if pooling is Pooling.LAST else states[0]
    )  # the fake model's head changes nothing
    expected = states.mean(0) if pooling is Pooling.MEAN else last_or_first
    np.testing.assert_allclose(vector, expected, atol=1e-5)


LENGTHS = {
    "two tokens": 2,
    "within a block": 3,
    "whole blocks": 16,
    "a chunk": CHUNK,
    "chunks": 3 * CHUNK + 5,
}


@pytest.mark.parametrize("length", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("alternatives", [0, 3, 20])
def test_prompt_logprobs_equal_the_models(length: int, alternatives: int) -> None:
    with Serving() as serving:
        request = scored("a", prompt_of(length), alternatives)
        assert serving.run(request) == [serving.reference(request)]
        check(serving.model, request.prompt, alternatives, result_in(serving.outputs["a"]))
        serving.at_rest()


def test_prompt_logprobs_of_one_token_are_empty() -> None:
    with Serving() as serving:
        request = scored("a", prompt_of(1))
        assert serving.run(request) == [serving.reference(request)]
        result = result_in(serving.outputs["a"])
        assert len(result.logprobs) == len(result.ranks) == len(result.top) == len(result.top_ids) == 0


@pytest.mark.parametrize("length", [1, 2, 70])
def test_scoring_alone_draws_nothing(length: int) -> None:
    with Serving() as serving:
        serving.submit(scored("a", prompt_of(length), max_tokens=0))
        output = serving.ended("a")
        assert (output.tokens, output.finish) == ((), FinishReason.LENGTH)
        check(serving.model, prompt_of(length), 3, result_in(serving.outputs["a"]))
        assert serving.at_rest().totals.generated_tokens == 0


@pytest.mark.parametrize("pooling", Pooling)
@pytest.mark.parametrize("length", [1, *LENGTHS.values()])
def test_prompt_vector_is_pooled_over_all_chunks(pooling: Pooling, length: int) -> None:
    with Serving() as serving:
        serving.submit(pooled("a", prompt_of(length), pooling))
        check_vector(serving.model, prompt_of(length), pooling, vector_in(serving.ended("a")))
        assert serving.at_rest().totals.finished[FinishReason.STOP] == 1


def test_prompt_outputs_use_the_cache_only_for_unread_tokens() -> None:
    prompt = prompt_of(48)
    with Serving() as serving:
        serving.run(request_of("before", prompt=prompt))
        requests = {
            "logprobs": scored("logprobs", prompt),
            "mean": pooled("mean", prompt, Pooling.MEAN),
            "last": pooled("last", prompt, Pooling.LAST),
            "plain": request_of("plain", prompt=prompt),
        }
        cached = {}
        for name, request in requests.items():
            serving.submit(request)
            cached[name] = serving.ended(name).cached_tokens
        assert cached == {"logprobs": 0, "mean": 0, "last": 44, "plain": 44}
        check(serving.model, prompt, 3, result_in(serving.outputs["logprobs"]))
        check_vector(serving.model, prompt, Pooling.MEAN, vector_in(serving.outputs["mean"][-1]))
        check_vector(serving.model, prompt, Pooling.LAST, vector_in(serving.outputs["last"][-1]))


def test_prompt_outputs_request_caches_its_blocks() -> None:
    with Serving() as serving:
        serving.submit(pooled("mean", prompt_of(48), Pooling.MEAN))
        serving.ended("mean")
        serving.run(request_of("after", prompt=prompt_of(48)))
        assert serving.ended("after").cached_tokens == 44


def test_prompt_outputs_request_is_prefilled_locally() -> None:
    with Serving(local_prefill_tokens=0) as serving:
        remote = Prefiller(serving)
        request = scored("a", prompt_of(40), remote=remote)
        serving.run(request)
        assert remote.fetches.empty()
        check(serving.model, request.prompt, 3, result_in(serving.outputs["a"]))
        assert serving.at_rest().totals.local_prefills == {"reads_prompt": 1}


def test_prompt_outputs_full_context_without_tokens_is_accepted() -> None:
    prompt = prompt_of(64)
    with Serving(max_model_len=64) as serving:
        serving.submit(scored("score", prompt, max_tokens=0), pooled("pool", prompt, Pooling.MEAN))
        check(serving.model, prompt, 3, result_in([serving.ended("score")]))
        check_vector(serving.model, prompt, Pooling.MEAN, vector_in(serving.ended("pool")))
        with pytest.raises(ContextTooLong):
            serving.submit(scored("generate", prompt, max_tokens=1))
        with pytest.raises(ContextTooLong):
            serving.submit(pooled("more", (*prompt, 1), Pooling.LAST))


def test_prompt_outputs_nan_ends_only_its_request() -> None:
    with Serving() as serving:
        serving.model.nan_on = 5
        bad = (1, 2, 5, 7, 9)
        serving.submit(
            scored("score", bad),
            pooled("pool", bad, Pooling.MEAN),
            scored("good", (1, 2, 3)),
            request_of("plain"),
        )
        for name in ("score", "pool"):
            output = serving.ended(name)
            assert output.finish is FinishReason.ERROR and isinstance(output.error, InternalError)
            assert output.prompt_output is None
        assert serving.ended("good").finish is FinishReason.LENGTH
        assert serving.ended("plain").finish is FinishReason.LENGTH
        serving.at_rest()


@pytest.mark.parametrize("seed", range(6))
def test_prompt_outputs_random_mix_with_retractions_is_right(seed: int) -> None:
    """Few blocks and shared prefixes: prompts are retracted half read, and find parts cached."""
    chance = random.Random(seed)
    with Serving(blocks=33, chunk_tokens=chance.choice([5, 16, 32]), max_running=8) as serving:
        requests: list[Request] = []
        for number in range(24):
            length = chance.choice([2, 9, 30, 60])
            prompt = (*prompt_of(chance.choice([0, 8, length]), 0), *prompt_of(length, number))[:length]
            match chance.randrange(4):
                case 0:
                    requests.append(scored(str(number), prompt, max_tokens=chance.choice([0, 1, 40])))
                case 1:
                    requests.append(pooled(str(number), prompt, chance.choice(list(Pooling))))
                case _:
                    requests.append(request_of(str(number), prompt=prompt, max_tokens=40))
        serving.submit(*requests)
        for request in requests:
            end, outputs = serving.ended(request.id), serving.outputs[request.id]
            if request.pooling is not None:
                check_vector(serving.model, request.prompt, request.pooling, vector_in(end))
                continue
            assert serving.so_far(request.id) == serving.reference(request)
            if request.sampling.prompt_logprobs is not None:
                check(serving.model, request.prompt, 3, result_in(outputs))
        assert serving.at_rest().totals.retractions > 0


def test_prompt_outputs_retracted_prompt_continues() -> None:
    """Beside a request that grows, the blocks run out in the middle of a prompt."""
    with Serving(blocks=19, chunk_tokens=6) as serving:
        serving.model.go.clear()
        grower = request_of("grower", prompt=prompt_of(12, 3), max_tokens=50)
        reader = scored("reader", prompt_of(52), max_tokens=2)
        serving.submit(grower, reader)
        serving.model.go.set()
        assert serving.tokens("grower") == serving.reference(grower)
        assert serving.tokens("reader") == serving.reference(reader)
        check(serving.model, reader.prompt, 3, result_in(serving.outputs["reader"]))
        assert serving.at_rest().totals.retractions > 0


def test_prompt_outputs_cacheable_is_the_part_already_read() -> None:
    for request, steps in (
        (scored("a", prompt_of(40)), (0, 20, 39)),
        (pooled("b", prompt_of(40), Pooling.MEAN), (0, 20, 39)),
        (pooled("c", prompt_of(40), Pooling.LAST), (39,)),
    ):
        sequence = Sequence(request, 4, 16)
        assert sequence.prompt_output is not None
        for step, end in zip(steps, (*steps[1:], None), strict=True):
            assert sequence.cacheable == step
            if end is not None:
                sequence.prompt_output.update(torch.zeros(end - step, 97), lambda states: states)
    assert Sequence(request_of("d", prompt=prompt_of(40)), 4, 16).cacheable == 39
