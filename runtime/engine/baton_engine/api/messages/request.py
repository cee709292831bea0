"""
Translation of a request of Anthropic's Messages API to a chat request.

Sampling fields that Anthropic's API lacks pass unchanged. A field of Anthropic's whose effect this server
cannot give is rejected. Fields without an effect on the answer, such as `cache_control`, are ignored, and so
is what only shortens the client's context, such as `context_management`. Tools that run at Anthropic are left
out, because agents offer them unasked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton_api import limits
from baton_api.errors import UNSUPPORTED_PARAMETER, InvalidRequest
from baton_engine.api.fields import Fields, shown, wrong_type
from baton_engine.api.messages import conversation
from baton_engine.api.messages.conversation import TranslatedMessages
from baton_engine.api.parameters import unsupported
from baton_engine.api.parsing.tools.request import log_left_out, only_hosted

UNSUPPORTED = ("container", "mcp_servers")
MOVED = {
    "max_completion_tokens": "max_tokens",
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "parallel_tool_calls": "tool_choice.disable_parallel_tool_use",
    "functions": "tools",
    "function_call": "tool_choice",
}
"""Fields of chat, and the corresponding fields here."""

PASSED = (
    *(limit.field for limit in limits.SAMPLING_NUMBERS), "top_k", "logit_bias", "seed", "min_tokens",
    "stop_token_ids", "ignore_eos", "skip_special_tokens", "bad_words", "allowed_token_ids", "regex", "ebnf",
    "json_schema", "structural_tag", "structured_outputs", "chat_template_kwargs", "chat_template", "stream",
)  # fmt: skip
"""Fields that chat reads unchanged."""

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
THINKING = ("enabled", "adaptive", "between_tools", "disabled")
DISPLAYS = ("summarized", "omitted")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest:
    """A translated request."""

    conversation: TranslatedMessages
    chat: dict[str, Any]
    """The chat request, without a limit of its answer."""
    tools: Sequence[str]
    """The path of the source of each tool of the chat request."""
    edits: bool
    """Whether the client asked to edit its context, which is reported as not done."""


def read(fields: Fields, *, reasons: bool) -> MessagesRequest:
    """
    Translate all but `max_tokens`. Raises InvalidRequest.

    `reasons` says whether the model has a format of reasoning; without one, there is no budget for it.
    """
    _reject_fields(fields)
    talk = conversation.read(fields)
    output = Fields(fields.mapping("output_config") or {}, "output_config")
    tools = _tools(fields)
    options = {name: fields.get(name) for name in PASSED} | {
        "messages": conversation.finished(talk.messages),
        "continue_final_message": True if talk.continued else None,
        "stop": fields.array("stop_sequences", limits.STOPS.most),
        "tools": list(tools.values()) or None,
        "reasoning_effort": output.get("effort"),
        "response_format": _format(output),
    }
    options |= _choice(fields, offered=bool(tools)) | _thinking(fields, reasons)
    return MessagesRequest(
        conversation=talk,
        chat={name: value for name, value in options.items() if value is not None},
        tools=list(tools),
        edits=fields.get("context_management") is not None,
    )


def _reject_fields(fields: Fields) -> None:
    for name in UNSUPPORTED:
        if fields.given(name):
            raise unsupported(name)
    for name, here in MOVED.items():
        if fields.get(name) is not None:
            raise InvalidRequest(
                f"Unsupported parameter: '{name}'. Use {here!r} instead.",
                param=name,
                code=UNSUPPORTED_PARAMETER,
            )
    fields.mapping("metadata")


SERVICE = "Anthropic"
HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")
"""Starts of the types of tools that run at Anthropic. Its other types are for the client to run, but only a
model that was trained for them knows their parameters."""


def _tools(fields: Fields) -> dict[str, dict[str, Any]]:
    """Return the tools that the client runs, by the paths of their sources."""
    tools: dict[str, dict[str, Any]] = {}
    for position, tool in enumerate(fields.array("tools", limits.TOOLS.most) or ()):
        path = f"tools[{position}]"
        if not isinstance(tool, dict):
            raise wrong_type(path, "an object", tool)
        kind = Fields(tool, path).text("type") or "custom"
        if kind.startswith(HOSTED):
            log_left_out(kind, SERVICE)
        else:
            tools[path] = _tool(tool, path)
    return tools


def _tool(tool: dict[str, Any], path: str) -> dict[str, Any]:
    fields = Fields(tool, path)
    kind = fields.text("type") or "custom"
    if kind != "custom":
        raise InvalidRequest(
            f"Unsupported '{path}.type': the parameters of {shown(kind)} tools are defined at Anthropic. "
            "Define a tool with 'name', 'description' and 'input_schema'.",
            param=f"{path}.type",
            code=UNSUPPORTED_PARAMETER,
        )
    for name in ("name", "input_schema"):
        fields.require(name)
    function = {"name": tool["name"], "parameters": fields.mapping("input_schema")}
    more = {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function | more}


def _choice(fields: Fields, *, offered: bool) -> dict[str, Any]:
    given = fields.mapping("tool_choice")
    if given is None:
        return {}
    inner = Fields(given, "tool_choice")
    inner.require("type")
    kind = inner.choice("type", (*CHOICES, "tool")) or ""
    parallel = not inner.boolean("disable_parallel_tool_use")
    if kind == "tool":
        inner.require("name")
        choice: Any = {"type": "function", "function": {"name": inner.text("name")}}
    else:
        choice = CHOICES[kind]
    if not offered and fields.given("tools"):
        if kind in ("any", "tool"):
            raise only_hosted(SERVICE)
        return {}
    return {"tool_choice": choice, "parallel_tool_calls": parallel}


def _thinking(fields: Fields, reasons: bool) -> dict[str, Any]:
    """Return the fields that switch reasoning on or off, limit it and show it."""
    given = fields.mapping("thinking")
    if given is None:
        return {}
    inner = Fields(given, "thinking")
    inner.require("type")
    kind = inner.choice("type", THINKING)
    display = inner.choice("display", DISPLAYS)
    variables = dict(fields.mapping("chat_template_kwargs") or {})
    meant: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": kind != "disabled"} | variables}
    if display == "omitted":
        meant["include_reasoning"] = False
    if kind == "enabled":
        inner.require("budget_tokens")
        budget = inner.integer("budget_tokens", 1, limits.TOKENS)
        if reasons:
            meant["thinking_token_budget"] = budget
    return meant


def _format(output: Fields) -> dict[str, Any] | None:
    given = output.mapping("format")
    if given is None:
        return None
    inner = Fields(given, "output_config.format")
    inner.require("type")
    inner.choice("type", ("json_schema",))
    inner.require("schema")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": inner.mapping("schema")}}


_NAMES = (
    (re.compile(r"^response_format\b.*"), "output_config.format"),
    (re.compile(r"^reasoning_effort$"), "output_config.effort"),
    (re.compile(r"^thinking_token_budget$"), "thinking.budget_tokens"),
    (re.compile(r"^stop\b"), "stop_sequences"),
    (re.compile(r"^tool_choice\.function\b"), "tool_choice"),
)
_MESSAGE = re.compile(r"^messages\[(\d+)\]")
_TOOL = re.compile(r"^tools\[(\d+)\]")


def here(param: str, request: MessagesRequest) -> str:
    """Return the field of `request` that corresponds to chat's `param`."""
    sources = request.conversation.sources
    if (message := _MESSAGE.match(param)) and int(message[1]) < len(sources):
        return sources[int(message[1])]
    if (tool := _TOOL.match(param)) and int(tool[1]) < len(request.tools):
        rest = re.sub(r"^\.function\b", "", param[tool.end() :])
        return request.tools[int(tool[1])] + re.sub(r"^\.parameters\b", ".input_schema", rest)
    for pattern, name in _NAMES:
        param = pattern.sub(name, param)
    return param
