"""How the tools of a request are read, and what of them is refused, with which code and param."""

from __future__ import annotations

from typing import Any

import pytest

from baton_api.errors import (
    ARRAY_ABOVE_MAX_LENGTH,
    EMPTY_ARRAY,
    INVALID_FUNCTION_PARAMETERS,
    INVALID_TYPE,
    INVALID_VALUE,
    MISSING_REQUIRED_PARAMETER,
    STRING_ABOVE_MAX_LENGTH,
    InvalidRequest,
)
from baton_engine.api.fields import Fields
from baton_engine.api.parsing.tools.request import read_tools, reject_forced_call
from baton_engine.api.parsing.tools.toolbox import NO_PARAMETERS, TextGrammar, Toolbox

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def function(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def custom(name: Any = "c", **more: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": name, **more}}


def read(**fields: Any) -> Toolbox:
    toolbox = read_tools(Fields(fields))
    assert toolbox is not None
    return toolbox


F, G = function("f"), function("g")


def allowed(mode: str, *tools: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def test_read_tools_function_has_name_description_parameters() -> None:
    toolbox = read(tools=[function("f", description="what it does", parameters=SCHEMA, strict=True)])
    assert toolbox.definitions == [
        {"type": "function", "function": {"name": "f", "description": "what it does", "parameters": SCHEMA}}
    ]
    assert toolbox.tools[0].strict
    assert toolbox.choice == "auto"
    assert toolbox.parallel


def test_read_tools_function_without_parameters_takes_none() -> None:
    toolbox = read(tools=[F, function("g", parameters={})])
    assert [tool.parameters for tool in toolbox.tools] == [NO_PARAMETERS, NO_PARAMETERS]


def test_read_tools_custom_tool_is_a_function_with_one_string() -> None:
    regex = {"type": "grammar", "grammar": {"syntax": "regex", "definition": "[0-9]+"}}
    toolbox = read(tools=[custom(), custom("d", format={"type": "text"}), custom("e", format=regex)])
    assert [tool.grammar for tool in toolbox.tools] == [None, None, TextGrammar("regex", "[0-9]+")]
    assert [list(item["function"]["parameters"]["properties"]) for item in toolbox.definitions] == [
        ["input"]
    ] * 3
    assert "[0-9]+" in str(toolbox.definitions[2])


@pytest.mark.parametrize(
    ("fields", "choice", "callable", "parallel"),
    [
        pytest.param({}, "auto", {"f", "g"}, True, id="nothing"),
        pytest.param({"tool_choice": "auto"}, "auto", {"f", "g"}, True, id="auto"),
        pytest.param({"tool_choice": "required"}, "required", {"f", "g"}, True, id="required"),
        pytest.param({"tool_choice": "none"}, "none", set(), True, id="none"),
        pytest.param({"tool_choice": G}, "required", {"g"}, False, id="named"),
        pytest.param({"tool_choice": allowed("auto", F)}, "auto", {"f"}, True, id="allowed"),
        pytest.param(
            {"tool_choice": allowed("required", F, G)}, "required", {"f", "g"}, True, id="allowed, required"
        ),
        pytest.param({"parallel_tool_calls": False}, "auto", {"f", "g"}, False, id="not parallel"),
        pytest.param({"tool_choice": None, "parallel_tool_calls": None}, "auto", {"f", "g"}, True, id="null"),
    ],
)
def test_read_tools_choice_sets_callable_tools(
    fields: dict[str, Any], choice: str, callable: set[str], parallel: bool
) -> None:
    toolbox = read(tools=[F, G], **fields)
    assert (toolbox.choice, set(toolbox.callable), toolbox.parallel) == (choice, callable, parallel)
    assert len(toolbox.definitions) == 2


def test_read_tools_custom_tool_can_be_chosen() -> None:
    assert set(read(tools=[F, custom()], tool_choice=custom()).callable) == {"c"}


@pytest.mark.parametrize(
    "fields",
    [{}, {"tools": None}, {"tools": []}, {"tool_choice": "none"}, {"tools": [], "tool_choice": "auto"},
     {"function_call": "none"}, {"parallel_tool_calls": False}],
    ids=str,
)  # fmt: skip
def test_read_tools_without_tools_is_unset(fields: dict[str, Any]) -> None:
    assert read_tools(Fields(fields)) is None


def test_functions_are_tools_as_they_once_were() -> None:
    toolbox = read(functions=[{"name": "f", "parameters": SCHEMA}, {"name": "g"}])
    assert toolbox.legacy
    assert not toolbox.parallel
    assert toolbox.choice == "auto"
    assert read(functions=[{"name": "f"}], function_call="none").choice == "none"
    named = read(functions=[{"name": "f"}, {"name": "g"}], function_call={"name": "g"})
    assert (named.choice, set(named.callable)) == ("required", {"g"})


BAD: list[tuple[dict[str, Any], str, str | None]] = [
    ({"tools": {}}, "tools", INVALID_TYPE),
    ({"tools": [1]}, "tools[0]", INVALID_TYPE),
    ({"tools": [F, {}]}, "tools[1].type", MISSING_REQUIRED_PARAMETER),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type", INVALID_VALUE),
    ({"tools": [{"type": "function"}]}, "tools[0].function", MISSING_REQUIRED_PARAMETER),
    ({"tools": [{"type": "function", "function": "f"}]}, "tools[0].function", INVALID_TYPE),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name",
     MISSING_REQUIRED_PARAMETER),
    ({"tools": [function(1)]}, "tools[0].function.name", INVALID_TYPE),
    ({"tools": [function("")]}, "tools[0].function.name", INVALID_VALUE),
    ({"tools": [function("a b")]}, "tools[0].function.name", INVALID_VALUE),
    ({"tools": [function("a\n")]}, "tools[0].function.name", INVALID_VALUE),
    ({"tools": [function("a" * 129)]}, "tools[0].function.name", STRING_ABOVE_MAX_LENGTH),
    ({"tools": [F, F]}, "tools[1].function.name", INVALID_VALUE),
    ({"tools": [function(description=1)]}, "tools[0].function.description", INVALID_TYPE),
    ({"tools": [function(strict="yes")]}, "tools[0].function.strict", INVALID_TYPE),
    ({"tools": [function(parameters="x")]}, "tools[0].function.parameters", INVALID_TYPE),
    ({"tools": [function(parameters={"type": "string"})]}, "tools[0].function.parameters",
     INVALID_FUNCTION_PARAMETERS),
    ({"tools": [function(parameters={"type": "objekt"})]}, "tools[0].function.parameters",
     INVALID_FUNCTION_PARAMETERS),
    ({"tools": [function(parameters={"properties": {"a": 1}})]}, "tools[0].function.parameters",
     INVALID_FUNCTION_PARAMETERS),
    ({"tools": [function(parameters={"properties": {"a": {"items": {"anyOf": {}}}}})]},
     "tools[0].function.parameters", INVALID_FUNCTION_PARAMETERS),
    ({"tools": [function(parameters={"required": "a"})]}, "tools[0].function.parameters",
     INVALID_FUNCTION_PARAMETERS),
    ({"tools": [function(parameters={"title": "x" * 200_000})]}, "tools[0].function.parameters",
     INVALID_FUNCTION_PARAMETERS),
    ({"tools": [custom(format={})]}, "tools[0].custom.format.type", MISSING_REQUIRED_PARAMETER),
    ({"tools": [custom(format={"type": "xml"})]}, "tools[0].custom.format.type", INVALID_VALUE),
    ({"tools": [custom(format={"type": "grammar"})]}, "tools[0].custom.format.grammar",
     MISSING_REQUIRED_PARAMETER),
    ({"tools": [custom(format={"type": "grammar", "grammar": {"syntax": "bnf", "definition": "x"}})]},
     "tools[0].custom.format.grammar.syntax", INVALID_VALUE),
    ({"tools": [custom(format={"type": "grammar", "grammar": {"syntax": "lark"}})]},
     "tools[0].custom.format.grammar.definition", MISSING_REQUIRED_PARAMETER),
    ({"tool_choice": "required"}, "tool_choice", None),
    ({"tool_choice": "auto"}, "tool_choice", None),
    ({"tool_choice": F}, "tool_choice", None),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", None),
    ({"tool_choice": "maybe"}, "tool_choice", INVALID_VALUE),
    ({"tools": [F], "tool_choice": "maybe"}, "tool_choice", INVALID_VALUE),
    ({"tools": [F], "tool_choice": 1}, "tool_choice", INVALID_TYPE),
    ({"tools": [F], "tool_choice": {}}, "tool_choice.type", MISSING_REQUIRED_PARAMETER),
    ({"tools": [F], "tool_choice": {"type": "x"}}, "tool_choice.type", INVALID_VALUE),
    ({"tools": [F], "tool_choice": {"type": "function"}}, "tool_choice.function",
     MISSING_REQUIRED_PARAMETER),
    ({"tools": [F], "tool_choice": G}, "tool_choice.function.name", INVALID_VALUE),
    ({"tools": [F], "tool_choice": custom("f")}, "tool_choice.custom.name", INVALID_VALUE),
    ({"tools": [F], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools",
     MISSING_REQUIRED_PARAMETER),
    ({"tools": [F], "tool_choice": allowed("none", F)}, "tool_choice.allowed_tools.mode", INVALID_VALUE),
    ({"tools": [F], "tool_choice": allowed("auto")}, "tool_choice.allowed_tools.tools", EMPTY_ARRAY),
    ({"tools": [F], "tool_choice": allowed("auto", F, G)}, "tool_choice.allowed_tools.tools[1].function.name",
     INVALID_VALUE),
    ({"tools": [F], "parallel_tool_calls": 1}, "parallel_tool_calls", INVALID_TYPE),
    ({"tools": [F], "functions": [{"name": "f"}]}, "functions", None),
    ({"functions": []}, "functions", EMPTY_ARRAY),
    ({"functions": [{"name": f"f{n}"} for n in range(129)]}, "functions", ARRAY_ABOVE_MAX_LENGTH),
    ({"functions": [{"name": "f"}, {"name": "f"}]}, "functions[1].name", INVALID_VALUE),
    ({"functions": [{"name": "f"}], "function_call": "required"}, "function_call", INVALID_VALUE),
    ({"functions": [{"name": "f"}], "function_call": {"name": "g"}}, "function_call.name", INVALID_VALUE),
    ({"functions": [{"name": "f"}], "function_call": {}}, "function_call.name", MISSING_REQUIRED_PARAMETER),
    ({"function_call": {"name": "f"}}, "function_call", None),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "code"), BAD, ids=lambda value: str(value)[:70])
def test_read_tools_invalid_field_is_named(fields: dict[str, Any], param: str, code: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_tools(Fields(fields))
    assert (refused.value.param, refused.value.code) == (param, code)
    assert len(str(refused.value)) < 400


def test_read_tools_required_call_excludes_other_formats() -> None:
    for toolbox, param in (
        (read(tools=[F], tool_choice="required"), "tool_choice"),
        (read(functions=[{"name": "f"}], function_call={"name": "f"}), "function_call"),
    ):
        with pytest.raises(InvalidRequest, match="response_format") as refused:
            reject_forced_call(toolbox, "response_format")
        assert refused.value.param == param
    reject_forced_call(read(tools=[F]), "response_format")
    reject_forced_call(None, "response_format")
