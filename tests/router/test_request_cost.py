"""What a request costs: all of its prompts and choices, whatever its API calls them."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from baton_api import headers
from baton_api.errors import InvalidRequest
from baton_api.limits import ALL_CHOICES
from baton_router.requests.inference_request import InferenceRequest
from baton_router.requests.picker import ANSWER_WEIGHT, RequestCost
from tests.router.fake_worker import FakeWorker
from tests.router.running import CHAT, QUESTION, running_router
from tests.router.test_quotas import ask, tenants

COMPLETIONS = "/v1/completions"
TALK = [{"role": "user", "content": "hi"}]

BODIES: dict[str, tuple[str, dict[str, Any], RequestCost]] = {
    "a chat": (CHAT, {"messages": TALK}, RequestCost()),
    "a chat with a limit": (CHAT, {"messages": TALK, "max_tokens": 7}, RequestCost(1, 0, 1, 7)),
    "the newer limit wins": (
        CHAT, {"messages": TALK, "max_tokens": 7, "max_completion_tokens": 3}, RequestCost(1, 0, 1, 3),
    ),
    "choices": (CHAT, {"messages": TALK, "n": 5}, RequestCost(1, 0, 5)),
    "a chat in no known shape": (CHAT, {"messages": "hi", "n": 5}, RequestCost(1, 0, 5)),
    "no tokens": (COMPLETIONS, {"prompt": "hi", "max_tokens": 0}, RequestCost(1, 0, 1, 0)),
    "prompts": (COMPLETIONS, {"prompt": ["a", "bcd", "ü"]}, RequestCost(3, 5, 3)),
    "prompts of tokens": (COMPLETIONS, {"prompt": [[1], [2, 3]]}, RequestCost(2, 8, 2)),
    "one prompt of tokens": (COMPLETIONS, {"prompt": [1, 2, 3]}, RequestCost()),
    "prompts and choices": (COMPLETIONS, {"prompt": ["", "b" * 40], "n": 8}, RequestCost(2, 40, 16)),
    "best_of": (COMPLETIONS, {"prompt": "a", "n": 2, "best_of": 6}, RequestCost(1, 0, 6)),
    "generate": (
        "/generate", {"text": "a", "sampling_params": {"n": 3, "max_new_tokens": 9}}, RequestCost(1, 0, 3, 9),
    ),
    "generate of several": (
        "/generate",
        {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 9}, {"max_new_tokens": 4, "n": 2}]},
        RequestCost(2, 1, 4, 9),
    ),
    "generate of tokens": ("/generate", {"input_ids": [[1], [2]]}, RequestCost(2, 4, 2)),
    "a response": ("/v1/responses", {"input": "a", "max_output_tokens": 9}, RequestCost(1, 0, 1, 9)),
    "embeddings generate nothing": ("/v1/embeddings", {"input": ["a", "bb"]}, RequestCost(2, 2, 0)),
    "documents": ("/v1/rerank", {"query": "q", "documents": ["aa", "bb"]}, RequestCost(3, 11, 0)),
    "nonsense": (CHAT, {"messages": TALK, "n": "5", "best_of": -1, "max_tokens": "x"}, RequestCost()),
}  # fmt: skip


def cost_of(path: str, body: dict[str, Any]) -> RequestCost:
    scope: Any = {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": []}
    return InferenceRequest(scope, json.dumps({"model": "tiny", **body}).encode()).cost


@pytest.mark.parametrize(("path", "body", "expected"), BODIES.values(), ids=BODIES.keys())
def test_request_cost_is_read_from_every_api(path: str, body: dict[str, Any], expected: RequestCost) -> None:
    assert cost_of(path, body) == expected


LONGEST = 4_000_000
"""Bytes of the longest body."""

LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "token ids": (COMPLETIONS, {"prompt": [1] * (LONGEST // 3)}),
    "token ids to generate from": ("/generate", {"input_ids": [128_000] * (LONGEST // 8)}),
    "prompts of token ids": (COMPLETIONS, {"prompt": [[1] * 1500] * 800}),
    "token ids to embed": ("/v1/embeddings", {"input": [[1] * 100] * (LONGEST // 310)}),
    "a text": (CHAT, {"messages": [{"role": "user", "content": "x " * (LONGEST // 2)}]}),
    "messages": (CHAT, {"messages": [{"role": "user", "content": "x" * 360}] * (LONGEST // 400)}),
    "texts to embed": ("/v1/embeddings", {"input": ["x" * 90] * (LONGEST // 95)}),
}


@pytest.mark.parametrize(("path", "body"), LONG.values(), ids=LONG.keys())
def test_law_long_body_is_read_in_few_objects(path: str, body: dict[str, Any]) -> None:
    """A step of the event loop takes as long as the objects that it makes: most bytes make none."""
    scope: Any = {"path": path, "raw_path": path.encode(), "query_string": b"", "headers": []}
    content = json.dumps({"model": "tiny", **body}).encode()
    tracemalloc.start()
    try:
        request = InferenceRequest(scope, content)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert request.prompt.bytes
    assert peak < 3.5 * len(content)


def test_long_prompts_of_ids_are_counted() -> None:
    cost = cost_of(COMPLETIONS, {"prompt": [[1] * 1500] * 800, "n": 1})
    assert (cost.prompts, cost.choices) == (800, 800)
    with pytest.raises(InvalidRequest, match="maximum of 1024 choices"):
        cost_of(COMPLETIONS, {"prompt": [[1] * 100] * 12_000})


def test_law_request_cost_grows_with_choices_and_prompts() -> None:
    one = RequestCost(answer_limit=30)
    for number in (1, 2, 128):
        many = RequestCost(number, 400 * (number - 1), number, 30)
        assert many.answer_tokens(50.0) == number * one.answer_tokens(50.0) == number * 30
        assert many.most_answer_tokens(50.0) == number * 30
        assert 100 + many.others() == 100 * number
        assert many.fair_share(100, 50.0) == 100 + ANSWER_WEIGHT * number * 30
    free = RequestCost(choices=4)
    assert free.answer_tokens(50.0) == free.most_answer_tokens(50.0) == 200
    assert free.most_answer_tokens(50.0, steps=80.0) == 320


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": TALK, "n": ALL_CHOICES.most + 1}),
        (COMPLETIONS, {"prompt": ["a"] * 32, "n": 128}),
        (COMPLETIONS, {"prompt": ["a"] * (ALL_CHOICES.most + 1)}),
        ("/generate", {"text": ["a"] * 9, "sampling_params": {"n": 128}}),
    ],
)
def test_more_choices_than_a_request_may_have_are_rejected(path: str, body: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=f"maximum of {ALL_CHOICES.most} choices"):
        cost_of(path, body)
    assert cost_of("/v1/embeddings", {"input": ["a"] * 2000}).choices == 0


async def test_too_many_choices_reach_no_worker() -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        answer = await router.post({**QUESTION, "n": 10**9})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        assert not worker.requests


async def test_workers_learn_whose_turn_a_request_is(tmp_path: Any) -> None:
    """By a name that says nothing, the same for each request of a tenant."""
    settings = tenants(tmp_path, small={}, other={})
    async with FakeWorker() as worker, running_router([worker], **settings) as router:
        for tenant in ("small", "other", "small"):
            await ask(router, tenant, **{headers.TENANT: "mine"})
        names = [request.header(headers.TENANT) for request in worker.requests]
        assert names[0] == names[2] and names[0] != names[1]
        assert all(name and "small" not in name and name != "mine" for name in names)
    async with FakeWorker() as worker, running_router([worker]) as router:
        await router.post(QUESTION)
        assert worker.requests[0].header(headers.TENANT) is None
