"""A stream that breaks off is taken up by another worker, at whatever token: together they say the same."""

from __future__ import annotations

import json
import random
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton_api import anthropic, headers
from baton_api.stream_comments import (
    BEGINS,
    COMMENT,
    TOKENS,
    Beginning,
    Resumption,
    read_line,
    read_numbers,
    take_comments,
    with_resumption,
)
from tests.engine.api.api import MODEL, USER, Api, joined, open_api

RESUMABLE = {headers.RESUMABLE: "1"}
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with open_api() as api:
        yield api


class Followed:
    """One stream as a router sees it: its events, and after how many tokens each of them came."""

    def __init__(self, text: bytes) -> None:
        self.beginning: Beginning | None = None
        self.tokens: list[int] = []
        self.steps: list[tuple[bytes, int, bool]] = []
        """(events, tokens in all behind them, whether the answer has ended)"""
        events = b""
        for event in text.split(b"\n\n")[:-1]:
            if event.startswith(BEGINS):
                self.beginning = json_of(event.removeprefix(BEGINS))
            elif event.startswith(TOKENS):
                numbers, ended = read_line(event)
                self.tokens += read_numbers(numbers)
                self.steps.append((events, len(self.tokens), ended))
                events = b""
            else:
                events += event + b"\n\n"
        self.rest = events

    @property
    def events(self) -> bytes:
        return b"".join(events for events, _, _ in self.steps) + self.rest


def without_call_ids(events: bytes) -> bytes:
    """A call's name is drawn when it is first sent, and sent once."""
    return re.sub(rb'"call_\w+"', b'"call"', events)


def json_of(text: bytes) -> Beginning:
    return Beginning(**json.loads(text))


async def follow(api: Api, path: str, body: dict[str, Any]) -> Followed:
    response = await api.http.post(path, json=body, headers=RESUMABLE)
    assert response.status_code == 200, response.text
    return Followed(response.content)


async def resume(api: Api, path: str, body: dict[str, Any], resumption: Resumption) -> Followed:
    raw = with_resumption(json.dumps(body).encode(), resumption)
    response = await api.http.post(
        path, content=raw, headers={**RESUMABLE, "content-type": "application/json"}
    )
    assert response.status_code == 200, response.text
    return Followed(response.content)


def chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    usage = {"include_usage": True}
    return CHAT, {"model": MODEL, "messages": USER, "stream": True, "stream_options": usage, **fields}


def message(**fields: Any) -> tuple[str, dict[str, Any]]:
    return anthropic.MESSAGES, {"model": MODEL, "messages": USER, "stream": True, **fields}


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"model": MODEL, "prompt": "Once", "stream": True, **fields}


REQUESTS = {
    "greedy": chat(temperature=0, max_tokens=24),
    "sampled without a seed": chat(temperature=1.3, max_tokens=24),
    "penalised": chat(temperature=1, max_tokens=24, presence_penalty=1.5, frequency_penalty=1, seed=3),
    "repetition": chat(temperature=1, max_tokens=24, repetition_penalty=1.7, seed=4),
    "with logprobs": chat(temperature=1, max_tokens=16, logprobs=True, top_logprobs=2, seed=5),
    "at least so many": chat(temperature=1, max_tokens=24, min_tokens=12, seed=6),
    "until a stop string": chat(temperature=1, max_tokens=200, stop=["ab", "qz", "e"], seed=7),
    "constrained": chat(temperature=1, max_tokens=60, regex="(spam|eggs|ham){3,6} [a-f]{9}é✓", seed=8),
    "a call": chat(
        temperature=1,
        max_tokens=120,
        seed=9,
        tools=[{"type": "function", "function": {"name": "f", "parameters": {
            "type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}}}],
        tool_choice="required",
    ),
    "a message": message(temperature=1, max_tokens=24, seed=11),
    "a message that calls": message(
        temperature=1,
        max_tokens=120,
        seed=12,
        tools=[{"name": "f", "input_schema": {
            "type": "object", "properties": {"a": {"enum": ["x", "yy"]}}, "required": ["a"]}}],
        tool_choice={"type": "any"},
    ),
    "a completion": completion(temperature=1, max_tokens=24, seed=10, logprobs=1),
    "an echo": completion(temperature=0, max_tokens=12, echo=True),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
async def test_resume_gives_the_rest_of_the_answer(api: Api, name: str) -> None:
    path, body = REQUESTS[name]
    whole = await follow(api, path, body)
    assert whole.beginning is not None and whole.steps[-1][2]
    assert whole.tokens
    rng = random.Random(name)
    cuts = {
        0,
        1,
        len(whole.steps) - 1,
        len(whole.steps),
        *(rng.randrange(len(whole.steps)) for _ in range(4)),
    }
    for cut in sorted(cuts):
        had = b"".join(events for events, _, _ in whole.steps[:cut])
        drawn = whole.steps[cut - 1][1] if cut else 0
        ended = cut == len(whole.steps)
        resumption = Resumption(whole.beginning, whole.tokens[:drawn], ended)
        rest = await resume(api, path, body, resumption)
        assert without_call_ids(had + rest.events) == without_call_ids(whole.events), (
            f"after {drawn} of {len(whole.tokens)} tokens"
        )
        assert whole.tokens[:drawn] + rest.tokens == whole.tokens


@pytest.mark.one_process("has a frontend of its own")
@pytest.mark.parametrize("name", REQUESTS)
async def test_resume_behind_a_frontend_that_joins_tokens_gives_the_rest_of_the_answer(name: str) -> None:
    """The events are others, as their tokens are joined by chance; what they say is the same."""
    path, body = REQUESTS[name]
    async with open_api(split=True, joins=True) as api:
        whole = await follow(api, path, body)
        assert whole.beginning is not None and whole.steps[-1][2]
        said = joined(without_call_ids(whole.events).decode())
        for cut in {0, 1, len(whole.steps) // 2, len(whole.steps) - 1, len(whole.steps)}:
            had = b"".join(events for events, _, _ in whole.steps[:cut])
            drawn = whole.steps[cut - 1][1] if cut else 0
            resumption = Resumption(whole.beginning, whole.tokens[:drawn], cut == len(whole.steps))
            rest = await resume(api, path, body, resumption)
            assert joined(without_call_ids(had + rest.events).decode()) == said, f"after {drawn} tokens"
            assert whole.tokens[:drawn] + rest.tokens == whole.tokens


async def test_resume_unrequested_sends_no_resume_state(api: Api) -> None:
    path, body = REQUESTS["greedy"]
    response = await api.http.post(path, json=body)
    assert b"baton" not in response.content.replace(b'"system_fingerprint":"baton', b"")


UNRESUMABLE: dict[str, tuple[str, dict[str, Any], int]] = {
    "choices": ("/v1/chat/completions", {"model": MODEL, "messages": USER, "n": 3, "stream": True}, 3),
    "prompts": ("/v1/completions", {"model": MODEL, "prompt": ["a", "bc"], "n": 2, "stream": True}, 4),
    "generate": ("/generate", {"text": "a", "stream": True}, 1),
    "a response": ("/v1/responses", {"model": MODEL, "input": "a", "stream": True}, 1),
}


@pytest.mark.parametrize(("path", "body", "choices"), UNRESUMABLE.values(), ids=UNRESUMABLE.keys())
async def test_stream_that_cannot_be_resumed_says_what_it_has_cost(
    api: Api, path: str, body: dict[str, Any], choices: int
) -> None:
    """Behind each event that brings tokens, the sum of all choices; whole answers have it in a header."""
    length: dict[str, Any] = {"sampling_params": {"max_new_tokens": 6, "ignore_eos": True}}
    if path != "/generate":
        length = {"max_output_tokens" if "input" in body else "max_tokens": 6, "ignore_eos": True}
    if "input" in body:
        del length["ignore_eos"]
        api.model.script = "abcdefghi"
    stream = (await api.http.post(path, json={**body, **length}, headers=RESUMABLE)).content
    rest, last = take_comments(stream)
    assert b"baton-" not in rest.replace(b'"baton-', b"")
    assert last is not None and last.generated == 6 * choices
    seen = [line for line in stream.split(b"\n") if line.startswith(COMMENT)]
    counts = [int(line.split()[-1]) for line in seen]
    assert counts == sorted(counts) and len(set(counts)) > 1
    whole = await api.http.post(path, json={**body, **length, "stream": False})
    assert whole.headers[headers.USAGE].encode() == last.encode()


@pytest.mark.parametrize("fields", [{"n": 2}, {"stream": False, "stream_options": None}])
async def test_resume_unsupported_request_is_not_offered(api: Api, fields: dict[str, Any]) -> None:
    path, body = chat(max_tokens=4, **fields)
    response = await api.http.post(path, json=body, headers=RESUMABLE)
    assert response.status_code == 200
    assert BEGINS not in response.content and TOKENS not in response.content
    resumed = with_resumption(json.dumps(body).encode(), Resumption(Beginning("x", 1, 1, 0), [1]))
    refused = await api.http.post(path, content=resumed, headers={"content-type": "application/json"})
    assert refused.status_code == 400


@pytest.mark.parametrize(
    "given", [5, {}, {"beginning": {}, "tokens": []}, {"beginning": None, "tokens": [1]}]
)
async def test_resume_invalid_state_is_rejected(api: Api, given: object) -> None:
    path, body = chat(max_tokens=4)
    response = await api.http.post(path, json={**body, "baton_resume": given})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "baton_resume"


@pytest.mark.parametrize("tokens", [[10**9], [-1], list(range(40))])
async def test_tokens_that_cannot_have_been_drawn_are_refused(api: Api, tokens: list[int]) -> None:
    path, body = chat(max_tokens=24)
    raw = with_resumption(json.dumps(body).encode(), Resumption(Beginning("x", 1, 1, 0), tokens))
    response = await api.http.post(path, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
