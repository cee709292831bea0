"""Structural tags in both forms: free text in which marks begin what has a form."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton_api.errors import InvalidRequest
from baton_api.sampling import Constraint
from tests.engine.grammar.tokenizers import CALL, CALLED, GRAMMARS, ids, takes

NUMBER = {"type": "json_schema", "json_schema": {"type": "integer"}}
LEGACY = {
    "structures": [
        {"begin": "<f=get>", "schema": {"type": "integer"}, "end": "</f>"},
        {"begin": "<f=put>", "schema": {"enum": ["x"]}, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [tag("<f=a>", NUMBER, ";")]}

CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "the old form": (
        LEGACY,
        ["", "hello", 'hi <f=get>12</f> and <f=put>"x"</f>!', "< f"],
        ["<f=other>", "<f=get>x</f>", "<f=get>1</g>", "<f=get>1"],
    ),
    "a text": ({"format": text("abc")}, ["abc"], ["ab", "abcd"]),
    "a schema": ({"format": NUMBER}, ["12"], ["x"]),
    "a regular expression": ({"format": {"type": "regex", "pattern": "a+/b"}}, ["aa/b"], ["/b"]),
    "a grammar": ({"format": {"type": "grammar", "grammar": 'root ::= "(" root ")" | "x"'}}, ["(x)"], ["(x"]),
    "one after the other": (
        {"format": {"type": "sequence", "elements": [text("n="), NUMBER, text("!")]}},
        ["n=12!"],
        ["n=!", "12!"],
    ),
    "one or the other": ({"format": {"type": "or", "elements": [text("a"), text("b")]}}, ["a", "b"], ["ab"]),
    "perhaps": ({"format": {"type": "optional", "content": text("a")}}, ["", "a"], ["aa"]),
    "any number": ({"format": {"type": "star", "content": text("a")}}, ["", "aaa"], ["b"]),
    "some": ({"format": {"type": "plus", "content": text("a")}}, ["a", "aaa"], [""]),
    "text up to its end": (
        {"format": tag("<", {"type": "any_text"}, [">", "END"])},
        ["<abc>", "<abcEND", "<>"],
        ["<abc", "<a>b>"],
    ),
    "a pattern up to its end": (
        {"format": tag("<", {"type": "regex", "pattern": "[a-z]+"}, "z>")},
        ["<abz>", "<azz>"],
        ["<z>", "<ab>"],
    ),
    "tags in a text": ({"format": TRIGGERED}, ["", "x <f=a>1; y <f=a>2;"], ["<f=b>1;", "<f=a>x;"]),
    "at least one": ({"format": TRIGGERED | {"at_least_one": True}}, ["x <f=a>1; y"], ["", "x"]),
    "at most one": ({"format": TRIGGERED | {"stop_after_first": True}}, ["", "x <f=a>1;"], ["<f=a>1; y"]),
    "exactly one": (
        {"format": TRIGGERED | {"stop_after_first": True, "at_least_one": True}},
        ["x <f=a>1;"],
        ["", "<f=a>1;<f=a>1;"],
    ),
    "tags and nothing else": (
        {"format": {"type": "tags_with_separator", "tags": [tag("<", NUMBER, ">")], "separator": ", "}},
        ["", "<1>", "<1>, <2>"],
        ["<1><2>", "<1>, "],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_structural_tag_accepts_its_language_only(case: str) -> None:
    form, good, bad = CASES[case]
    source = json.dumps(form)
    assert [one for one in good if not takes("structural_tag", source, one)] == []
    assert [one for one in bad if takes("structural_tag", source, one)] == []


def test_marks_that_are_special_tokens_are_meant_as_tokens() -> None:
    form = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [tag("<call>n=", NUMBER, "</call>")]}
    source = json.dumps({"format": form})
    assert takes("structural_tag", source, [*ids("so: "), CALL, *ids("n=7"), CALLED])
    assert not takes("structural_tag", source, [CALL, *ids("n=x"), CALLED])
    assert not takes("structural_tag", source, [CALL, *ids("n=7")])


DEEP: dict[str, Any] = text("a")
for _ in range(40):
    DEEP = {"type": "optional", "content": DEEP}

WRONG: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "not JSON"),
    "an array": ("[]", "JSON object"),
    "nothing": ("{}", "'structures' is missing"),
    "a trigger of no tag": (json.dumps(LEGACY | {"triggers": ["<f=", "<g"]}), "no tag begins"),
    "a tag without its trigger": (
        json.dumps(LEGACY | {"triggers": ["<f=get"]}),
        "does not begin with a trigger",
    ),
    "another format": (json.dumps({"format": {"type": "poem"}}), "'poem' is not supported"),
    "a style": (json.dumps({"format": NUMBER | {"style": "qwen_xml"}}), "a style other than JSON"),
    "formats too deep": (json.dumps({"format": DEEP}), "deeper than 32"),
    "a sequence that goes on after any text": (
        json.dumps({"format": {"type": "sequence", "elements": [{"type": "any_text"}, text("a")]}}),
        "has no end and must be the last",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_structural_tag_invalid_is_rejected_with_the_reason(case: str) -> None:
    source, reason = WRONG[case]
    with pytest.raises(InvalidRequest) as error:
        GRAMMARS.check(Constraint("structural_tag", source))
    assert reason in str(error.value)
