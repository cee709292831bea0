"""Defaults of unset request fields, from the server's settings and the model's files."""

from __future__ import annotations

import functools
import random
from typing import Any

import pytest

from baton_api.errors import CONTEXT_LENGTH_EXCEEDED
from baton_engine.api.parameters import Defaults
from baton_engine.model.checkpoint import SamplingDefaults
from baton_engine.settings import WorkerSettings
from tests.engine.api.api import CONTEXT, Api, events, open_api


async def text(api: Api, **body: Any) -> str:
    response = await api.complete(max_tokens=12, ignore_eos=True, **body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


def seeded(seed: int, **sampling: Any) -> Defaults:
    return Defaults(
        sampling=SamplingDefaults(**sampling), seeds=functools.partial(random.Random(seed).getrandbits, 64)
    )


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}],
    ids=["temperature", "top_k", "top_p", "min_p"],
)
async def test_defaults_model_sampling_applies_unless_overridden(sampling: dict[str, Any]) -> None:
    async with open_api() as api:
        greedy = await text(api, temperature=0)
        drawn = await text(api, seed=5)
    assert drawn != greedy
    async with open_api(defaults=Defaults(sampling=SamplingDefaults(**sampling))) as api:
        assert await text(api, seed=5) == greedy
        assert await text(api, seed=5, temperature=1, top_k=0, top_p=1, min_p=0) == drawn
        chats = [await api.chat(ignore_eos=True, **fields) for fields in ({"seed": 5}, {"temperature": 0})]
        assert chats[0].json()["choices"] == chats[1].json()["choices"]


async def test_defaults_model_repetition_penalty_applies() -> None:
    async with open_api() as api:
        plain = await text(api, temperature=0)
        penalised = await text(api, temperature=0, repetition_penalty=1000)
    assert plain != penalised
    async with open_api(defaults=Defaults(sampling=SamplingDefaults(repetition_penalty=1000))) as api:
        assert await text(api, temperature=0) == penalised
        assert await text(api, temperature=0, repetition_penalty=1) == plain


async def test_defaults_server_seed_repeats_answers_after_restart() -> None:
    answers = []
    for seed in (1, 1, 2):
        async with open_api(defaults=seeded(seed)) as api:
            answers.append([await text(api) for _ in range(3)])
    assert answers[0] == answers[1] != answers[2]
    assert len(set(answers[0])) == 3


async def test_defaults_server_include_usage_applies_unless_declined() -> None:
    async with open_api(defaults=Defaults(include_usage=True)) as api:
        for fields, wanted in (
            ({}, True),
            ({"stream_options": {"include_usage": False}}, False),
            ({"stream_options": {}}, True),
        ):
            for ask in (api.chat, api.complete):
                chunks = events((await ask(stream=True, **fields)).text)
                assert (chunks[-1].get("usage") is not None) is wanted, fields
        assert (await api.chat(stream_options={"include_usage": True})).status_code == 400


async def test_defaults_cache_report_off_hides_cached_tokens() -> None:
    prompt = "the same words again and again"
    for settings, reports in ((WorkerSettings(), True), (WorkerSettings(cache_report=False), False)):
        async with open_api(settings=settings) as api:
            for body in ({"prompt": prompt}, {"prompt": prompt}, {"prompt": prompt, "n": 2}):
                usage = (await api.complete(**body)).json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert (cached > 0) is reports
            assert usage["prompt_tokens"] == len(prompt)
            # The server's own metrics keep counting, each prompt once.
            exchanges = list(api.served.history)
            assert [exchange.cached_tokens > 0 for exchange in exchanges] == [False, True, True]
            assert exchanges[1].cached_tokens == exchanges[2].cached_tokens


@pytest.mark.parametrize("kind", ["chat", "completions"])
async def test_defaults_too_long_request_is_rejected_or_truncated(kind: str) -> None:
    def body(length: int) -> dict[str, Any]:
        if kind == "chat":
            return {"messages": [{"role": "user", "content": "x" * length}], "ignore_eos": True}
        return {"prompt": "x" * length, "ignore_eos": True}

    settings = WorkerSettings(allow_auto_truncate=True)
    async with open_api() as strict, open_api(settings=settings) as kind_one:
        ask = strict.chat if kind == "chat" else strict.complete
        for length, wanted in ((2 * CONTEXT, 8), (100, CONTEXT), (100, 2 * CONTEXT), (CONTEXT - 4, 8)):
            refused = await ask(**body(length), max_tokens=wanted)
            assert refused.json()["error"]["code"] == CONTEXT_LENGTH_EXCEEDED
        ask = kind_one.chat if kind == "chat" else kind_one.complete
        for length, wanted in ((2 * CONTEXT, 8), (100, 2 * CONTEXT), (2 * CONTEXT, CONTEXT)):
            answer = await ask(**body(length), max_tokens=wanted)
            assert answer.status_code == 200, answer.text
            usage = answer.json()["usage"]
            assert usage["total_tokens"] <= CONTEXT
            assert answer.json()["choices"][0]["finish_reason"] == "length"
        assert usage["completion_tokens"] == CONTEXT // 2


async def test_defaults_truncated_prompt_keeps_first_token_and_end() -> None:
    async with open_api(settings=WorkerSettings(allow_auto_truncate=True)) as api:
        prompt = "A" + "b" * CONTEXT + "the end"
        answer = await api.complete(prompt=prompt, max_tokens=9, echo=True, return_token_ids=True)
        choice = answer.json()["choices"][0]
    ids = choice["prompt_token_ids"]
    assert len(ids) == CONTEXT - 9
    tokenizer = api.served.tokenizer
    shown = tokenizer.decode(ids)
    assert shown[0] == "A" and shown.endswith("bthe end")
