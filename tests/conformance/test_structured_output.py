"""E: structured output."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import pytest
from jsonschema import validate
from pydantic import BaseModel, Field

from baton_api.errors import INVALID_VALUE, MISSING_REQUIRED_PARAMETER
from tests.conformance.deployment import Deployment, joined
from tests.conformance.expected import check_error, check_param, exactly

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "population": {"type": "integer", "minimum": 0, "maximum": 99_999_999},
        "continent": {"enum": ["Africa", "America", "Asia", "Europe", "Oceania"]},
        "coast": {"type": "boolean"},
        "districts": {"type": "array", "items": {"$ref": "#/$defs/district"}, "maxItems": 2},
    },
    "required": ["name", "population", "continent", "coast", "districts"],
    "additionalProperties": False,
    "$defs": {
        "district": {
            "type": "object",
            "properties": {"code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]$"}},
            "required": ["code"],
            "additionalProperties": False,
        }
    },
}


def schema_format(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "city", "schema": schema, **more}}


STRICT = schema_format(CITY, strict=True)
LONG_ENOUGH = 400


class City(BaseModel):
    name: str = Field(max_length=12)
    continent: Literal["Africa", "Asia", "Europe"]
    population: int = Field(ge=0, le=9_999_999)


def test_E1_a_json_object_is_one(served: Deployment) -> None:
    completion = served.chat(response_format={"type": "json_object"}, max_tokens=120, temperature=0)
    choice = completion.choices[0]
    if choice.finish_reason != "length":
        assert isinstance(json.loads(choice.message.content or ""), dict)
    else:
        assert (choice.message.content or "").lstrip().startswith("{")


@pytest.mark.parametrize("seed", range(10))
def test_E2_a_strict_schema_is_kept(served: Deployment, seed: int) -> None:
    fields = {"response_format": STRICT, "seed": seed, "temperature": 1, "max_tokens": LONG_ENOUGH}
    choice = served.chat(**fields).choices[0]
    assert choice.finish_reason == "stop"
    validate(json.loads(choice.message.content or ""), CITY)
    assert joined(served.stream_chat(**fields)) == choice.message.content


def test_E3_the_sdk_parses_into_a_model(served: Deployment) -> None:
    completion = served.client.chat.completions.parse(
        model=served.model,
        messages=[{"role": "user", "content": "Name a city."}],
        response_format=City,
        temperature=0,
        max_tokens=LONG_ENOUGH,
    )
    assert isinstance(completion.choices[0].message.parsed, City)


@pytest.mark.parametrize(
    "wrong",
    [
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "city"}},
        {"type": "json_schema", "json_schema": {"schema": CITY}},
    ],
    ids=["no json_schema", "no schema", "no name"],
)
def test_E4_what_a_schema_needs_is_asked_for(served: Deployment, wrong: dict[str, Any]) -> None:
    answer = served.post_chat(response_format=wrong)
    check_param(answer, "response_format")
    assert answer.json()["error"]["code"] == MISSING_REQUIRED_PARAMETER


def test_E4_an_unknown_format_is_refused(served: Deployment) -> None:
    answer = served.post_chat(response_format={"type": "poem"})
    check_param(answer, "response_format")
    assert answer.json()["error"]["code"] == INVALID_VALUE
    check_param(served.post_chat(response_format=schema_format(CITY, strict="yes")), "response_format")
    check_param(served.post_chat(response_format=schema_format(CITY) | {"json_schema": 5}), "response_format")


def test_E5_a_cut_ends_with_length(served: Deployment) -> None:
    choice = served.chat(response_format=STRICT, max_tokens=5, temperature=0).choices[0]
    assert choice.finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(choice.message.content or "")


@pytest.mark.parametrize(
    "constraint, pattern",
    [
        ({"regex": "[0-9]{3}-[0-9]{4}"}, r"\d{3}-\d{4}"),
        ({"ebnf": 'root ::= "yes" | "no"'}, "yes|no"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "a|b"),
        ({"structured_outputs": {"regex": "x{2,3}"}}, "x{2,3}"),
        ({"structured_outputs": {"grammar": 'root ::= "p" "q"+ "r"'}}, "pq+r"),
        ({"structured_outputs": {"json": {"enum": [1, 2]}}}, "1|2"),
        ({"json_schema": '{"enum": ["left", "right"]}'}, '"(left|right)"'),
        ({"response_format": schema_format({"const": "this"})}, '"this"'),
        ({"structured_outputs": {"json_object": True}}, r"\s*\{.*"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value)[:60],
)
def test_E6_every_kind_of_constraint_is_kept(
    served: Deployment, constraint: dict[str, Any], pattern: str
) -> None:
    for temperature in (0, 1):
        answer = served.post_chat(temperature=temperature, seed=1, max_tokens=60, **constraint)
        assert answer.status_code == 200, answer.text
        assert re.fullmatch(pattern, answer.json()["choices"][0]["message"]["content"], re.DOTALL)


@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "("},
        {"regex": "a", "ebnf": 'root ::= "a"'},
        {"regex": "a", "response_format": {"type": "json_object"}},
        {"ebnf": "root ::= ("},
        {"structured_outputs": {"regex": "a", "choice": ["a"]}},
        {"structured_outputs": {"choice": []}},
        {"response_format": schema_format({"type": "nonsense"})},
        {"regex": "(((a{1,1000}){1,1000}){1,1000}){1,1000}"},
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_E7_impossible_constraint_is_rejected(served: Deployment, constraint: dict[str, Any]) -> None:
    check_error(served.post_chat(**constraint), 400)
    assert served.chat(max_tokens=1).choices


def test_E7_a_schema_of_any_depth_leaves_the_server_alive(served: Deployment) -> None:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(200):
        deep = {"type": "object", "properties": {"a": deep}, "required": ["a"]}
    check_error(served.post_chat(response_format=schema_format(deep)), 400)
    assert served.chat(max_tokens=1).choices


@pytest.mark.parametrize("field", ["guided_json", "guided_regex", "guided_choice", "guided_grammar"])
def test_E8_old_names_are_kept_or_refused_but_never_ignored(served: Deployment, field: str) -> None:
    values: dict[str, Any] = {
        "guided_json": {"enum": [7]},
        "guided_regex": "7",
        "guided_choice": ["7"],
        "guided_grammar": 'root ::= "7"',
    }
    answer = served.post_chat(max_tokens=8, **{field: values[field]})
    if answer.status_code == 200:
        assert answer.json()["choices"][0]["message"]["content"] == "7"
    else:
        check_error(answer, 400, field)


def test_E13_a_constraint_holds_for_every_choice(served: Deployment) -> None:
    completion = served.chat(
        n=4, temperature=1, max_tokens=40, extra_body={"regex": "[a-f]{4}-[0-9]{2}"}, seed=1
    )
    contents = [choice.message.content or "" for choice in completion.choices]
    assert all(re.fullmatch("[a-f]{4}-[0-9]{2}", content) for content in contents)
    assert len(set(contents)) > 1


def test_E14_completions_take_constraints_too(served: Deployment) -> None:
    for constraint in (
        {"regex": "[0-9]{3}"},
        {"structured_outputs": {"regex": "[0-9]{3}"}},
        {"response_format": schema_format({"type": "integer", "minimum": 100, "maximum": 999})},
    ):
        answer = served.post_completion("A number:", max_tokens=20, temperature=1, **constraint)
        assert answer.status_code == 200, answer.text
        assert re.fullmatch(r"\d{3}", answer.json()["choices"][0]["text"])


def test_E15_a_stop_string_ends_a_constrained_text(served: Deployment) -> None:
    choice = served.chat(stop="3", extra_body=exactly("12345"), temperature=0).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("12", "stop")


def test_E16_many_constraints_at_once_do_not_mix(served: Deployment) -> None:
    events = [served.stream_chat(max_tokens=40, temperature=1, **exactly(f"answer {n}")) for n in range(6)]
    assert [joined(stream) for stream in events] == [f"answer {n}" for n in range(6)]
