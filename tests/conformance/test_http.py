"""A: HTTP, authorization, models."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import httpx
import openai
import pytest

from baton_api import headers as header_names
from baton_api.errors import MISSING_REQUIRED_PARAMETER, BodyTooLarge, ModelNotFound, Unauthorized
from tests.conformance.deployment import PAIR, QUESTION, TIMEOUT_S, Deployment
from tests.conformance.expected import ANY, check_error, check_param, refusal

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"Content-Type": "application/json"}

NULLABLE = """
    frequency_penalty logit_bias logprobs top_logprobs max_completion_tokens max_tokens metadata n
    parallel_tool_calls prediction presence_penalty prompt_cache_key reasoning_effort response_format
    safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
    top_p user verbosity web_search_options modalities audio functions function_call
"""

NULLABLE_EXTENSIONS = """
    top_k min_p repetition_penalty stop_token_ids min_tokens ignore_eos regex ebnf chat_template_kwargs
    separate_reasoning structured_outputs return_token_ids
"""

NULLABLE_OF_COMPLETIONS = """
    best_of echo frequency_penalty logit_bias logprobs max_tokens n presence_penalty seed stop stream
    stream_options suffix temperature top_p user
"""


def test_A1_the_list_of_models_is_stable(served: Deployment) -> None:
    page = served.client.models.list()
    assert page.object == "list"
    card = next(card for card in page.data if card.id == served.model)
    assert card.object == "model" and card.created > 0 and isinstance(card.owned_by, str)
    again = next(card for card in served.client.models.list().data if card.id == served.model)
    assert again.created == card.created


def test_A2_a_model_with_a_slash_is_found_by_sdk_and_by_path(served: Deployment) -> None:
    card = served.client.models.retrieve(served.model)
    assert card.id == served.model and card.object == "model"
    encoded = served.http.get(f"/v1/models/{quote(served.model, safe='')}")
    plain = served.http.get(f"/v1/models/{served.model}")
    assert encoded.status_code == plain.status_code == 200
    listed = served.http.get("/v1/models").json()["data"][0]
    assert encoded.json() == plain.json() == listed


def test_A3_an_unknown_model_is_not_found(served: Deployment) -> None:
    answer = refusal(lambda: served.client.models.retrieve("nope"), openai.NotFoundError)
    check_error(answer, 404, "model", ModelNotFound.code)


def test_A4_generating_with_an_unknown_model_is_not_found(served: Deployment) -> None:
    chat = served.post(CHAT, {"model": "nope", "messages": QUESTION})
    check_error(chat, 404, ("model", None), ModelNotFound.code)
    check_error(
        served.post(COMPLETIONS, {"model": "nope", "prompt": "a"}), 404, ("model", None), ModelNotFound.code
    )


def test_A5_the_model_is_required(served: Deployment) -> None:
    check_error(served.post(CHAT, {"messages": QUESTION}), 400, "model", MISSING_REQUIRED_PARAMETER)
    check_error(served.post(COMPLETIONS, {"prompt": "a"}), 400, "model", MISSING_REQUIRED_PARAMETER)


@pytest.mark.parametrize("body", [b'{"model":', b"[]", b"", b"\xff\xfe", b'{"model": NaN}', b'"text"'])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_A6_a_body_that_is_no_json_object_is_refused(served: Deployment, path: str, body: bytes) -> None:
    check_error(served.http.post(path, content=body, headers=JSON), 400, (None, "model"))


def test_A7_another_content_type_is_refused(served: Deployment) -> None:
    answer = served.http.post(CHAT, content=b"{}", headers={"Content-Type": "text/plain"})
    check_error(answer, 400, None, None)


def test_A8_unknown_paths_and_methods_have_the_error_shape(served: Deployment) -> None:
    check_error(served.http.get("/v1/nothing"), 404, None, None)
    check_error(served.http.get(CHAT), 405, None, None)
    check_error(served.http.delete("/v1/models"), 405, None, None)


def test_A9_a_key_is_asked_for_where_it_should_be(guarded: Deployment) -> None:
    def models(headers: dict[str, str]) -> httpx.Response:
        return httpx.get(f"{guarded.url}/v1/models", headers=headers, timeout=TIMEOUT_S, trust_env=False)

    def chat(headers: dict[str, str]) -> httpx.Response:
        body = guarded.chat_body(max_tokens=1)
        return httpx.post(
            f"{guarded.url}{CHAT}", json=body, headers=headers, timeout=TIMEOUT_S, trust_env=False
        )

    for ask in (models, chat):
        for wrong in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "k"}):
            check_error(ask(wrong), 401, None, Unauthorized.code)
        assert ask({"Authorization": "Bearer k"}).status_code == 200
        assert ask({"Authorization": "bearer k"}).status_code == 200
    for path in ("/health", "/ready"):
        assert httpx.get(f"{guarded.url}{path}", timeout=TIMEOUT_S, trust_env=False).status_code == 200
    # The metrics of a router name workers and tenants; those of a worker are as open as vLLM's.
    for headers, status in (({}, 401 if guarded.way == PAIR else 200), ({"Authorization": "Bearer k"}, 200)):
        metrics = httpx.get(f"{guarded.url}/metrics", headers=headers, timeout=TIMEOUT_S, trust_env=False)
        assert metrics.status_code == status
    with openai.OpenAI(
        base_url=f"{guarded.url}/v1", api_key="wrong", http_client=openai.DefaultHttpxClient(trust_env=False)
    ) as stranger:
        refusal(stranger.models.list, openai.AuthenticationError)


def test_A9_without_a_key_any_header_is_accepted(served: Deployment) -> None:
    for headers in ({}, {"Authorization": "Bearer anything"}, {"Authorization": ""}):
        answer = httpx.get(f"{served.url}/v1/models", headers=headers, timeout=TIMEOUT_S, trust_env=False)
        assert answer.status_code == 200


def test_A10_every_answer_has_an_id_of_its_own(served: Deployment) -> None:
    answers = [
        served.http.get("/v1/models"),
        served.http.get("/v1/models/nope"),
        served.post_chat(max_tokens=1),
        served.post_chat(max_tokens=1, stream=True),
        served.post_chat(temperature=9),
        served.http.get("/v1/nothing"),
    ]
    ids = [answer.headers[header_names.REQUEST_ID] for answer in answers]
    assert all(ids) and len(set(ids)) == len(ids)
    raw = served.client.chat.completions.with_raw_response.create(
        model=served.model, messages=[{"role": "user", "content": "Hi"}], max_tokens=1
    )
    assert (
        raw.headers[header_names.REQUEST_ID]
        and raw.parse()._request_id == raw.headers[header_names.REQUEST_ID]
    )


def test_A10_a_request_id_that_was_sent_comes_back(served: Deployment) -> None:
    mine = {"X-Request-Id": "mine-1234"}
    assert served.http.get("/v1/models", headers=mine).headers[header_names.REQUEST_ID] == "mine-1234"
    bad = served.http.post(CHAT, json={"messages": []}, headers=mine)
    assert bad.status_code == 400 and bad.headers[header_names.REQUEST_ID] == "mine-1234"
    good = served.http.post(CHAT, json=served.chat_body(max_tokens=1), headers=mine)
    assert good.status_code == 200 and good.headers[header_names.REQUEST_ID] == "mine-1234"


def test_A11_unknown_fields_are_let_through(served: Deployment) -> None:
    assert served.chat(max_tokens=1, extra_body={"foo": 1, "bar": {"baz": [None]}}).choices
    assert served.complete("a", max_tokens=1, extra_body={"foo": 1}).choices


def test_A11_null_is_as_good_as_absent(served: Deployment) -> None:
    nulls: dict[str, Any] = dict.fromkeys((NULLABLE + NULLABLE_EXTENSIONS).split())
    for bound in ("max_tokens", "max_completion_tokens"):
        answer = served.post_chat(**{**nulls, bound: 4})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] <= 4
    nulls = dict.fromkeys(NULLABLE_OF_COMPLETIONS.split())
    answer = served.post_completion("a", **nulls)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] <= 16


def test_A12_headers_of_sdks_are_let_through(served: Deployment) -> None:
    headers = {"x-stainless-lang": "python", "OpenAI-Organization": "o", "OpenAI-Project": "p"}
    assert served.http.get("/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("depth", [200, 100_000])
def test_A13_deeply_nested_body_is_rejected_and_the_server_lives(served: Deployment, depth: int) -> None:
    content = b'{"model":"' + served.model.encode() + b'","messages":' + b"[" * depth + b"]" * depth + b"}"
    check_error(served.http.post(CHAT, content=content, headers=JSON), 400, ANY, ANY)
    assert served.chat(max_tokens=1).choices


def test_A14_a_lone_surrogate_is_refused(served: Deployment) -> None:
    content = b'{"model":"%s","messages":[{"role":"user","content":"\\ud800"}]}' % served.model.encode()
    answer = served.http.post(CHAT, content=content, headers=JSON)
    check_error(answer, 400)
    content = b'{"model":"%s","prompt":"\\udfff"}' % served.model.encode()
    check_error(served.http.post(COMPLETIONS, content=content, headers=JSON), 400)


def test_A15_a_number_beyond_any_range_is_refused(served: Deployment) -> None:
    for text in (b"1e999", b"-1e999", b"NaN", b"Infinity"):
        content = b'{"model":"%s","prompt":"a","temperature":%s}' % (served.model.encode(), text)
        check_error(served.http.post(COMPLETIONS, content=content, headers=JSON), 400)
    check_param(served.post_completion("a", seed=2**64), "seed")


def test_A16_a_body_over_the_limit_is_413(served: Deployment) -> None:
    answer = served.http.post(CHAT, content=b" " * (64 * 1024 * 1024), headers=JSON)
    check_error(answer, 413, None, BodyTooLarge.code)
