"""C: chat, streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton_api import metrics
from baton_api.errors import CONTEXT_LENGTH_EXCEEDED, DECIMAL_ABOVE_MAX_VALUE, ModelNotFound
from tests.conformance.deployment import QUESTION, Deployment, choices_of, data_events, joined
from tests.conformance.expected import check_error, check_param, exactly

FIELDS: dict[str, Any] = {"temperature": 0, "max_tokens": 64}
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def test_C1_a_stream_is_framed_and_ends_with_done(served: Deployment) -> None:
    answer = served.post_chat(stream=True, **FIELDS)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert data_events(answer.content)


def test_C2_role_and_end_come_once_with_a_constant_head(served: Deployment) -> None:
    events = served.stream_chat(**FIELDS)
    heads = {(event["id"], event["created"], event["model"], event["object"]) for event in events}
    ((ident, _, model, kind),) = heads
    assert ident.startswith("chatcmpl-") and (model, kind) == (served.model, "chat.completion.chunk")
    first = events[0]["choices"][0]["delta"]
    assert first["role"] == "assistant" and first["content"] in ("", None)
    deltas = [choice["delta"] for choice in choices_of(events)]
    assert sum("role" in delta and delta["role"] is not None for delta in deltas) == 1
    ends = [choice["finish_reason"] for choice in choices_of(events)]
    assert [end for end in ends if end is not None] == [ends[-1]] and ends[-1] is not None
    assert all(event.get("usage") is None for event in events)


def test_C3_a_stream_adds_up_to_the_whole_answer(served: Deployment) -> None:
    whole = served.chat(**FIELDS).choices[0]
    events = served.stream_chat(**FIELDS)
    assert joined(events) == whole.message.content
    assert [choice["finish_reason"] for choice in choices_of(events)][-1] == whole.finish_reason
    assert len(list(choices_of(events))) > 4  # it came in pieces


def test_C4_usage_is_the_last_event_when_asked_for(served: Deployment) -> None:
    usage = served.chat(**FIELDS).usage
    events = served.stream_chat(stream_options={"include_usage": True}, **FIELDS)
    assert [event["choices"] == [] for event in events] == [False] * (len(events) - 1) + [True]
    totals = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert usage and [events[-1]["usage"][key] for key in totals] == [getattr(usage, key) for key in totals]
    assert {"prompt_tokens_details", "completion_tokens_details"} <= set(events[-1]["usage"])
    assert all("usage" in event and event["usage"] is None for event in events[:-1])


def test_C5_stream_options_need_a_stream(served: Deployment) -> None:
    check_error(served.post_chat(stream_options={"include_usage": True}), 400, "stream_options")
    check_error(served.post_chat(stream_options={}, stream=False), 400, "stream_options")


@pytest.mark.parametrize("text", ["Grüße 👋🏽 家族 👨‍👩‍👧‍👦 日本語 ok", "🏳️‍🌈𓂀𓆣e\u0301 한국어"])
def test_C6_characters_of_many_bytes_come_whole(served: Deployment, text: str) -> None:
    events = served.stream_chat(temperature=0, max_tokens=200, **exactly(text))
    assert all(REPLACEMENT not in (choice["delta"].get("content") or "") for choice in choices_of(events))
    assert joined(events) == text


def test_C7_no_piece_of_a_stop_string_leaks(served: Deployment) -> None:
    events = served.stream_chat(temperature=0, stop=" STOP", **exactly("abc STOP def"))
    assert joined(events) == "abc"
    assert not any(set(" STOP") & set(choice["delta"].get("content") or "") for choice in choices_of(events))
    end = list(choices_of(events))[-1]
    assert (end["finish_reason"], end["matched_stop"]) == ("stop", " STOP")


def test_C8_choices_of_one_stream_do_not_mix(served: Deployment) -> None:
    events = served.stream_chat(
        n=3, temperature=1, seed=5, max_tokens=12, ignore_eos=True, stream_options={"include_usage": True}
    )
    whole = served.post_chat(n=3, temperature=1, seed=5, max_tokens=12, ignore_eos=True).json()
    for index in range(3):
        mine = list(choices_of(events, index))
        assert sum("role" in choice["delta"] for choice in mine) == 1
        assert sum(choice["finish_reason"] is not None for choice in mine) == 1
        assert joined(events, index) == whole["choices"][index]["message"]["content"]
    assert len({joined(events, index) for index in range(3)}) > 1
    assert events[-1]["usage"]["completion_tokens"] == 36


def test_C9_the_sdks_helper_adds_the_stream_up(served: Deployment) -> None:
    with served.client.chat.completions.stream(
        model=served.model, messages=[{"role": "user", "content": QUESTION[0]["content"]}], **FIELDS
    ) as stream:
        final = stream.get_final_completion()
    message = final.choices[0].message
    assert message.role == "assistant"
    assert message.content == joined(served.stream_chat(**FIELDS))


def test_C10_a_bad_request_for_a_stream_has_a_real_status(served: Deployment) -> None:
    check_error(served.post_chat(stream=True, temperature=2.1), 400, "temperature", DECIMAL_ABOVE_MAX_VALUE)
    long = [{"role": "user", "content": "capital " * (served.context + 1)}]
    check_error(served.post_chat(long, stream=True), 400, "messages", CONTEXT_LENGTH_EXCEEDED)
    body = {"model": "nope", "messages": QUESTION, "stream": True}
    check_error(served.post("/v1/chat/completions", body), 404, ("model", None), ModelNotFound.code)
    check_error(served.post_chat(stream=True, regex="("), 400)


def test_C11_usage_can_run_along(served: Deployment) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = served.stream_chat(stream_options=options, max_tokens=6, ignore_eos=True, temperature=0)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts) and counts[-1] == 6
    assert all(event["usage"]["prompt_tokens"] == events[-1]["usage"]["prompt_tokens"] for event in events)


def test_C12_obfuscation_may_be_asked_for(served: Deployment) -> None:
    assert served.stream_chat(stream_options={"include_obfuscation": True}, max_tokens=1)


def test_C13_a_stream_comes_as_it_is_made(served: Deployment) -> None:
    """The first text arrives long before the end: no component waits for the whole answer."""
    body = served.chat_body(stream=True, max_tokens=200, ignore_eos=True, temperature=0)
    texts = 0
    with served.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line.startswith("data: {"))
        for line in lines:
            texts += bool(json.loads(line[6:])["choices"][0]["delta"].get("content"))
            if texts == 3:
                break
        running = served.total(metrics.WORKER_RUNNING.name)
    assert texts == 3 and running >= 1


def test_C14_stop_token_and_length_ends_are_named_in_streams(served: Deployment) -> None:
    (token,) = served.tokenize(" b")
    fields = {**exactly("a b c"), "stop_token_ids": [token], "logit_bias": {str(token): 100}}
    events = served.stream_chat(temperature=0, **fields)
    assert joined(events) == "a"
    end = list(choices_of(events))[-1]
    assert (end["finish_reason"], end["matched_stop"]) == ("stop", token)
    short = list(choices_of(served.stream_chat(max_tokens=2, ignore_eos=True)))[-1]
    assert (short["finish_reason"], short["matched_stop"]) == ("length", None)


def test_C15_options_of_a_stream_are_checked(served: Deployment) -> None:
    check_param(served.post_chat(stream=True, stream_options={"include_usage": "yes"}), "stream_options")
    check_param(served.post_chat(stream=True, stream_options=5), "stream_options")
    check_param(served.post_chat(stream="yes"), "stream")
