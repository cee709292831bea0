"""Every row of the table of limits: accepted at the limit, refused just beyond it, and no harm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from baton_api import limits
from baton_api.errors import (
    CONTEXT_LENGTH_EXCEEDED,
    DECIMAL_ABOVE_MAX_VALUE,
    DECIMAL_BELOW_MIN_VALUE,
    INTEGER_ABOVE_MAX_VALUE,
    INTEGER_BELOW_MIN_VALUE,
    INVALID_TYPE,
    INVALID_VALUE,
    UNSUPPORTED_PARAMETER,
)
from baton_api.limits import Limit
from baton_engine.api.http import CONNECTION_LIMITS, HttpServer
from tests.engine.api.api import LETTERS, MODEL, USER, Api
from tests.engine.api.test_validation import assert_error, nested
from tests.plain_http import PLAIN

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TYPES = {"content-type": "application/json"}
ROOMY = CONTEXT_LENGTH_EXCEEDED
NO_PARAM = ""


@dataclass(frozen=True)
class BoundCheck:
    """How a row is tried: a body that has `count` of what it bounds, or that number itself."""

    path: str
    fields: Callable[[int], dict[str, Any]]
    param: str | None = None
    """Of the error; the name of the row's field if None, and none if it is empty."""
    otherwise: str | None = None
    """The code that another limit answers with before this one's `most` is reached."""


def chat(fields: Callable[[int], dict[str, Any]], param: str | None = None, **more: Any) -> BoundCheck:
    return BoundCheck(CHAT, lambda count: {"messages": USER, "max_tokens": 1} | fields(count), param, **more)


def complete(fields: Callable[[int], dict[str, Any]], param: str | None = None, **more: Any) -> BoundCheck:
    return BoundCheck(
        COMPLETIONS, lambda count: {"prompt": "a", "max_tokens": 0} | fields(count), param, **more
    )


def value(field: str, of: Callable[[Callable[[int], dict[str, Any]]], BoundCheck] = chat) -> BoundCheck:
    """The row bounds the number itself."""
    return of(lambda number: {field: number})


SCHEMA = "response_format.json_schema"


def named(name: str) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": name, "schema": {"type": "integer"}}}


def tools(*names: str, **function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": name, **function}} for name in names]}


def pairs(count: int, item: Any = 1) -> dict[str, Any]:
    return {str(number): item for number in range(count)}


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TRIALS: dict[str, BoundCheck] = {
    "VALUES": chat(lambda count: {"foo": [""] * (count - 13)}, NO_PARAM),
    "DEPTH": chat(lambda count: {"foo": nested(count - 1)}, NO_PARAM),
    "REQUEST_ID": chat(lambda count: {"rid": "x" * count}, "rid"),
    "ABORTS": BoundCheck("/abort_request", lambda count: {"rid": ["x"] * count}),
    "MESSAGES": BoundCheck("/tokenize", lambda count: {"messages": USER * count}),
    "PARTS": BoundCheck(
        "/tokenize",
        lambda count: {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * count}]},
        "messages[0].content",
    ),
    "TOOL_CALLS": BoundCheck(
        "/tokenize",
        lambda count: {"messages": [{"role": "assistant", "tool_calls": [CALL] * count}]},
        "messages[0].tool_calls",
    ),
    "DOCUMENTS": BoundCheck("/tokenize", lambda count: {"messages": USER, "documents": [{}] * count}),
    "PROMPTS": complete(lambda count: {"prompt": ["a"] * count}),
    "ALL_CHOICES": complete(lambda count: {"prompt": ["a"] * -(-count // 128), "n": 128}, "n"),
    "TOKEN_LISTS": BoundCheck("/detokenize", lambda count: {"tokens": [[1]] * count}),
    "TEMPERATURE": value("temperature"),
    "TOP_P": value("top_p"),
    "MIN_P": value("min_p"),
    "TOP_K": value("top_k"),
    "PRESENCE_PENALTY": value("presence_penalty"),
    "FREQUENCY_PENALTY": value("frequency_penalty"),
    "REPETITION_PENALTY": value("repetition_penalty"),
    "SEED": value("seed"),
    "LOGIT_BIAS": chat(
        lambda count: {"logit_bias": {f"{one % 100:0{3 + one // 100}}": 1 for one in range(count)}}
    ),
    "BIAS": chat(lambda number: {"logit_bias": {str(LETTERS[0]): number}}, f"logit_bias.{LETTERS[0]}"),
    "N": value("n"),
    "BEST_OF": complete(lambda number: {"best_of": number, "max_tokens": 1}),
    "MAX_TOKENS": chat(lambda number: {"max_tokens": number}, "max_tokens", otherwise=ROOMY),
    "MAX_TOKENS_OR_NONE": complete(lambda number: {"max_tokens": number}, otherwise=ROOMY),
    "THINKING_BUDGET": chat(
        lambda number: {"thinking_token_budget": number}, otherwise=UNSUPPORTED_PARAMETER
    ),
    "MIN_TOKENS": chat(lambda number: {"min_tokens": number}, otherwise=INTEGER_ABOVE_MAX_VALUE),
    "STOPS": chat(lambda count: {"stop": ["x"] * count}),
    "STOP": chat(lambda count: {"stop": "x" * count}, "stop"),
    "STOP_IDS": chat(lambda count: {"stop_token_ids": [1] * count}),
    "ALLOWED_IDS": chat(lambda count: {"allowed_token_ids": [LETTERS[0]] * count}),
    "BAD_WORDS": chat(lambda count: {"bad_words": ["x"] * count}),
    "BAD_WORD": chat(lambda count: {"bad_words": ["x" * count]}, "bad_words[0]"),
    "SCHEMA_NAME": chat(lambda count: {"response_format": named("x" * count)}, f"{SCHEMA}.name"),
    "CHOICES": chat(
        lambda count: {"structured_outputs": {"choice": [f"x{one}" for one in range(count)]}},
        "structured_outputs.choice",
    ),
    "WHITE_SPACE": chat(
        lambda count: {"guided_json": {"type": "integer"}, "guided_whitespace_pattern": " " * count},
        "guided_whitespace_pattern",
    ),
    "TOP_LOGPROBS": chat(lambda number: {"top_logprobs": number, "logprobs": True}),
    "LOGPROBS": value("logprobs", complete),
    "LOGPROB_IDS": complete(lambda count: {"logprob_token_ids": [1] * count, "logprobs": 0}),
    "METADATA": chat(lambda count: {"metadata": pairs(count, "x")}),
    "METADATA_KEY": chat(lambda count: {"metadata": {"k" * count: "x"}}, "metadata"),
    "METADATA_VALUE": chat(lambda count: {"metadata": {"k": "x" * count}}, "metadata.k"),
    "SAFETY_IDENTIFIER": chat(lambda count: {"safety_identifier": "x" * count}),
    "CACHE_SALT": chat(lambda count: {"cache_salt": "x" * count}),
    "MAX_TOOL_CALLS": BoundCheck(
        "/v1/responses", lambda number: {"input": "a", "max_output_tokens": 1, "max_tool_calls": number}
    ),
    "TEMPLATE_KWARGS": BoundCheck(
        "/tokenize",
        lambda count: {
            "messages": USER,
            "chat_template_kwargs": {f"name{number}": 1 for number in range(count)},
        },
    ),
    "TOOLS": BoundCheck(
        "/tokenize", lambda count: {"messages": USER} | tools(*(f"f{one}" for one in range(count)))
    ),
    "FUNCTIONS": BoundCheck(
        "/tokenize",
        lambda count: {"messages": USER, "functions": [{"name": f"f{one}"} for one in range(count)]},
    ),
    "TOOL_NAME": BoundCheck(
        "/tokenize", lambda count: {"messages": USER} | tools("f" * count), "tools[0].function.name"
    ),
    "TOOL_DESCRIPTION": BoundCheck(
        "/tokenize",
        lambda count: {"messages": USER} | tools("f", description="x" * count),
        "tools[0].function.description",
    ),
    "TOOL_SCHEMA": BoundCheck(
        "/tokenize",
        # {"title": "x..."} as JSON
        lambda count: {"messages": USER} | tools("f", parameters={"title": "x" * (count - 13)}),
        "tools[0].function.parameters",
    ),
    "PROMPT_LOGPROBS": complete(lambda number: {"prompt_logprobs": number, "max_tokens": 1}),
}

ELSEWHERE = {"HEAD", "BODY", "CONSTRAINT", "INPUTS", "ITEMS_PAGE"}
ELSEWHERE |= {"FILES_PAGE", "BATCHES_PAGE", "EXPIRES_AFTER"}
"""Rows that no field of a body reaches, which have tests of their own, here or with their endpoint."""

ROWS = [pytest.param(row, limits.table()[row], bound_check, id=row) for row, bound_check in TRIALS.items()]


def test_limits_every_row_has_a_check() -> None:
    assert TRIALS.keys() | ELSEWHERE == limits.table().keys()


async def post(api: Api, path: str, body: dict[str, Any]) -> httpx.Response:
    return await api.http.post(path, content=json.dumps({"model": MODEL} | body), headers=TYPES)


@pytest.mark.parametrize(("row", "limit", "bound_check"), ROWS)
async def test_limits_value_at_the_limit_is_accepted(
    api: Api, row: str, limit: Limit, bound_check: BoundCheck
) -> None:
    ends = [limit.most] + ([limit.least] if limit.code_below and not limit.open_below else [])
    for end in ends:
        response = await post(api, bound_check.path, bound_check.fields(end))
        if end == limit.most and bound_check.otherwise is not None:
            assert response.json()["error"]["code"] == bound_check.otherwise
        else:
            assert response.status_code == 200, response.text


@pytest.mark.parametrize(("row", "limit", "bound_check"), ROWS)
async def test_limits_value_beyond_the_limit_is_rejected(
    api: Api, row: str, limit: Limit, bound_check: BoundCheck
) -> None:
    param = limit.field if bound_check.param is None else bound_check.param or None
    beyond = limit.most + 1
    assert_error(
        await post(api, bound_check.path, bound_check.fields(beyond)), limit.status, limit.code, param
    )
    if limit.code_below is not None:
        below = limit.least if limit.open_below else limit.least - 1
        assert_error(
            await post(api, bound_check.path, bound_check.fields(below)), 400, limit.code_below, param
        )
    assert (await api.complete(max_tokens=1)).status_code == 200
    api.assert_all_blocks_back()


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("step", [1e-9, 0.1, 1e300])
async def test_decimals_are_refused_however_little_they_are_beyond(api: Api, field: str, step: float) -> None:
    limit = limits.table()[field.upper()]
    for number, code in ((limit.most + step, limit.code), (limit.least - step, limit.code_below)):
        assert_error(await api.chat(**{field: number}), 400, code, field)


# --- The request as a whole ---


def padded(size: int) -> bytes:
    body = json.dumps({"model": MODEL, "prompt": "a", "max_tokens": 1}).encode()
    return body + b" " * (size - len(body))


@pytest.mark.parametrize("chunked", [False, True])
async def test_limits_body_beyond_the_limit_is_a_413(api: Api, server: HttpServer, chunked: bool) -> None:
    async def parts(body: bytes) -> Any:
        for start in range(0, len(body), 100_000):
            yield body[start : start + 100_000]

    async with httpx.AsyncClient(base_url=f"http://{server.address}", verify=PLAIN) as http:
        for size, status in ((limits.BODY.most, 200), (limits.BODY.most + 1, limits.BODY.status)):
            content = parts(padded(size)) if chunked else padded(size)
            response = await http.post(COMPLETIONS, content=content, headers=TYPES)
            assert response.status_code == status
            if status != 200:
                assert_error(response, status, limits.BODY.code, None)


async def test_limits_bodies_have_one_memory_and_are_refused_at_their_heads(
    api: Api, server: HttpServer
) -> None:
    memory, size = CONNECTION_LIMITS.memory, limits.BODY.most
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    sent = f"{head}content-length: {size}\r\n\r\n".encode()
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(sent)
    async with asyncio.timeout(60):
        while memory.used != size:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.001)
        memory.add("others", memory.limit)
        try:
            others = await asyncio.open_connection("127.0.0.1", server.port)
            others[1].write(sent)
            assert b" 503 " in await others[0].readline()
            others[1].close()
        finally:
            memory.add("others", -memory.limit)
        writer.close()
        while memory.used:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("where", ["header", "query"])
async def test_limits_head_beyond_the_limit_is_a_431(api: Api, server: HttpServer, where: str) -> None:
    async def status(padding: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        target = "/health?" + "q" * padding if where == "query" else "/health"
        header = "x-pad: " + "p" * padding if where == "header" else "x-pad: p"
        writer.write(f"GET {target} HTTP/1.1\r\nhost: x\r\n{header}\r\nconnection: close\r\n\r\n".encode())
        answer = await reader.read()
        writer.close()
        await writer.wait_closed()
        if b" 431 " in answer:
            assert b"invalid_request_error" in answer
        return int(answer.split()[1])

    counted = len("/healthhostxx-padconnectionclose") + 3 * 4 + (where == "query")
    padding_left = limits.HEAD.most - counted
    assert await status(padding_left) == 200
    assert await status(padding_left + 1) == limits.HEAD.status
    assert await status(2 * limits.HEAD.most) in (400, 431)


# --- What is no number, no text, or no JSON ---

TOO_MUCH = [
    ("temperature", "1e400", None),
    ("temperature", "-1e400", None),
    ("temperature", "NaN", None),
    ("temperature", "Infinity", None),
    ("temperature", "-Infinity", None),
    ("temperature", str(10**400), DECIMAL_ABOVE_MAX_VALUE),
    ("temperature", str(-(10**400)), DECIMAL_BELOW_MIN_VALUE),
    ("n", str(10**400), INTEGER_ABOVE_MAX_VALUE),
    ("n", "1e300", INTEGER_ABOVE_MAX_VALUE),
    ("seed", str(-(10**4000)), INTEGER_BELOW_MIN_VALUE),
    ("max_tokens", "1e308", INTEGER_ABOVE_MAX_VALUE),
    ("top_k", "-0.5", INVALID_TYPE),
    ("stop_token_ids", f"[{10**400}]", INTEGER_ABOVE_MAX_VALUE),
    ("logit_bias", f'{{"1": {10**400}}}', DECIMAL_ABOVE_MAX_VALUE),
    ("logit_bias", f'{{"{10**400}": 1}}', INVALID_VALUE),
]


@pytest.mark.parametrize(("field", "number", "code"), TOO_MUCH, ids=lambda text: str(text)[:20])
async def test_limits_huge_number_is_a_400(api: Api, field: str, number: str, code: str | None) -> None:
    for path, prompt in ((CHAT, f'"messages": {json.dumps(USER)}'), (COMPLETIONS, '"prompt": "a"')):
        body = f'{{"model": "{MODEL}", {prompt}, "{field}": {number}}}'
        response = await api.http.post(path, content=body, headers=TYPES)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["code"] == code
        assert len(error["message"]) < 500, "what was sent is not echoed whole"


BODIES = {
    "a byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"model": "x"}'.encode("utf-16"),
    "bytes that are no UTF-8": b'{"model": "\xc3\x28"}',
    "an overlong encoding": b'{"model": "\xc0\xaf"}',
    "an encoded surrogate": b'{"model": "\xed\xa0\x80"}',
    "half a surrogate pair": rb'{"model": "\ud83d"}',
    "the wrong halves": rb'{"model": "\udc00\ud800"}',
    "a NUL among the JSON": b'{"model"\x00: "x"}',
    "a bare NUL in a string": b'{"model": "a\x00b"}',
    "nothing": b"",
    "only spaces": b"   ",
    "a comment": b'{"model": "x"} // no',
    "a trailing comma": b'{"model": "x",}',
    "single quotes": b"{'model': 'x'}",
    "a number as a name": b"{1: 2}",
    "a leading zero": b'{"n": 01}',
    "null": b"null",
    "a form": b"model=x&prompt=y",
    "nesting that never ends": b'{"a":' * 200_000,
}


@pytest.mark.parametrize(
    "path", [CHAT, COMPLETIONS, "/generate", "/tokenize", "/abort_request", "/v1/responses"]
)
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
async def test_limits_body_that_is_not_a_json_object_is_a_400(api: Api, path: str, body: bytes) -> None:
    assert_error(await api.http.post(path, content=body, headers=TYPES), 400, None, None)


async def test_text_may_have_any_character(api: Api) -> None:
    strange = "\x00\x01\x7f\u2028\ufeff\uffff\U0010ffff\u202e"
    message = [{"role": "user", "content": strange}]
    assert (await api.chat(messages=message, max_tokens=1)).status_code == 200
    assert (await api.complete(prompt=strange, max_tokens=1, stop=["\x00"])).status_code == 200


async def test_of_a_member_that_is_given_twice_the_last_one_counts(api: Api) -> None:
    body = f'{{"model": "nope", "model": "{MODEL}", "prompt": "a", "max_tokens": 99, "max_tokens": 2}}'
    response = await api.http.post(COMPLETIONS, content=body, headers=TYPES)
    assert response.json()["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": ""},
        {"content-type": "text/plain"},
        {"content-type": "application/jsonp"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "multipart/form-data; boundary=x"},
        {"content-type": b"\xff"},
    ],
    ids=str,
)
async def test_another_content_type_is_a_400(api: Api, headers: dict[str, Any]) -> None:
    for path in (CHAT, "/tokenize", "/abort_request"):
        response = await api.http.post(path, content=b"{}", headers=headers)
        assert_error(response, 400, None, None)
