"""Bad requests: each row gives the status, the code and the param; and the service continues."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from baton_api import headers as header_names
from baton_api import limits
from baton_api.errors import (
    ARRAY_ABOVE_MAX_LENGTH,
    CONTEXT_LENGTH_EXCEEDED,
    DECIMAL_ABOVE_MAX_VALUE,
    DECIMAL_BELOW_MIN_VALUE,
    EMPTY_ARRAY,
    INTEGER_ABOVE_MAX_VALUE,
    INTEGER_BELOW_MIN_VALUE,
    INVALID_TYPE,
    INVALID_VALUE,
    MISSING_REQUIRED_PARAMETER,
    OBJECT_ABOVE_MAX_PROPERTIES,
    STRING_ABOVE_MAX_LENGTH,
    UNSUPPORTED_PARAMETER,
    BodyTooLarge,
    ModelNotFound,
    Unauthorized,
)
from baton_api.keys import KeyDigest, Keys
from tests.engine.api.api import CONTEXT, MODEL, TOKENIZER, USER, Api, make_tokenizer, open_api

VOCAB = TOKENIZER.vocab_size
TYPE, VALUE = INVALID_TYPE, INVALID_VALUE
HIGH, LOW = DECIMAL_ABOVE_MAX_VALUE, DECIMAL_BELOW_MIN_VALUE
INT_HIGH, INT_LOW = INTEGER_ABOVE_MAX_VALUE, INTEGER_BELOW_MIN_VALUE
LONG, EMPTY, MISSING = ARRAY_ABOVE_MAX_LENGTH, EMPTY_ARRAY, MISSING_REQUIRED_PARAMETER
CONTEXT_CODE, UNSERVED = CONTEXT_LENGTH_EXCEEDED, UNSUPPORTED_PARAMETER


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


# (fields, code, param) for both endpoints
SHARED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"model": None}, MISSING, "model"),
    ({"model": 7}, TYPE, "model"),
    ({"temperature": -0.1}, LOW, "temperature"),
    ({"temperature": 2.1}, HIGH, "temperature"),
    ({"temperature": 10**400}, HIGH, "temperature"),
    ({"temperature": "hot"}, TYPE, "temperature"),
    ({"temperature": True}, TYPE, "temperature"),
    ({"temperature": [1]}, TYPE, "temperature"),
    ({"top_p": -0.1}, LOW, "top_p"),
    ({"top_p": 1.1}, HIGH, "top_p"),
    ({"min_p": 1.1}, HIGH, "min_p"),
    ({"top_k": -2}, INT_LOW, "top_k"),
    ({"top_k": 1.5}, TYPE, "top_k"),
    ({"presence_penalty": 2.1}, HIGH, "presence_penalty"),
    ({"frequency_penalty": -2.1}, LOW, "frequency_penalty"),
    ({"repetition_penalty": 0}, LOW, "repetition_penalty"),
    ({"repetition_penalty": 10**400}, HIGH, "repetition_penalty"),
    ({"n": 0}, INT_LOW, "n"),
    ({"n": 129}, INT_HIGH, "n"),
    ({"n": 10**30}, INT_HIGH, "n"),
    ({"n": "2"}, TYPE, "n"),
    ({"n": True}, TYPE, "n"),
    ({"n": 1.5}, TYPE, "n"),
    ({"seed": 2**63}, INT_HIGH, "seed"),
    ({"seed": -(2**63) - 1}, INT_LOW, "seed"),
    ({"seed": "7"}, TYPE, "seed"),
    ({"stop": ["a"] * 65}, LONG, "stop"),
    ({"stop": ""}, VALUE, "stop"),
    ({"stop": [""]}, VALUE, "stop"),
    ({"stop": 7}, TYPE, "stop"),
    ({"stop": ["a", 7]}, TYPE, "stop[1]"),
    ({"stop": "x" * 257}, STRING_ABOVE_MAX_LENGTH, "stop"),
    ({"stop_token_ids": [VOCAB]}, INT_HIGH, "stop_token_ids[0]"),
    ({"stop_token_ids": [1, -1]}, INT_LOW, "stop_token_ids[1]"),
    ({"stop_token_ids": 7}, TYPE, "stop_token_ids"),
    ({"logit_bias": {str(VOCAB): 1}}, VALUE, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, VALUE, "logit_bias"),
    ({"logit_bias": {"cat": 1}}, VALUE, "logit_bias"),
    ({"logit_bias": {"²": 1}}, VALUE, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, VALUE, "logit_bias"),
    ({"logit_bias": {"7": 101}}, HIGH, "logit_bias.7"),
    ({"logit_bias": {"7": "x"}}, TYPE, "logit_bias.7"),
    ({"logit_bias": [1]}, TYPE, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, OBJECT_ABOVE_MAX_PROPERTIES, "logit_bias"),
    ({"min_tokens": 9, "max_tokens": 8}, INT_HIGH, "min_tokens"),
    ({"min_tokens": -1}, INT_LOW, "min_tokens"),
    ({"max_tokens": -1}, INT_LOW, "max_tokens"),
    ({"max_tokens": CONTEXT + 1}, CONTEXT_CODE, "max_tokens"),
    ({"max_tokens": "8"}, TYPE, "max_tokens"),
    ({"stream": "true"}, TYPE, "stream"),
    ({"stream": 1}, TYPE, "stream"),
    ({"stream_options": {"include_usage": True}}, None, "stream_options"),
    ({"stream": True, "stream_options": 1}, TYPE, "stream_options"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, TYPE, "stream_options.include_usage"),
    ({"ignore_eos": "no"}, TYPE, "ignore_eos"),
    ({"skip_special_tokens": 0}, TYPE, "skip_special_tokens"),
    ({"user": 7}, TYPE, "user"),
    ({"response_format": {"type": "poem"}}, VALUE, "response_format.type"),
    ({"response_format": {}}, MISSING, "response_format.type"),
    ({"response_format": "text"}, TYPE, "response_format"),
    ({"allowed_token_ids": []}, EMPTY_ARRAY, "allowed_token_ids"),
    ({"allowed_token_ids": [1, VOCAB]}, INTEGER_ABOVE_MAX_VALUE, "allowed_token_ids[1]"),
    ({"bad_words": [1]}, TYPE, "bad_words[0]"),
    ({"bad_words": ["  "]}, VALUE, "bad_words[0]"),
    ({"prompt_logprobs": 1, "stream": True}, None, "prompt_logprobs"),
    ({"prompt_logprobs": -1}, INT_LOW, "prompt_logprobs"),
    ({"logprob_token_ids": [1]}, None, "logprob_token_ids"),
    ({"prompt_logprobs": 21}, INT_HIGH, "prompt_logprobs"),
    ({"return_tokens_as_token_ids": 1}, TYPE, "return_tokens_as_token_ids"),
    ({"use_beam_search": True}, UNSERVED, "use_beam_search"),
    ({"extra_key": "x"}, UNSERVED, "extra_key"),
    ({"cache_salt": 1}, INVALID_TYPE, "cache_salt"),
    ({"chat_template": "{{ 1 }}"}, UNSERVED, "chat_template"),
]


def message(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"} | fields]}


def called(call: dict[str, Any]) -> dict[str, Any]:
    return message(role="assistant", content=None, tool_calls=[call])


def called_with(arguments: Any) -> dict[str, Any]:
    return called({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}})


CUSTOM_INPUT = "messages[0].tool_calls[0].custom.input"
CHAT: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": None}, MISSING, "messages"),
    ({"messages": "Hi"}, TYPE, "messages"),
    ({"messages": []}, EMPTY, "messages"),
    ({"messages": USER * 2049}, LONG, "messages"),
    ({"messages": ["Hi"]}, TYPE, "messages[0]"),
    (message(role=None), MISSING, "messages[0].role"),
    (message(role=7), TYPE, "messages[0].role"),
    (message(role="wizard"), VALUE, "messages[0].role"),
    (message(content=None), MISSING, "messages[0].content"),
    (message(content=7), TYPE, "messages[0].content"),
    (message(content=[]), EMPTY, "messages[0].content"),
    (message(content=["Hi"]), TYPE, "messages[0].content[0]"),
    (message(content=[{"type": "text"}]), MISSING, "messages[0].content[0].text"),
    (message(content=[{"type": "text", "text": 7}]), TYPE, "messages[0].content[0].text"),
    (message(content=[{"type": "image_url", "image_url": {}}]), VALUE, "messages[0].content[0].type"),
    (message(content=[{"type": []}]), VALUE, "messages[0].content[0].type"),
    (message(name=7), TYPE, "messages[0].name"),
    (message(role="tool"), MISSING, "messages[0].tool_call_id"),
    (message(role="tool", tool_call_id=7), TYPE, "messages[0].tool_call_id"),
    (message(role="function"), MISSING, "messages[0].name"),
    (message(role="assistant", audio={"id": "a"}), UNSERVED, "messages[0].audio"),
    (message(role="assistant", content=None), MISSING, "messages[0].content"),
    (message(role="assistant", tool_calls={}), TYPE, "messages[0].tool_calls"),
    (message(role="assistant", tool_calls=["c"]), TYPE, "messages[0].tool_calls[0]"),
    (called({}), MISSING, "messages[0].tool_calls[0].id"),
    (called({"id": "c"}), MISSING, "messages[0].tool_calls[0].function"),
    (called({"id": "c", "type": "web"}), VALUE, "messages[0].tool_calls[0].type"),
    (called({"id": "c", "function": {}}), MISSING, "messages[0].tool_calls[0].function.name"),
    (called_with(7), TYPE, "messages[0].tool_calls[0].function.arguments"),
    (called({"id": "c", "type": "custom", "custom": {"name": "f"}}), MISSING, CUSTOM_INPUT),
    (message(role="assistant", function_call={"arguments": "{}"}), MISSING, "messages[0].function_call.name"),
    (message(role="assistant", reasoning_content=7), TYPE, "messages[0].reasoning_content"),
    (message(content="impossible"), None, "messages"),
    (message(content="x" * CONTEXT), CONTEXT_CODE, "messages"),
    (message(content="x" * (CONTEXT - 20)) | {"max_tokens": 100}, CONTEXT_CODE, "messages"),
    ({"max_tokens": 0}, INT_LOW, "max_tokens"),
    ({"max_completion_tokens": 0}, INT_LOW, "max_completion_tokens"),
    ({"max_completion_tokens": CONTEXT + 1}, CONTEXT_CODE, "max_completion_tokens"),
    ({"max_completion_tokens": 5, "max_tokens": 0}, INT_LOW, "max_tokens"),
    ({"logprobs": 3}, TYPE, "logprobs"),
    ({"top_logprobs": 3}, None, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, INT_HIGH, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, INT_LOW, "top_logprobs"),
    ({"tools": [{"type": "function"}]}, MISSING, "tools[0].function"),
    ({"tool_choice": "required"}, None, "tool_choice"),
    ({"tool_choice": {"type": "function"}}, None, "tool_choice"),
    ({"tool_choice": "maybe"}, VALUE, "tool_choice"),
    ({"functions": []}, EMPTY, "functions"),
    ({"input_ids": []}, EMPTY, "input_ids"),
    ({"prompt_token_ids": [1, VOCAB]}, INT_HIGH, "prompt_token_ids[1]"),
    ({"documents": {}}, TYPE, "documents"),
    ({"documents": ["text"]}, TYPE, "documents[0]"),
    ({"prediction": {"content": "x"}}, MISSING, "prediction.type"),
    ({"prediction": {"type": "content", "content": 7}}, TYPE, "prediction.content"),
    ({"web_search_options": {"x": 1}}, UNSERVED, "web_search_options"),
    ({"separate_reasoning": "no"}, TYPE, "separate_reasoning"),
    ({"thinking_token_budget": -2}, INT_LOW, "thinking_token_budget"),
    ({"thinking_token_budget": 5}, UNSERVED, "thinking_token_budget"),
    ({"modalities": ["text", "audio"]}, UNSERVED, "modalities"),
    ({"audio": {"voice": "a"}}, UNSERVED, "audio"),
    ({"reasoning_effort": "vast"}, VALUE, "reasoning_effort"),
    ({"service_tier": "first"}, VALUE, "service_tier"),
    ({"verbosity": "shouting"}, VALUE, "verbosity"),
    ({"metadata": {str(i): "" for i in range(17)}}, VALUE, "metadata"),
    ({"metadata": {"k" * 65: ""}}, VALUE, "metadata"),
    ({"metadata": {"k": "v" * 513}}, STRING_ABOVE_MAX_LENGTH, "metadata.k"),
    ({"safety_identifier": "x" * 65}, STRING_ABOVE_MAX_LENGTH, "safety_identifier"),
    ({"continue_final_message": True}, VALUE, "continue_final_message"),
    ({"continue_final_message": True, "add_generation_prompt": True}, None, "continue_final_message"),
    ({"chat_template_kwargs": {"messages": []}}, VALUE, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, UNSERVED, "chat_template_kwargs.chat_template"),
    ({"chat_template_kwargs": {"eos_token": "x"}}, VALUE, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"__class__": 1}}, VALUE, "chat_template_kwargs"),
    ({"chat_template_kwargs": 7}, TYPE, "chat_template_kwargs"),
]

COMPLETIONS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"prompt": None}, MISSING, "prompt"),
    ({"prompt": 7}, TYPE, "prompt"),
    ({"prompt": ""}, EMPTY, "prompt"),
    ({"prompt": []}, EMPTY, "prompt"),
    ({"prompt": [[]]}, EMPTY, "prompt[0]"),
    ({"prompt": ["a", ""]}, EMPTY, "prompt[1]"),
    ({"prompt": ["a", 1]}, TYPE, "prompt[1]"),
    ({"prompt": [1, "a"]}, TYPE, "prompt[1]"),
    ({"prompt": [[1], "a"]}, TYPE, "prompt[1]"),
    ({"prompt": [True]}, TYPE, "prompt[0]"),
    ({"prompt": [-1]}, INT_LOW, "prompt[0]"),
    ({"prompt": [[1], [VOCAB]]}, INT_HIGH, "prompt[1][0]"),
    ({"prompt": ["a"] * 1025}, LONG, "prompt"),
    ({"prompt": ["a"] * 1000, "n": 5}, None, "n"),
    ({"prompt": "x" * CONTEXT}, CONTEXT_CODE, "prompt"),
    ({"prompt": "x" * (CONTEXT - 5), "max_tokens": 6}, CONTEXT_CODE, "prompt"),
    ({"logprobs": 21}, INT_HIGH, "logprobs"),
    ({"logprobs": True}, TYPE, "logprobs"),
    ({"echo": "yes"}, TYPE, "echo"),
    ({"logprobs": 0, "logprob_token_ids": 7}, TYPE, "logprob_token_ids"),
    ({"logprobs": 0, "logprob_token_ids": [7, VOCAB]}, INT_HIGH, "logprob_token_ids[1]"),
    ({"suffix": "end"}, UNSERVED, "suffix"),
    ({"best_of": 21}, INT_HIGH, "best_of"),
    ({"best_of": -1}, INT_LOW, "best_of"),
    ({"best_of": 2, "n": 3}, VALUE, "best_of"),
    ({"best_of": 3, "n": 2, "stream": True}, VALUE, "best_of"),
    ({"best_of": 20, "prompt": ["a"] * 300}, None, "best_of"),
    ({"suffix": ["end"]}, UNSERVED, "suffix"),
    ({"prompt": [1, "a"]}, TYPE, "prompt[1]"),
    ({"prompt": ["a", 1]}, TYPE, "prompt[1]"),
    ({"prompt": [[1], "a"]}, TYPE, "prompt[1]"),
]


def assert_error(response: httpx.Response, status: int, code: str | None, param: str | None) -> None:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (response.status_code, error["code"], error["param"]) == (status, code, param), error["message"]
    assert error["type"] == "invalid_request_error"
    assert 0 < len(error["message"]) <= 2000
    assert "Traceback" not in error["message"] and ".py" not in error["message"]
    assert response.headers[header_names.REQUEST_ID]


async def post(api: Api, path: str, body: dict[str, Any]) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return await api.http.post(path, content=json.dumps(body), headers=headers)


async def test_validation_bad_chat_request_names_its_field(api: Api) -> None:
    for row in SHARED + CHAT:
        for stream in (False, True):
            fields, code, param = row
            if "stream" in fields or "stream_options" in fields:
                stream = fields.get("stream", False)
            body = {"model": MODEL, "messages": USER, "stream": stream} | fields
            assert_error(await post(api, "/v1/chat/completions", body), 400, code, param)
    assert (await api.chat()).status_code == 200
    api.assert_all_blocks_back()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        (r"\ud83d", 0),
        (r"a\\\\\uDE00 b", 5),
        (r"\ud83d\ud83d\ude00", 0),
        (r"\ud83d\ude00 \ude00", 13),
    ],
)
async def test_validation_lone_surrogate_is_named(api: Api, text: str, place: int) -> None:
    before = f'{{"model": "{MODEL}", "prompt": "'
    answer = await api.http.post(
        "/v1/completions", content=f'{before}{text}"}}', headers={"content-type": "application/json"}
    )
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400
    assert f"{text[place : place + 6]} at byte {len(before) + place} is half of a character" in message
    assert "lone surrogate" in message and "truncated" not in message


@pytest.mark.parametrize("text", [r"\ud83d\ude00", r"\\ud83d", "\U0001f600"])
async def test_validation_whole_characters_are_no_surrogates(api: Api, text: str) -> None:
    for end, status in (('"}', 200), ('"', 400)):
        answer = await api.http.post(
            "/v1/completions",
            content=f'{{"model": "{MODEL}", "max_tokens": 1, "prompt": "{text}{end}',
            headers={"content-type": "application/json"},
        )
        assert answer.status_code == status and "surrogate" not in answer.text


async def test_validation_bad_completion_names_its_field(api: Api) -> None:
    for fields, code, param in SHARED + COMPLETIONS:
        body = {"model": MODEL, "prompt": "Hi"} | fields
        assert_error(await post(api, "/v1/completions", body), 400, code, param)
    assert (await api.complete()).status_code == 200
    api.assert_all_blocks_back()


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 2}, {"temperature": 0}, {"top_p": 0}, {"top_p": 1}, {"n": 2.0}, {"max_tokens": 8.0},
        {"top_k": -1}, {"top_k": 0}, {"top_k": 10**6}, {"min_p": 1}, {"presence_penalty": -2}, {"stop": []},
        {"seed": 2**63 - 1}, {"seed": -(2**63)}, {"stop": list("wxyz")}, {"logit_bias": {}}, {"tools": []},
        {"logit_bias": {"7": 1.5}}, {"min_tokens": 8}, {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"repetition_penalty": 5e-324}, {"repetition_penalty": 1e4}, {"top_p": 5e-324},
        {"temperature": 5e-324}, {"temperature": 1e-5, "repetition_penalty": 5e-324},
        {"use_beam_search": False}, {"max_tokens": CONTEXT - 30},
    ],
    ids=str,
)  # fmt: skip
async def test_values_at_the_limit_are_accepted(api: Api, fields: dict[str, Any]) -> None:
    assert (await api.chat(**fields)).status_code == 200


BODIES = {
    "cut off": b'{"model":',
    "an array": b"[]",
    "a string": b'"hello"',
    "empty": b"",
    "not a number": b'{"temperature": NaN}',
    "infinite": b'{"temperature": 1e999}',
    "not UTF-8": b'{"model": "\xff"}',
    "half a surrogate": b'{"model": "\\ud800"}',
    "two objects": b"{}{}",
    "deep": b'{"x":' + b"[" * 100_000,
    "deep but closed": b'{"x":' + b"[" * (limits.DEPTH.most + 1) + b"]" * (limits.DEPTH.most + 1) + b"}",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_validation_body_not_a_json_object_is_a_short_400(api: Api, body: bytes) -> None:
    response = await api.http.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert_error(response, 400, None, None)


async def test_nesting_up_to_the_limit_is_accepted(api: Api) -> None:
    assert (await api.chat(foo=nested(limits.DEPTH.most - 1))).status_code == 200
    assert (await api.chat(foo=nested(limits.DEPTH.most))).status_code == 400


async def test_another_content_type_is_refused(api: Api) -> None:
    for headers in ({}, {"content-type": "text/plain"}):
        response = await api.http.post("/v1/chat/completions", content=b"{}", headers=headers)
        assert_error(response, 400, None, None)
    charset = {"content-type": "Application/JSON; charset=utf-8"}
    assert_error(
        await api.http.post("/v1/completions", content=b"{}", headers=charset), 400, MISSING, "model"
    )


@pytest.mark.parametrize("announced", [True, False])
async def test_validation_body_over_the_limit_is_a_413(api: Api, announced: bool) -> None:
    body = b" " * (limits.BODY.most + 1)

    async def parts() -> Any:
        yield body

    response = await api.http.post(
        "/v1/chat/completions",
        content=body if announced else parts(),
        headers={"content-type": "application/json"},
    )
    assert_error(response, 413, BodyTooLarge.code, None)


async def test_unknown_models_routes_and_methods_have_openais_shape(api: Api) -> None:
    assert_error(await api.chat(model="nope"), 404, ModelNotFound.code, "model")
    assert_error(await api.complete(model="n" * 10_000), 404, ModelNotFound.code, "model")
    assert_error(await api.http.get("/v1/models/nope"), 404, ModelNotFound.code, "model")
    assert_error(await api.http.get("/v1/nothing"), 404, None, None)
    assert_error(await api.http.get("/v1/models/"), 404, ModelNotFound.code, "model")
    assert_error(await api.http.get("/v1/chat/completions"), 405, None, None)
    assert_error(await api.http.post("/v1/models"), 405, None, None)
    assert (await api.http.get("/v1/chat/completions")).headers["allow"] == "POST"
    assert set((await api.http.post("/v1/models")).headers["allow"].split(", ")) == {"GET", "HEAD"}


async def test_request_id_is_set_and_a_valid_client_id_is_kept(api: Api) -> None:
    first, second = await api.chat(), await api.chat(n=0)
    assert first.headers[header_names.REQUEST_ID] != second.headers[header_names.REQUEST_ID]
    for path in ("/health", "/v1/models", "/nothing"):
        response = await api.http.get(path, headers={header_names.REQUEST_ID: "mine-1"})
        assert response.headers[header_names.REQUEST_ID] == "mine-1"
    for bad in ("x" * 129, "two words", ""):
        response = await api.http.get("/health", headers={header_names.REQUEST_ID: bad})
        assert response.headers[header_names.REQUEST_ID] not in (bad, "")


async def test_two_requests_under_one_id_do_not_meet(api: Api) -> None:
    headers = {header_names.REQUEST_ID: "same"}
    body = {"model": MODEL, "messages": USER, "max_tokens": 8}
    responses = await asyncio.gather(
        *(api.http.post("/v1/chat/completions", json=body, headers=headers) for _ in range(2))
    )
    assert [response.status_code for response in responses] == [200, 200]


@pytest.mark.one_process("gives its keys to the computing process only")
async def test_key_is_required_except_for_probes_and_metrics() -> None:
    async with open_api(keys=Keys((KeyDigest.of("secret"),))) as api:
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            assert_error(await api.http.get("/v1/models", headers=headers), 401, Unauthorized.code, None)
        right = {"authorization": "Bearer secret"}
        assert (await api.http.get("/v1/models", headers=right)).status_code == 200
        assert_error(await api.chat(), 401, Unauthorized.code, None)
        for path in ("/load", "/debug/requests", "/no/such/path"):
            assert_error(await api.http.get(path), 401, Unauthorized.code, None)
        for path in ("/health", "/ready", "/metrics"):
            assert (await api.http.get(path)).status_code == 200


async def test_chat_without_template_names_the_other_endpoint() -> None:
    tokenizer = make_tokenizer()
    tokenizer._tokenizer.chat_template = None
    async with open_api(tokenizer=tokenizer) as api:
        response = await api.chat()
        assert_error(response, 400, None, "messages")
        assert "/v1/completions" in response.text
        assert (await api.complete()).status_code == 200


async def test_chat_prompt_over_the_cache_names_the_flag() -> None:
    async with open_api(blocks=9) as api:
        response = await api.chat(messages=[{"role": "user", "content": "x" * 100}])
        assert_error(response, 400, CONTEXT_LENGTH_EXCEEDED, None)
        assert "--kv-cache-memory" in response.text


async def test_access_log_has_one_line_with_token_counts(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="baton_engine.api"):
        await api.chat(max_tokens=3)
        await api.chat(n=0)
        await api.http.get("/health")
    good, bad = (record.getMessage() for record in caplog.records if record.name == "baton_engine.api.edge")
    assert good.startswith("POST /v1/chat/completions 200 request=req_")
    assert "prompt=5 cached=0 completion=3 ttft=0." in good
    assert bad.startswith("POST /v1/chat/completions 400 ")
