"""
Tools of a request: `tools` and `tool_choice`, or the deprecated `functions` and `function_call`.

Validates the rules of OpenAI's API: names, counts, the type of each tool, and that a choice names an existing
tool. The compilation of the grammar determines whether a schema can be enforced.
"""

from __future__ import annotations

import functools
import json
import logging
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from baton_api import limits
from baton_api.errors import (
    EMPTY_ARRAY,
    INVALID_FUNCTION_PARAMETERS,
    INVALID_VALUE,
    UNSUPPORTED_PARAMETER,
    InvalidRequest,
)
from baton_engine.api.fields import Fields, shown
from baton_engine.api.parsing.tools.toolbox import NO_PARAMETERS, TextGrammar, Tool, Toolbox
from baton_engine.grammar import schemas

logger = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9_-]+")
CHOICES = ("none", "auto", "required")
KINDS = ("function", "custom")


def read_tools(fields: Fields) -> Toolbox | None:
    """Return the tools of the request, or None. Raises InvalidRequest."""
    if fields.get("functions") is not None:
        return _functions(fields)
    if fields.get("function_call") not in (None, "none", "auto"):
        raise InvalidRequest(
            "'function_call' is only allowed when 'functions' are specified.", param="function_call"
        )
    parallel = fields.boolean("parallel_tool_calls", True)
    if not fields.array("tools", limits.TOOLS.most):  # clients that build the list send an empty one
        _without_tools(fields)
        return None
    tools = tuple(map(_tool, fields.objects("tools", limits.TOOLS.most)))
    _check_names(tools, "tools")
    return _chosen(fields, Toolbox(tools=tools, parallel=parallel))


def reject_forced_call(toolbox: Toolbox | None, param: str) -> None:
    """Raise InvalidRequest if the answer must be a call. `param` requires another format of the answer."""
    if toolbox is not None and toolbox.forced:
        choice = "function_call" if toolbox.legacy else "tool_choice"
        raise InvalidRequest(
            f"'{param}' cannot be combined with a '{choice}' that requires a call. Remove one of them.",
            param=choice,
        )


@functools.lru_cache(maxsize=64)
def log_left_out(kind: str, service: str) -> None:
    """Log that tools of this type are left out. Once for each type, because agents offer them every time."""
    logger.info(
        "Tools of type %.60r run at %s. Requests that offer them are served without them.", kind, service
    )


def only_hosted(service: str) -> InvalidRequest:
    """Return the error for a required call when no tool is left to call."""
    return InvalidRequest(
        f"'tool_choice' requires a call, but the tools that it allows run at {service}, and not here. "
        "Set 'tool_choice' to 'auto', or define a tool that the client runs.",
        param="tool_choice",
        code=UNSUPPORTED_PARAMETER,
    )


def _without_tools(fields: Fields) -> None:
    choice = fields.get("tool_choice")
    if choice is None or choice == "none":
        return
    if isinstance(choice, str):
        fields.choice("tool_choice", CHOICES)
    elif not isinstance(choice, dict):
        fields.wrong_type("tool_choice", "a string or an object", choice)
    if choice != "auto" or fields.get("tools") is None:
        raise InvalidRequest("'tool_choice' is only allowed when 'tools' are specified.", param="tool_choice")


# --- One tool ---


def _tool(fields: Fields) -> Tool:
    fields.require("type")
    kind = fields.choice("type", KINDS)
    assert kind is not None
    inner = _nested(fields)
    return _custom(inner) if kind == "custom" else _function(inner)


def _nested(fields: Fields) -> Fields:
    """Return the members of a tool or a choice. Cursor sends them flat, as on `/v1/responses`."""
    kind = fields.get("type")
    if fields.get(kind) is None and fields.get("name") is not None:
        return fields
    fields.require(kind)
    return fields.member(kind)


def _function(fields: Fields) -> Tool:
    name = _name(fields)
    parameters = fields.mapping("parameters")
    if parameters is not None:
        _check_parameters(fields, name, parameters)
    return Tool(
        name=name,
        description=fields.text("description", limits.TOOL_DESCRIPTION.most),
        parameters=_object(parameters) if parameters else NO_PARAMETERS,
        strict=fields.boolean("strict"),
    )


def _custom(fields: Fields) -> Tool:
    tool = Tool(
        name=_name(fields),
        description=fields.text("description", limits.TOOL_DESCRIPTION.most),
        custom=True,
    )
    form = fields.mapping("format")
    if form is None:
        return tool
    inner = Fields(form, fields.param("format"))
    inner.require("type")
    if inner.choice("type", ("text", "grammar")) == "text":
        return tool
    given = inner
    if inner.get("definition") is None:
        inner.require("grammar")
        given = inner.member("grammar")
    given.require("syntax")
    syntax = given.choice("syntax", ("lark", "regex"))
    definition = given.required_text("definition", limits.TOOL_SCHEMA.most)
    return replace(tool, grammar=TextGrammar("lark" if syntax == "lark" else "regex", definition))


def _name(fields: Fields) -> str:
    name = fields.required_text("name", limits.TOOL_NAME.most)
    if not NAME.fullmatch(name):
        fields.wrong_value("name", f"Expected letters, digits, '_' and '-' only, but got {shown(name)}")
    return name


def _check_parameters(fields: Fields, name: str, parameters: dict[str, Any]) -> None:
    reason = schemas.problem(parameters)
    kind = parameters.get("type", "object")
    if not reason and kind != "object":
        reason = f"schema must be a JSON Schema of 'type: \"object\"', got 'type: {json.dumps(kind)[:60]}'"
    size = len(json.dumps(parameters))
    if not reason and size > limits.TOOL_SCHEMA.most:
        reason = f"it has {size} characters as JSON, the maximum is {limits.TOOL_SCHEMA.most}"
    if reason:
        raise InvalidRequest(
            f"Invalid schema for function '{name}': {reason}.",
            param=fields.param("parameters"),
            code=INVALID_FUNCTION_PARAMETERS,
        )


def _object(schema: dict[str, Any]) -> dict[str, Any]:
    return schema if "type" in schema else {"type": "object"} | schema


def _check_names(tools: Iterable[Tool], path: str) -> None:
    seen: set[str] = set()
    for position, tool in enumerate(tools):
        if tool.name in seen:
            inner = "" if path == "functions" else ".custom" if tool.custom else ".function"
            raise InvalidRequest(
                f"Invalid '{path}': several tools have the name {tool.name!r}.",
                param=f"{path}[{position}]{inner}.name",
                code=INVALID_VALUE,
            )
        seen.add(tool.name)


# --- The choice among them ---


def _chosen(fields: Fields, toolbox: Toolbox) -> Toolbox:
    choice = fields.get("tool_choice")
    if choice is None:
        return toolbox
    if isinstance(choice, str):
        fields.choice("tool_choice", CHOICES)
        return replace(toolbox, choice=_mode(choice))
    if not isinstance(choice, dict):
        fields.wrong_type("tool_choice", "a string or an object", choice)
    inner = Fields(choice, "tool_choice")
    inner.require("type")
    kind = inner.choice("type", (*KINDS, "allowed_tools"))
    if kind != "allowed_tools":
        return replace(
            toolbox,
            choice="required",
            allowed=frozenset({_named(inner, toolbox)}),
            named=True,
            parallel=False,
        )
    inner.require("allowed_tools")
    allowed = inner.member("allowed_tools")
    allowed.require("mode")
    mode = allowed.choice("mode", ("auto", "required"))
    allowed.require("tools")
    if not allowed.array("tools", limits.TOOLS.most):
        param = allowed.param("tools")
        raise InvalidRequest(
            f"Invalid '{param}': empty array. Expected at least 1 tool.", param=param, code=EMPTY_ARRAY
        )
    names = set()
    for reference in allowed.objects("tools", limits.TOOLS.most):
        reference.require("type")
        reference.choice("type", KINDS)
        names.add(_named(reference, toolbox))
    return replace(toolbox, choice=_mode(mode or "auto"), allowed=frozenset(names))


def _named(fields: Fields, toolbox: Toolbox) -> str:
    """Return the name in `{"type": kind, kind: {"name": ...}}`. Raises InvalidRequest if it is unknown."""
    kind = fields.get("type")
    inner = _nested(fields)
    name = inner.required_text("name")
    if not any(tool.name == name and tool.custom == (kind == "custom") for tool in toolbox.tools):
        inner.wrong_value("name", f"there is no {kind} tool {shown(name)} in 'tools'")
    return name


def _mode(choice: str) -> Any:
    return choice


# --- Deprecated functions ---


def _functions(fields: Fields) -> Toolbox:
    if fields.given("tools"):
        raise InvalidRequest(
            "'functions' and 'tools' cannot be combined. Remove one of them.", param="functions"
        )
    if not fields.array("functions", limits.FUNCTIONS.most):
        raise InvalidRequest(
            "Invalid 'functions': empty array. Expected at least 1 function.",
            param="functions",
            code=EMPTY_ARRAY,
        )
    tools = tuple(map(_function, fields.objects("functions", limits.FUNCTIONS.most)))
    _check_names(tools, "functions")
    toolbox = Toolbox(tools=tools, parallel=False, legacy=True)
    choice = fields.get("function_call")
    if choice is None:
        return toolbox
    if isinstance(choice, str):
        fields.choice("function_call", ("none", "auto"))
        return replace(toolbox, choice=_mode(choice))
    if not isinstance(choice, dict):
        fields.wrong_type("function_call", "a string or an object", choice)
    inner = Fields(choice, "function_call")
    name = inner.required_text("name")
    if all(tool.name != name for tool in tools):
        inner.wrong_value("name", f"there is no function {shown(name)} in 'functions'")
    return replace(toolbox, choice="required", allowed=frozenset({name}), named=True)
