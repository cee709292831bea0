"""Structured output over HTTP: each spelling constrains, each mistake has its field, nothing does harm."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from baton_api import limits
from baton_api.errors import (
    EMPTY_ARRAY,
    INVALID_TYPE,
    INVALID_VALUE,
    MISSING_REQUIRED_PARAMETER,
    STRING_ABOVE_MAX_LENGTH,
)
from baton_engine.grammar.grammars import Grammars
from baton_engine.settings import WorkerSettings
from tests.engine.api.api import MODEL, TOKENIZER, USER, Api, events, eventually, open_api
from tests.engine.api.test_validation import assert_error

MISSING, TYPE, VALUE = MISSING_REQUIRED_PARAMETER, INVALID_TYPE, INVALID_VALUE
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
PERSON = r'\{\s?.*"name"(.|\n)*"age"(.|\n)*\}'
EBNF = 'root ::= "yes" | "no"'
TAG = {"structures": [{"begin": "<n>", "schema": {"enum": [7]}, "end": "</n>"}], "triggers": ["<n>"]}


def named(schema: Any = SCHEMA, **fields: Any) -> dict[str, Any]:
    inner = {"name": "person", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": inner | fields}}


def only(form: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tag", "begin": "<n>", "content": form, "end": "</n>"}


ONLY = {"format": only({"type": "json_schema", "json_schema": {"enum": [7]}})}

SPELLINGS: dict[str, tuple[dict[str, Any], str]] = {
    "response_format json_schema": (named(), PERSON),
    "response_format json_schema, not strict": (named(strict=False), PERSON),
    "response_format json_schema, strict not said": (named(strict=None), PERSON),
    "response_format json_object": ({"response_format": {"type": "json_object"}}, r"\{(.|\n)*"),
    "response_format structural_tag": (
        {"response_format": {"type": "structural_tag"} | ONLY},
        "<n>7</n>",
    ),
    "response_format structural_tag, the old form": (
        {"response_format": {"type": "structural_tag"} | TAG, "min_tokens": 8},
        r"(?!.*<n>[^7])(.|\n)*",
    ),
    "response_format text": ({"response_format": {"type": "text"}, "regex": "[0-9]{3}"}, "[0-9]{3}"),
    "regex": ({"regex": "[0-9]{3}-[0-9]{4}"}, "[0-9]{3}-[0-9]{4}"),
    "ebnf": ({"ebnf": EBNF}, "yes|no"),
    "ebnf in Lark": ({"ebnf": 'start: "yes" | "no"'}, "yes|no"),
    "json_schema": ({"json_schema": SCHEMA}, PERSON),
    "json_schema as text": ({"json_schema": json.dumps(SCHEMA)}, PERSON),
    "structural_tag as text": ({"structural_tag": json.dumps(ONLY)}, "<n>7</n>"),
    "structured_outputs json": ({"structured_outputs": {"json": SCHEMA}}, PERSON),
    "structured_outputs json as text": ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, PERSON),
    "structured_outputs json without blanks": (
        {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
        r'\{"name":"[^"]*(\\"[^"]*)*","age":-?[0-9]+\}',
    ),
    "structured_outputs json with its own blanks": (
        {
            "structured_outputs": {
                "json": {
                    "type": "array",
                    "prefixItems": [{"const": 1}, {"const": 1}],
                    "items": False,
                    "minItems": 2,
                },
                "whitespace_pattern": "~",
            }
        },
        r"\[~?1~?,~?1~?\]",
    ),
    "structured_outputs regex": ({"structured_outputs": {"regex": "[0-9]{4}"}}, "[0-9]{4}"),
    "structured_outputs choice": ({"structured_outputs": {"choice": ["a", 'b"\n', "ü"]}}, 'a|b"\n|ü'),
    "structured_outputs grammar": ({"structured_outputs": {"grammar": EBNF}}, "yes|no"),
    "structured_outputs json_object": ({"structured_outputs": {"json_object": True}}, r"\{(.|\n)*"),
    "structured_outputs structural_tag": (
        {"structured_outputs": {"structural_tag": json.dumps(ONLY)}},
        "<n>7</n>",
    ),
    "guided_json": ({"guided_json": SCHEMA, "guided_decoding_backend": "outlines"}, PERSON),
    "guided_regex": ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
    "guided_choice": ({"guided_choice": ["red", "green"]}, "red|green"),
    "guided_grammar": ({"guided_grammar": EBNF}, "yes|no"),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_structured_output_every_spelling_constrains(api: Api, spelling: str) -> None:
    body, pattern = SPELLINGS[spelling]
    chat = (await api.chat(**body, max_tokens=200, seed=1)).json()["choices"][0]
    complete = (await api.complete(**body, max_tokens=200, seed=1)).json()["choices"][0]
    for text in (chat["message"]["content"], complete["text"]):
        assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("seed", range(10))
async def test_structured_output_schema_fits_streamed_or_not(api: Api, seed: int) -> None:
    body = named() | {"max_tokens": 200, "seed": seed, "temperature": 1.5}
    whole = (await api.chat(**body)).json()["choices"][0]
    streamed = events((await api.chat(**body, stream=True)).text)
    text = "".join(event["choices"][0]["delta"].get("content") or "" for event in streamed)
    assert (text, whole["finish_reason"]) == (whole["message"]["content"], "stop")
    jsonschema.validate(json.loads(text), SCHEMA)


async def test_structured_output_cut_by_limit_reports_length(api: Api) -> None:
    choice = (await api.chat(regex="[0-9]{20}", max_tokens=5)).json()["choices"][0]
    assert re.fullmatch("[0-9]{5}", choice["message"]["content"])
    assert (choice["finish_reason"], choice["matched_stop"]) == ("length", None)


async def test_structured_output_complete_answer_reports_stop(api: Api) -> None:
    choice = (await api.chat(regex="[0-9]{4}")).json()["choices"][0]
    assert (choice["finish_reason"], choice["matched_stop"], choice["stop_reason"]) == ("stop", None, None)


async def test_stop_strings_cut_a_constrained_text(api: Api) -> None:
    choice = (await api.chat(regex="abc STOP def", stop=" STOP", max_tokens=50)).json()["choices"][0]
    assert (choice["message"]["content"], choice["matched_stop"]) == ("abc", " STOP")
    streamed = events((await api.chat(regex="abc STOP def", stop=" STOP", max_tokens=50, stream=True)).text)
    assert "".join(event["choices"][0]["delta"].get("content") or "" for event in streamed) == "abc"


async def test_structured_output_stop_id_ends_before_completion(api: Api) -> None:
    (stop,) = TOKENIZER.encode("b")
    choice = (await api.chat(regex="a b c", stop_token_ids=[stop])).json()["choices"][0]
    assert (choice["message"]["content"], choice["matched_stop"]) == ("a ", stop)


async def test_structured_output_each_choice_has_its_own_matcher(api: Api) -> None:
    body = (
        await api.complete(prompt=["x", "y"], regex="[0-9]{6}", n=3, temperature=1.5, max_tokens=20)
    ).json()
    texts = [choice["text"] for choice in body["choices"]]
    assert len(texts) == 6
    assert all(re.fullmatch("[0-9]{6}", text) for text in texts)
    assert len(set(texts)) > 1


async def test_structured_output_complete_before_min_tokens_stops(api: Api) -> None:
    choice = (await api.chat(regex="77", min_tokens=5, ignore_eos=True, max_tokens=10)).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("77", "stop")


async def test_allowed_ids_and_bad_words_hold(api: Api) -> None:
    few = TOKENIZER.encode("abc")
    body = (await api.complete(allowed_token_ids=few, bad_words=["b", "ac"], max_tokens=50, seed=1)).json()
    text = body["choices"][0]["text"]
    assert len(text) == 50
    assert "b" not in text and "ac" not in text and "a" in text


async def test_structured_output_not_strict_drops_unenforceable_keys(api: Api) -> None:
    schema = {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2, "uniqueItems": True}
    assert_error(await api.chat(**named(schema)), 400, VALUE, "response_format")
    response = await api.chat(**named(schema, strict=False), max_tokens=50)
    assert re.fullmatch(r"\[(1|2|,|\s)*\]", response.json()["choices"][0]["message"]["content"])


HARD: dict[str, Any] = {
    "properties": {
        "page": {"$ref": "#/$defs/Page[Item]"},
        "price": {"anyOf": [{"type": "integer", "maximum": 9}, {"$ref": "#/$defs/Decimal"}]},
        "size": {"oneOf": [{"type": "boolean"}, {"$ref": "#/$defs/Size"}]},
        "id": {"type": "integer", "minimum": -(2**63), "maximum": 5},
    },
    "required": ["page", "price", "size", "id"],
    "type": "object",
    "$defs": {
        "Page[Item]": {"type": "object", "properties": {"n": {"enum": [1, 2]}}},
        "Decimal": {"type": "string", "maxLength": 2, "pattern": "^(?![-+.]*$)[+-]?[0-9]*$"},
        "Size": {"enum": ["s", "m"]},
    },
}
"""What pydantic and zod write, and no grammar could express."""
WITHOUT_PATTERN: dict[str, Any] = json.loads(
    json.dumps(HARD).replace(', "pattern": "^(?![-+.]*$)', ', "pattern": "^')
)
INVENTED = '{"page": {"n": 1, "more": "x"}, "price": 7, "size": true, "id": 5, "more": ["x", {"y": "z"}]}'


def tool(strict: bool | None, **beside: Any) -> dict[str, Any]:
    return {"name": "save", "strict": strict} | beside


def asked(schema: dict[str, Any], strict: bool | None) -> dict[str, tuple[str, dict[str, Any]]]:
    """Each field with a schema, by the name of the API and of the field: the path and the body."""
    form = {"name": "x", "schema": schema, "strict": strict}
    user = {"model": MODEL, "messages": USER, "max_tokens": 300}
    given = {"model": MODEL, "input": "Hi", "max_output_tokens": 300}
    chat, messages, responses = "/v1/chat/completions", "/v1/messages", "/v1/responses"
    function = {"type": "function", "function": tool(strict, parameters=schema)}
    fields = {
        "chat response_format": (
            chat, user | {"response_format": {"type": "json_schema", "json_schema": form}}
        ),
        "chat tools": (
            chat, user | {"tools": [function], "tool_choice": "required", "parallel_tool_calls": False}
        ),
        "messages tools": (
            messages,
            user | {
                "tools": [tool(strict, input_schema=schema)],
                "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
            },
        ),
        "responses format": (responses, given | {"text": {"format": {"type": "json_schema", **form}}}),
        "responses tools": (
            responses,
            given | {
                "tools": [{"type": "function"} | tool(strict, parameters=schema)],
                "tool_choice": "required", "parallel_tool_calls": False,
            },
        ),
    }  # fmt: skip
    if strict:
        return fields
    tag = {"type": "structural_tag", "format": {"type": "json_schema", "json_schema": schema}}
    others: dict[str, dict[str, Any]] = {
        "guided_json": {"guided_json": schema},
        "json_schema": {"json_schema": json.dumps(schema)},
        "structured_outputs": {"structured_outputs": {"json": schema}},
        "structured_outputs closed": {
            "structured_outputs": {"json": schema, "disable_additional_properties": True}
        },
        "structural_tag": {"response_format": tag},
    }
    fields |= {f"chat {name}": (chat, user | more) for name, more in others.items()}
    output = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    return fields | {"messages format": (messages, user | output)}


def written(path: str, body: dict[str, Any]) -> str:
    """Return the text of an answer, or the arguments of its only call."""
    if path.endswith("messages"):
        (block,) = body["content"]
        return json.dumps(block["input"]) if block["type"] == "tool_use" else str(block["text"])
    if path.endswith("responses"):
        (item,) = body["output"]
        return str(item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    (choice,) = body["choices"]
    calls = choice["message"].get("tool_calls")
    return str(calls[0]["function"]["arguments"] if calls else choice["message"]["content"])


@pytest.mark.parametrize("strict", [None, False])
@pytest.mark.parametrize("field", asked({}, None))
async def test_structured_output_not_strict_is_closed_and_enforced_as_far_as_possible(
    field: str, strict: bool | None
) -> None:
    async with open_api(settings=WorkerSettings(tool_call_parser="hermes")) as api:
        path, body = asked(HARD, strict)[field]
        call = f'<tool_call>\n{{"name": "save", "arguments": {INVENTED}}}\n</tool_call>'
        api.model.script = call if "tools" in field else INVENTED
        response = await api.http.post(path, json=body)
    assert response.status_code == 200, response.text
    value = json.loads(written(path, response.json()))
    jsonschema.validate(value, WITHOUT_PATTERN)
    assert value.keys() == HARD["properties"].keys() and value["page"].keys() <= {"n"}


@pytest.mark.parametrize("field", asked({}, True))
async def test_structured_output_strict_names_the_place_that_cannot_be_enforced(field: str) -> None:
    async with open_api(settings=WorkerSettings(tool_call_parser="hermes")) as api:
        path, body = asked(HARD, True)[field]
        response = await api.http.post(path, json=body)
        assert response.status_code == 400, response.text
        message = response.json()["error"]["message"]
        assert "at /$defs/Decimal/pattern: look-around" in message
        assert ("function 'save'" in message) == ("tools" in field)
        assert "'strict'" in message and len(message) < 300 and "%json" not in message
        path, body = asked(WITHOUT_PATTERN, True)[field]
        response = await api.http.post(path, json=body)
        assert response.status_code == 200, response.text
        jsonschema.validate(json.loads(written(path, response.json())), WITHOUT_PATTERN)


SCHEMAS = "response_format.json_schema"
WRONG: dict[str, tuple[dict[str, Any], str | None, str]] = {
    "two constraints": ({"regex": "a", "ebnf": EBNF}, None, "ebnf"),
    "a format and a constraint": ({"response_format": {"type": "json_object"}, "regex": "a"}, None, "regex"),
    "two old ones": ({"guided_json": {}, "guided_regex": "a"}, None, "guided_json"),
    "two in one object": (
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        None,
        "structured_outputs.choice",
    ),
    "no json_schema": ({"response_format": {"type": "json_schema"}}, MISSING, SCHEMAS),
    "no name": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        MISSING,
        f"{SCHEMAS}.name",
    ),
    "no schema": (named(None), MISSING, f"{SCHEMAS}.schema"),
    "a schema that is none": (named([1]), TYPE, f"{SCHEMAS}.schema"),
    "a name with a blank": (named(name="a b"), VALUE, f"{SCHEMAS}.name"),
    "a name that is too long": (named(name="a" * 65), STRING_ABOVE_MAX_LENGTH, f"{SCHEMAS}.name"),
    "strict as a word": (named(strict="yes"), TYPE, f"{SCHEMAS}.strict"),
    "a description that is none": (named(description=1), TYPE, f"{SCHEMAS}.description"),
    "an unknown type": ({"response_format": {"type": "grammar"}}, VALUE, "response_format.type"),
    "a type in a schema": (named({"type": "poem"}), VALUE, "response_format"),
    "a regex that is none": ({"regex": "("}, VALUE, "regex"),
    "a regex that is no text": ({"regex": 7}, TYPE, "regex"),
    "an old regex that is none": ({"guided_regex": "("}, VALUE, "guided_regex"),
    "a grammar that is none": ({"ebnf": "root = 1"}, VALUE, "ebnf"),
    "a schema that is no JSON": ({"json_schema": "{"}, VALUE, "json_schema"),
    "a schema that is a list": ({"json_schema": "[]"}, TYPE, "json_schema"),
    "a tag that is none": ({"structural_tag": "{}"}, VALUE, "structural_tag"),
    "no constraint at all": (
        {"structured_outputs": {"regex": None, "json_object": False}},
        MISSING,
        "structured_outputs",
    ),
    "no choices": ({"structured_outputs": {"choice": []}}, EMPTY_ARRAY, "structured_outputs.choice"),
    "a choice that is no text": ({"guided_choice": ["a", 1]}, TYPE, "guided_choice[1]"),
    "a nested field": ({"structured_outputs": {"regex": "("}}, VALUE, "structured_outputs.regex"),
    "blanks that are no pattern": (
        {"structured_outputs": {"json": {"type": "object"}, "whitespace_pattern": "("}},
        VALUE,
        "structured_outputs.json",
    ),
    "a schema too deep": (
        {"json_schema": '{"items":' * 80 + "{}" + "}" * 80},
        limits.DEPTH.code,
        "json_schema",
    ),
    "a schema deeper than any stack": ({"json_schema": "[" * 100_000}, VALUE, "json_schema"),
    "too much text": ({"regex": "a" * (limits.CONSTRAINT.most + 1)}, VALUE, "regex"),
}


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("stream", [False, True])
async def test_structured_output_invalid_constraint_names_its_field(
    api: Api, case: str, stream: bool
) -> None:
    body, code, param = WRONG[case]
    for response in (await api.chat(**body, stream=stream), await api.complete(**body, stream=stream)):
        assert_error(response, 400, code, param)
        assert len(response.content) < 4096


EXPLOSIVE: dict[str, dict[str, Any]] = {
    "regex": {"regex": "((a{1000}){1000}){1000}"},
    "json_schema": {"json_schema": {"type": "integer", "multipleOf": 99_999_989}},
}


@pytest.mark.one_process(
    "a constraint is rejected late only once: the tests share their compiler, which remembers it"
)
async def test_structured_output_explosive_is_rejected_others_served(api: Api) -> None:
    async def others(done: asyncio.Event) -> int:
        count = 0
        while not done.is_set():
            assert (await api.chat(max_tokens=2)).status_code == 200
            await asyncio.sleep(0.02)
            count += 1
        return count

    done = asyncio.Event()
    serving = asyncio.create_task(others(done))
    for field, body in EXPLOSIVE.items():
        assert_error(await api.chat(**body), 400, VALUE, field)
    done.set()
    assert await serving > 10
    text = (await api.chat(regex="[0-9]{2}[a-c]")).json()["choices"][0]["message"]["content"]
    assert re.fullmatch("[0-9]{2}[a-c]", text)
    api.assert_all_blocks_back()


async def test_structured_stuck_constraint_delays_no_other_request() -> None:
    """A schema that takes long holds none of the threads that read the other requests' bodies."""
    grammars = Grammars(TOKENIZER, compile_s=60)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    async with open_api(grammars=grammars) as api:
        assert (await api.chat(regex="a{3}")).status_code == 200
        process = grammars.validator.process
        assert process is not None
        os.kill(process, signal.SIGSTOP)
        try:
            slow = asyncio.ensure_future(api.chat(regex="b{3}"))
            await eventually(lambda: grammars.validator.count == 2)
            assert (await api.chat()).status_code == 200
            assert (await api.chat(regex="a{3}")).status_code == 200
            assert not slow.done()
        finally:
            os.kill(process, signal.SIGCONT)
        answer = await slow
        assert answer.json()["choices"][0]["message"]["content"] == "bbb"
    grammars.close()
