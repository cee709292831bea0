"""
Translation of a responses request to a chat request.

Members with the same name and meaning pass unchanged, including extensions; others are renamed. Members of
chat that responses lack are rejected with the name to use instead. Errors of chat are reported under the
member names of the request. Tools are flat in responses and nested in chat. Tools of a namespace get its name
before their own. Tools that run at OpenAI are left out, because agents send them with every request. Fields
that only shorten the client's context are ignored.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from baton_api import limits
from baton_api.errors import UNSUPPORTED_PARAMETER, InvalidRequest
from baton_engine.api.chat import input_items
from baton_engine.api.chat.input_items import ChatMessages, qualified
from baton_engine.api.fields import Fields, shown, wrong_type
from baton_engine.api.parameters import read_metadata, reject_moved, reject_unsupported
from baton_engine.api.parsing.tools.request import log_left_out, only_hosted

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "code_interpreter_call.outputs", "message.input_image.image_url",
    "computer_call_output.output.image_url",
)  # fmt: skip
"""Valid values of `include`. All but the first refer to unsupported features and have no effect."""

UNSUPPORTED = ("background", "conversation", "prompt", "moderation")
MOVED = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "verbosity": "text.verbosity",
    "functions": "tools",
    "function_call": "tool_choice",
    "logprobs": "include",
}
"""Fields of chat, and the corresponding fields of responses."""

OWN = frozenset({
    *UNSUPPORTED, *MOVED, "context_management", "input", "instructions", "previous_response_id",
    "max_output_tokens", "text", "reasoning", "include", "tools", "tool_choice", "truncation",
    "max_tool_calls", "store", "top_logprobs", "n",
})  # fmt: skip
"""Fields that are not passed to chat unchanged."""

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
SUMMARIES = ("auto", "concise", "detailed")


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedTool:
    """A function or a custom tool."""

    definition: dict[str, Any]
    """The tool in the format of responses."""
    source: str
    """Its path in the request."""
    namespace: dict[str, Any] | None = None
    """Its namespace, without tools."""

    @property
    def name(self) -> str:
        """The name that the client knows."""
        return str(self.definition["name"])

    @property
    def space(self) -> str | None:
        return None if self.namespace is None else str(self.namespace["name"])

    @property
    def qualified(self) -> str:
        """The name that the model knows."""
        return qualified(self.name, self.space)

    @property
    def custom(self) -> bool:
        return bool(self.definition["type"] == "custom")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """A translated request."""

    conversation: ChatMessages
    options: dict[str, Any]
    """Fields of the chat request, except for the messages."""
    echo: dict[str, Any]
    """Members that the response repeats."""
    tools: Sequence[OfferedTool]
    """The tools that the model may call, in the order of the chat request."""
    logprobs: bool
    truncate: bool


def read(fields: Fields, items: Sequence[object], earlier: int) -> ResponseRequest:
    """Translate a request. `items` is the whole conversation; the first `earlier` items are of responses."""
    reject_unsupported(fields, UNSUPPORTED)
    reject_moved(fields, MOVED)
    include = _include(fields)
    top_logprobs = fields.integer("top_logprobs", *limits.TOP_LOGPROBS.range)
    fields.integer("max_tool_calls", *limits.MAX_TOOL_CALLS.range)
    fields.integer("n", 1, 1)
    instructions = fields.text("instructions")
    text, reasoning = fields.member("text"), fields.member("reasoning")
    reasoning.choice("summary", SUMMARIES)
    offered = read_tools(fields, items, earlier)
    choice = read_choice(fields, any_left=bool(offered))
    options = {name: fields.get(name) for name in fields if name not in OWN} | {
        "max_completion_tokens": fields.get("max_output_tokens"),
        "verbosity": text.get("verbosity"),
        "reasoning_effort": reasoning.get("effort"),
        "response_format": _format(text),
        "tools": [for_chat(tool) for tool in offered] or None,
        "tool_choice": choice_for_chat(choice),
        "logprobs": True if LOGPROBS in include else None,
        "top_logprobs": top_logprobs if LOGPROBS in include else None,
    }
    return ResponseRequest(
        conversation=input_items.read(items, earlier, instructions),
        options={name: value for name, value in options.items() if value is not None},
        echo={
            "instructions": instructions,
            "tool_choice": choice,
            "tools": echoed(offered),
            "top_logprobs": top_logprobs or 0,
            **_echo(fields, text, reasoning),
        },
        tools=offered,
        logprobs=LOGPROBS in include,
        truncate=fields.get("truncation") == "auto",
    )


def _echo(fields: Fields, text: Fields, reasoning: Fields) -> dict[str, Any]:
    """Return the fields that the response object repeats unchanged, or with their defaults."""
    return {
        "max_output_tokens": fields.get("max_output_tokens"),
        "max_tool_calls": fields.get("max_tool_calls"),
        "metadata": read_metadata(fields) or {},
        "parallel_tool_calls": fields.boolean("parallel_tool_calls", True),
        "previous_response_id": fields.text("previous_response_id"),
        "prompt_cache_key": fields.get("prompt_cache_key"),
        "reasoning": {"effort": reasoning.get("effort"), "summary": reasoning.get("summary")},
        "safety_identifier": fields.get("safety_identifier"),
        "store": fields.boolean("store", True),
        "text": {
            "format": text.get("format") or {"type": "text"},
            "verbosity": text.get("verbosity") or "medium",
        },
        "truncation": fields.choice("truncation", ("auto", "disabled")) or "disabled",
        "user": fields.get("user"),
    }


def _include(fields: Fields) -> frozenset[str]:
    wanted = fields.array("include", len(INCLUDABLE)) or ()
    for position, name in enumerate(wanted):
        param = f"include[{position}]"
        if not isinstance(name, str):
            raise wrong_type(param, "a string", name)
        if name not in INCLUDABLE:
            Fields({param: name}).wrong_value(param, f"{shown(name)} cannot be included")
    return frozenset(wanted)


def _format(text: Fields) -> dict[str, Any] | None:
    """Translate `text.format`. In chat, a schema is nested one level deeper."""
    given = text.mapping("format")
    if given is None:
        return None
    fields = Fields(given, "text.format")
    fields.require("type")
    if fields.choice("type", FORMATS) != "json_schema":
        return given
    for name in ("name", "schema"):
        fields.require(name)
    return {"type": "json_schema", "json_schema": {key: given[key] for key in given if key != "type"}}


_NAMES = (
    (re.compile(r"^max_completion_tokens$"), "max_output_tokens"),
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"^verbosity$"), "text.verbosity"),
    (re.compile(r"^logprobs$"), "include"),
    (re.compile(r"^tool_choice\.(?:function|custom|allowed_tools)\b"), "tool_choice"),
    (re.compile(r"^(tool_choice\.tools\[\d+\])\.(?:function|custom)\b"), r"\1"),
    (re.compile(r"^messages$"), "input"),
)
_TOOL = re.compile(r"^tools\[(\d+)\]")


def here(param: str, request: ResponseRequest) -> str:
    """Return the field of `request` that corresponds to chat's `param`."""
    if item := input_items.source(param, request.conversation):
        return item
    if (tool := _TOOL.match(param)) and int(tool[1]) < len(request.tools):
        rest = re.sub(r"^\.(?:function|custom)\b", "", param[tool.end() :])
        return request.tools[int(tool[1])].source + rest
    for pattern, name in _NAMES:
        param = pattern.sub(name, param)
    return param


CHOICES = ("none", "auto", "required")
OF_FUNCTION = ("name", "description", "parameters", "strict")
OF_CUSTOM = ("name", "description", "format")


HOSTED = (
    "web_search", "file_search", "code_interpreter", "image_generation", "mcp", "tool_search",
    "programmatic_tool_calling",
)  # fmt: skip
"""Starts of the types of tools that run at OpenAI."""
SERVICE = "OpenAI"
TOOL_ITEMS = ("additional_tools", "tool_search_output")
"""Types of items with further tools."""


def read_tools(fields: Fields, items: Sequence[object], earlier: int) -> list[OfferedTool]:
    """
    Return the tools without those that run at OpenAI. Items of the conversation may add further tools.

    Raises InvalidRequest for tools of other types.
    """
    tools = _tools(fields)
    names = {tool.qualified for tool in tools}
    for position, item in enumerate(items):
        if isinstance(item, dict) and item.get("type") in TOOL_ITEMS:
            path = "previous_response_id" if position < earlier else f"input[{position - earlier}]"
            added = [tool for tool in _tools(Fields(item, path)) if tool.qualified not in names]
            names.update(tool.qualified for tool in added)
            tools += added
    return tools


def _tools(fields: Fields, kinds: Sequence[str] = ("function", "custom", "namespace")) -> list[OfferedTool]:
    tools: list[OfferedTool] = []
    for tool in fields.objects("tools", limits.TOOLS.most):
        kind = tool.required_text("type")
        if kind.startswith(HOSTED):
            log_left_out(kind, SERVICE)
        elif kind not in kinds:
            raise InvalidRequest(
                f"Tools of type {shown(kind)} are not supported. Supported types: "
                f"{', '.join(map(repr, kinds))}.",
                param="tools",
                code=UNSUPPORTED_PARAMETER,
            )
        else:
            tool.required_text("name")
            tools += _tools_of(tool, kind)
    return tools


def _tools_of(tool: Fields, kind: str) -> list[OfferedTool]:
    """Return a tool with all of its members, or the tools of a namespace."""
    if kind == "namespace":
        space = {"type": kind, "name": tool.get("name"), "description": tool.text("description") or ""}
        return [replace(inner, namespace=space) for inner in _tools(tool, ("function", "custom"))]
    definition = {"type": kind} | {name: tool.get(name) for name in OF_FUNCTION}
    if kind == "custom":
        definition = {"type": kind, "name": tool.get("name")} | {
            "description": tool.get("description") or "",
            "format": tool.mapping("format") or {"type": "text"},
        }
    return [OfferedTool(definition=definition, source=tool.path)]


def echoed(tools: Sequence[OfferedTool]) -> list[dict[str, Any]]:
    """Return the tools in the format of responses, those of a namespace within it."""
    bodies: list[dict[str, Any]] = []
    for namespace, group in itertools.groupby(tools, key=lambda tool: tool.namespace):
        inner = [tool.definition for tool in group]
        bodies += inner if namespace is None else [namespace | {"tools": inner}]
    return bodies


def for_chat(tool: OfferedTool) -> dict[str, Any]:
    kind = tool.definition["type"]
    names = OF_CUSTOM if kind == "custom" else OF_FUNCTION
    given = {name: tool.definition[name] for name in names if tool.definition[name] is not None}
    inner = given | {"name": tool.qualified}
    if kind == "custom" and inner["format"].get("type") == "grammar":
        grammar = {key: value for key, value in inner["format"].items() if key != "type"}
        inner["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": kind, kind: inner}


def read_choice(fields: Fields, *, any_left: bool) -> str | dict[str, Any]:
    """
    Return `tool_choice` in the format of responses.

    Raises InvalidRequest if it requires a tool that runs at OpenAI. `any_left` says whether there are others.
    """
    value = fields.get("tool_choice")
    if value is None:
        return "auto"
    hosted = fields.given("tools") and not any_left
    if not isinstance(value, dict):
        if value == "required" and hosted:
            raise only_hosted(SERVICE)
        return fields.choice("tool_choice", CHOICES) or "auto"
    inner = Fields(value, "tool_choice")
    inner.require("type")
    if (inner.text("type") or "").startswith(HOSTED):
        raise only_hosted(SERVICE)
    if inner.choice("type", ("function", "custom", "allowed_tools")) != "allowed_tools":
        if hosted:
            raise only_hosted(SERVICE)
        inner.required_text("name")
        return value
    inner.choice("mode", ("auto", "required"))
    items = inner.array("tools", limits.TOOLS.most) or ()
    for _ in inner.objects("tools", limits.TOOLS.most):
        pass  # objects with any members
    of_client = [tool for tool in items if not str(tool.get("type")).startswith(HOSTED)]
    if items and not of_client:
        if value.get("mode") == "required":
            raise only_hosted(SERVICE)
        return "none"
    return value | {"tools": of_client}


def choice_for_chat(choice: str | dict[str, Any]) -> str | dict[str, Any] | None:
    if isinstance(choice, str):
        return None if choice == "auto" else choice
    kind = choice["type"]
    if kind != "allowed_tools":
        return _reference(choice)
    allowed = [_reference(tool) for tool in choice.get("tools") or ()]
    return {"type": kind, kind: {"mode": choice.get("mode") or "auto", "tools": allowed}}


def _reference(tool: dict[str, Any]) -> dict[str, Any]:
    kind, name, namespace = tool.get("type"), tool.get("name"), tool.get("namespace")
    if isinstance(name, str) and isinstance(namespace, str):
        name = qualified(name, namespace)
    return {"type": kind, str(kind): {"name": name}}
