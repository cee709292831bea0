"""F: logprobs."""

from __future__ import annotations

from typing import Any

import pytest

from baton_api.errors import INVALID_TYPE
from tests.conformance.conftest import smollm2
from tests.conformance.deployment import ONE_WORKER, PAIR, Deployment, Deployments, choices_of
from tests.conformance.expected import check_error, exactly

COUNTING = [{"role": "user", "content": "Count from 1 to 50"}]
FIELDS: dict[str, Any] = {"logprobs": True, "top_logprobs": 3, "max_tokens": 8, "temperature": 0}
PROMPT = "The capital of France is"


def entries_of(served: Deployment, **more: Any) -> list[dict[str, Any]]:
    answer = served.post_chat(COUNTING, **{**FIELDS, **more}).raise_for_status().json()
    logprobs = answer["choices"][0]["logprobs"]
    assert logprobs["refusal"] is None
    entries: list[dict[str, Any]] = logprobs["content"]
    assert len(entries) == answer["usage"]["completion_tokens"]
    return entries


def test_F1_each_token_has_its_logprob_and_the_best(served: Deployment) -> None:
    completion = served.chat(COUNTING, **FIELDS)
    choice = completion.choices[0]
    assert choice.logprobs and choice.logprobs.content and completion.usage
    entries = choice.logprobs.content
    assert len(entries) == 8 == completion.usage.completion_tokens
    for entry in entries:
        assert entry.logprob <= 0
        best = [top.logprob for top in entry.top_logprobs]
        assert len(best) == 3 and best == sorted(best, reverse=True)
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == pytest.approx(entry.logprob, abs=1e-6)
    spelled = b"".join(bytes(entry.bytes or ()) for entry in entries)
    assert spelled.decode() == choice.message.content


def test_F2_streamed_logprobs_are_the_same(served: Deployment) -> None:
    whole = entries_of(served)
    events = served.stream_chat(COUNTING, **FIELDS)
    streamed = [
        entry for choice in choices_of(events) for entry in (choice["logprobs"] or {}).get("content") or ()
    ]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in whole]
    for mine, theirs in zip(streamed, whole, strict=True):
        assert mine["bytes"] == theirs["bytes"]
        assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-2)
        assert [top["token"] for top in mine["top_logprobs"]] == [
            top["token"] for top in theirs["top_logprobs"]
        ]


@pytest.mark.parametrize(
    "fields",
    [
        {"top_logprobs": 3},
        {"top_logprobs": 3, "logprobs": False},
        {"top_logprobs": 21, "logprobs": True},
        {"top_logprobs": -1, "logprobs": True},
    ],
)
def test_F3_top_logprobs_are_0_to_20_and_need_logprobs(served: Deployment, fields: dict[str, Any]) -> None:
    check_error(served.post_chat(COUNTING, **fields), 400, "top_logprobs")


def test_F3_logprobs_is_a_bool_in_chat(served: Deployment) -> None:
    check_error(served.post_chat(COUNTING, logprobs=3), 400, "logprobs", INVALID_TYPE)


def test_F4_logprobs_without_the_best(served: Deployment) -> None:
    for fields in ({"top_logprobs": None}, {"top_logprobs": 0}):
        entries = entries_of(served, **fields)
        assert all(entry["top_logprobs"] == [] for entry in entries)


def test_F5_completions_have_four_parallel_lists(served: Deployment) -> None:
    completion = served.complete(PROMPT, logprobs=2, max_tokens=12, temperature=0)
    choice = completion.choices[0]
    logprobs = choice.logprobs
    assert logprobs and completion.usage
    tokens, chosen, best, offsets = (
        logprobs.tokens,
        logprobs.token_logprobs,
        logprobs.top_logprobs,
        logprobs.text_offset,
    )
    assert tokens and chosen and best and offsets
    assert len(tokens) == len(chosen) == len(best) == len(offsets) == completion.usage.completion_tokens
    assert offsets[0] == 0
    for token, logprob, row, offset in zip(tokens, chosen, best, offsets, strict=True):
        assert 2 <= len(row) <= 3 and row[token] == pytest.approx(logprob, abs=1e-6)
        assert choice.text[offset:].startswith(token)


@pytest.mark.parametrize("length", [0, 4])
def test_F6_echoed_prompts_have_logprobs_too(served: Deployment, length: int) -> None:
    answer = served.post_completion(PROMPT, echo=True, logprobs=2, max_tokens=length, temperature=0)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    choice, usage = body["choices"][0], body["usage"]
    logprobs = choice["logprobs"]
    assert len(logprobs["tokens"]) == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens"] == length
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert all(value <= 0 for value in logprobs["token_logprobs"][1:])
    assert "".join(logprobs["tokens"]) == choice["text"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert choice["text"][offset:].startswith(token)


@pytest.mark.nixl
def test_F7_first_token_of_a_pair_equals_one_workers(deployments: Deployments) -> None:
    pytest.importorskip("nixl", reason="the NIXL library is missing")
    one, pair = (entries_of(smollm2(deployments, way)) for way in (ONE_WORKER, PAIR))
    assert pair[0]["token"] == one[0]["token"]
    assert pair[0]["logprob"] == pytest.approx(one[0]["logprob"], abs=1e-2)
    assert [top["token"] for top in pair[0]["top_logprobs"]] == [
        top["token"] for top in one[0]["top_logprobs"]
    ]


def test_F8_bytes_of_split_characters_add_up(served: Deployment) -> None:
    text = "家族 👨‍👩‍👧 ok"
    answer = served.post_chat(COUNTING, **{**FIELDS, "max_tokens": 100}, **exactly(text)).json()
    choice = answer["choices"][0]
    spelled = b"".join(bytes(entry["bytes"] or ()) for entry in choice["logprobs"]["content"])
    assert choice["message"]["content"] == text
    assert spelled.decode().startswith(text)


def test_F9_prompt_logprobs_are_given_when_asked_for(served: Deployment) -> None:
    answer = served.post_completion(PROMPT, prompt_logprobs=1, max_tokens=2, temperature=0)
    assert answer.status_code == 200, answer.text
    body = answer.json()
    rows = body["choices"][0].get("prompt_logprobs") or body.get("prompt_logprobs")
    assert len(rows) == body["usage"]["prompt_tokens"]
    assert rows[0] is None and all(rows[1:])


def test_F10_a_banned_token_has_a_logprob_that_json_can_hold(served: Deployment) -> None:
    (token,) = served.tokenize("1")
    fields = {**FIELDS, "logit_bias": {str(token): -100}, "top_logprobs": 20}
    for entry in entries_of(served, **fields):
        assert all(-1e4 <= top["logprob"] <= 0 for top in entry["top_logprobs"])
