"""K: embeddings, responses, operations."""

from __future__ import annotations

import base64
import itertools
import json
import math
import struct
import threading
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from baton_api import metrics
from baton_api.errors import MISSING_REQUIRED_PARAMETER, ModelNotFound
from tests.conformance.deployment import QUESTION, TIMEOUT_S, Deployment, await_true
from tests.conformance.expected import check_error, check_param, refusal

EMOJI = "Grüße 👋🏽 aus 東京, e\u0301"


def respond(served: Deployment, text: Any = "hi", **more: Any) -> Response:
    response = served.client.responses.create(
        model=served.model, input=text, **{"max_output_tokens": 16, **more}
    )
    assert isinstance(response, Response)
    return response


def test_K1_embeddings_or_a_clear_refusal(served: Deployment) -> None:
    body = {"model": served.model, "input": ["one text", "another text", "one text"]}
    answer = served.post("/v1/embeddings", body)
    if answer.status_code != 200:
        check_error(answer, 400, "model")
        return
    reply = answer.json()
    assert reply["object"] == "list" and reply["model"] == served.model
    assert [row["index"] for row in reply["data"]] == [0, 1, 2]
    assert {row["object"] for row in reply["data"]} == {"embedding"}
    first, second, third = (row["embedding"] for row in reply["data"])
    assert len(first) == len(second) and first != second
    assert first == pytest.approx(third, abs=1e-3)
    assert all(math.isfinite(value) for value in first)
    assert reply["usage"]["prompt_tokens"] == reply["usage"]["total_tokens"] > 0
    spelled = served.post("/v1/embeddings", {**body, "encoding_format": "base64"}).json()
    raw = base64.b64decode(spelled["data"][0]["embedding"])
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(first, abs=1e-3)
    by_sdk = served.client.embeddings.create(model=served.model, input="one text")
    assert by_sdk.data[0].embedding == pytest.approx(first, abs=1e-3)


@pytest.mark.parametrize("wrong", [[], "", [""], ["a"] * 2049, 5, None], ids=lambda value: str(value)[:12])
def test_K2_what_cannot_be_embedded_is_named(served: Deployment, wrong: Any) -> None:
    answer = served.post("/v1/embeddings", {"model": served.model, "input": wrong})
    check_error(answer, 400, ("input", "model"))
    unknown = served.post("/v1/embeddings", {"model": "nope", "input": "a"})
    check_error(unknown, 404, "model", ModelNotFound.code)


def test_K2_documents_are_sorted_by_the_query(thinker: Deployment) -> None:
    query, documents = "capital of Spain", ["a relay race", "capital of Spain", "Rome"]
    body = {"model": thinker.model, "query": query, "documents": documents}
    answer = thinker.post("/v1/rerank", body)
    assert answer.status_code == 200, answer.text
    results = answer.json()["results"]
    scores = [row["relevance_score"] for row in results]
    assert scores == sorted(scores, reverse=True) and len(scores) == len(documents)
    assert results[0]["index"] == 1 and scores[0] == pytest.approx(1, abs=1e-3)
    assert results[0]["document"] == {"text": query}
    pairs = thinker.post("/v1/score", {"model": thinker.model, "text_1": query, "text_2": documents})
    by_index = {row["index"]: row["relevance_score"] for row in results}
    assert [row["score"] for row in pairs.json()["data"]] == pytest.approx(
        [by_index[index] for index in range(len(documents))], abs=1e-3
    )
    check_error(thinker.post("/v1/rerank", {**body, "documents": []}), 400, "documents")


def test_K3_a_response(served: Deployment) -> None:
    response = respond(served)
    assert response.object == "response" and response.id.startswith("resp_")
    assert isinstance(response.output_text, str)
    assert response.status in ("completed", "incomplete")
    if response.status == "incomplete":
        assert response.incomplete_details and response.incomplete_details.reason == "max_output_tokens"
    usage = response.usage
    assert usage and usage.input_tokens_details and usage.output_tokens_details
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    assert isinstance(usage.input_tokens_details.cached_tokens, int)
    assert isinstance(usage.output_tokens_details.reasoning_tokens, int)
    raw = response.model_dump()
    required = "id object created_at status error incomplete_details instructions model output"
    more = "parallel_tool_calls tools tool_choice temperature top_p metadata"
    assert set(f"{required} {more}".split()) <= set(raw)


def test_K4_a_streamed_response_is_numbered_and_adds_up(served: Deployment) -> None:
    body = {"model": served.model, "input": "hi", "max_output_tokens": 16, "temperature": 0, "stream": True}
    answer = served.post("/v1/responses", body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert b"[DONE]" not in answer.content
    frames = [frame for frame in answer.text.split("\n\n") if frame and not frame.startswith(":")]
    events = []
    for frame in frames:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:-1] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    final = events[-1]["response"]
    assert text == final["output"][0]["content"][0]["text"]
    assert text == respond(served, temperature=0).output_text
    with served.client.responses.stream(
        model=served.model, input="hi", max_output_tokens=16, temperature=0
    ) as stream:
        assert stream.get_final_response().output_text == text


def test_K5_a_response_goes_on_from_an_earlier_one(served: Deployment) -> None:
    first = respond(served, "My name is Ada.", temperature=0)
    second = respond(served, "What is my name?", previous_response_id=first.id, temperature=0)
    single = respond(served, "What is my name?", temperature=0)
    assert second.previous_response_id == first.id
    assert second.usage and single.usage and second.usage.input_tokens > single.usage.input_tokens
    unknown = refusal(lambda: respond(served, previous_response_id="resp_none"), openai.APIStatusError)
    assert unknown.status_code in (400, 404)
    check_error(unknown, unknown.status_code)


def test_K6_a_stored_response_can_be_read_and_deleted(served: Deployment) -> None:
    created = respond(served, temperature=0)
    retrieved = served.client.responses.retrieve(created.id)
    assert retrieved.id == created.id and retrieved.output_text == created.output_text
    items = served.client.responses.input_items.list(created.id).data
    assert len(items) == 1
    served.client.responses.delete(created.id)
    gone = refusal(lambda: served.client.responses.retrieve(created.id), openai.NotFoundError)
    check_error(gone, 404)
    unstored = respond(served, store=False)
    refusal(lambda: served.client.responses.retrieve(unstored.id), openai.NotFoundError)


def test_K7_a_response_is_checked_like_a_chat(served: Deployment) -> None:
    def post(**more: Any) -> Any:
        return served.post("/v1/responses", {"model": served.model, "input": "hi", **more})

    check_error(post(temperature=3), 400, "temperature")
    check_error(post(model="nope"), 404, ("model", None), ModelNotFound.code)
    hosted = {"type": "web_search"}  # left out, unless the response has to call it
    check_param(post(tools=[hosted], tool_choice=hosted), "tool_choice")
    check_error(post(max_output_tokens=0), 400, "max_output_tokens")
    check_error(post(temperature=3, stream=True), 400, "temperature")
    check_error(served.post("/v1/responses", {"input": "hi"}), 400, "model", MISSING_REQUIRED_PARAMETER)


def test_K8_counters_grow_by_what_was_done(served: Deployment) -> None:
    await_true(lambda: served.busy() == 0, TIMEOUT_S, "no earlier request will be counted yet")
    choices, tokens = metrics.WORKER_REQUESTS.name, metrics.WORKER_GENERATION_TOKENS.name
    requests_metric = metrics.ROUTER_REQUESTS.name
    before = [served.total(choices), served.total(tokens), fronted(served, requests_metric)]
    usages = [served.chat(max_tokens=3 + index % 2).usage for index in range(10)]
    spent = sum(usage.completion_tokens for usage in usages if usage)

    def grown() -> list[float]:
        return [
            now - then
            for now, then in zip(
                (served.total(choices), served.total(tokens), fronted(served, requests_metric)),
                before,
                strict=True,
            )
        ]

    expected = [10, spent, 10 if served.is_pair else 0]
    # Each process counts a request a moment after its end.
    await_true(
        lambda: all(a >= b for a, b in zip(grown(), expected, strict=True)), TIMEOUT_S, "all is counted"
    )
    assert grown() == expected
    page = served.http.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    assert "# TYPE" in page.text and "# HELP" in page.text


def fronted(served: Deployment, name: str) -> float:
    """Count of the process that clients connect to."""
    return sum(value for key, value in served.metrics().items() if key.partition("{")[0] == name)


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_K9_text_becomes_tokens_and_text_again(served: Deployment, prefix: str) -> None:
    tokenized = served.post(
        f"{prefix}/tokenize", {"model": served.model, "prompt": EMOJI, "add_special_tokens": False}
    )
    assert tokenized.status_code == 200, tokenized.text
    body = tokenized.json()
    assert body["count"] == len(body["tokens"]) and isinstance(body["max_model_len"], int)
    back = served.post(f"{prefix}/detokenize", {"model": served.model, "tokens": body["tokens"]})
    assert back.status_code == 200, back.text
    assert back.json()["text"] == back.json()["prompt"] == EMOJI


def test_K10_several_texts_are_tokenized_at_once(served: Deployment) -> None:
    body = served.post("/tokenize", {"model": served.model, "prompt": ["a b", "c"]}).json()
    assert [len(tokens) for tokens in body["tokens"]] == (
        body["count"] if isinstance(body["count"], list) else [len(tokens) for tokens in body["tokens"]]
    )
    texts = served.post("/detokenize", {"model": served.model, "tokens": body["tokens"]}).json()["text"]
    assert texts == ["a b", "c"]
    check_param(served.post("/detokenize", {"model": served.model, "tokens": [-1]}), "tokens")
    check_param(served.post("/tokenize", {"model": served.model, "prompt": 5}), "prompt")


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/get_model_info", "/model_info"])
def test_K11_what_operators_ask_for_is_there(served: Deployment, path: str) -> None:
    answer = served.http.get(path)
    assert answer.status_code == 200, answer.text
    if path == "/version":
        assert isinstance(answer.json()["version"], str)
    if path.endswith("model_info"):
        info = answer.json()
        assert info["is_generation"] is True and info["model_path"]
        assert served.model in str(info["served_model_name"])


@pytest.mark.parametrize("path", ["/server_info", "/get_server_info"])
def test_K12_a_server_tells_its_settings_but_no_secret(guarded: Deployment, path: str) -> None:
    answer = guarded.http.get(path)
    assert answer.status_code == 200, answer.text
    assert answer.json()
    assert '"k"' not in answer.text


def test_K13_generate_in_its_own_words(served: Deployment) -> None:
    parameters = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    body = {"text": QUESTION[0]["content"], "sampling_params": parameters}
    answer = served.post("/generate", body)
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    plain = served.complete(
        QUESTION[0]["content"], max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert reply["text"] == plain.choices[0].text
    assert len(reply["output_ids"]) == 8
    details = reply["meta_info"]
    assert details["completion_tokens"] == 8 and details["finish_reason"] == {"type": "length", "length": 8}
    assert plain.usage and details["prompt_tokens"] == plain.usage.prompt_tokens
    by_ids = served.post(
        "/generate", {"input_ids": served.tokenize(QUESTION[0]["content"]), "sampling_params": parameters}
    )
    assert by_ids.status_code == 200 and by_ids.json()["text"]


def test_K14_generate_streams_all_text_so_far(served: Deployment) -> None:
    body = {
        "text": "One, two,",
        "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
    }
    whole = served.post("/generate", body).json()["text"]
    texts = [event["text"] for event in served.stream("/generate", {**body, "stream": True})]
    assert texts[-1] == whole
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


@pytest.mark.parametrize("stream", [True, False])
def test_K15_a_request_is_aborted_by_its_id(served: Deployment, stream: bool) -> None:
    body = served.chat_body(max_tokens=4000, ignore_eos=True, rid=f"abort-me-{stream}", stream=stream)
    answers: list[Any] = []
    await_true(lambda: served.busy() == 0, TIMEOUT_S, "no earlier request runs")
    running = threading.Thread(target=lambda: answers.append(served.post("/v1/chat/completions", body)))
    running.start()
    try:
        await_true(lambda: served.total(metrics.WORKER_RUNNING.name) >= 1, TIMEOUT_S, "it runs")
        aborted = served.post("/abort_request", {"rid": f"abort-me-{stream}"})
        assert aborted.status_code == 200, aborted.text
    finally:
        running.join(TIMEOUT_S)
    await_true(lambda: served.total(metrics.WORKER_RUNNING.name) == 0, TIMEOUT_S, "nothing runs")
    (answer,) = answers
    assert 'finish_reason":"abort' not in answer.text.replace(" ", "")
    unknown = served.post("/abort_request", {"rid": "nobody"})
    assert unknown.status_code in (200, 404)
