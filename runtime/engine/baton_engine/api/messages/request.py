"""
Translation of a request of Anthropic's Messages API to a chat request.

Sampling fields that Anthropic's API lacks pass unchanged. A field of Anthropic's whose effect this server
cannot give is rejected. Fields without an effect on the answer, such as `cache_control`, are ignored.
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

UNSUPPORTED = ("container", "context_management", "mcp_servers")
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
THINKING = ("enabled", "adaptive", "disabled")
DISPLAYS = ("summarized", "omitted")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagesRequest:
    """A translated request."""

    conversation: TranslatedMessages
    chat: dict[str, Any]
    """The chat request, without a limit of its answer."""


def read(fields: Fields) -> MessagesRequest:
    """Translate all but `max_tokens`. Raises InvalidRequest."""
    _reject_fields(fields)
    talk = conversation.read(fields)
    output = Fields(fields.mapping("output_config") or {}, "output_config")
    options = {name: fields.get(name) for name in PASSED} | {
        "messages": conversation.finished(talk.messages),
        "continue_final_message": True if talk.continued else None,
        "stop": fields.array("stop_sequences", limits.STOPS.most),
        "tools": _tools(fields),
        "reasoning_effort": output.get("effort"),
        "response_format": _format(output),
    }
    options |= _choice(fields) | _thinking(fields)
    return MessagesRequest(
        conversation=talk, chat={name: value for name, value in options.items() if value is not None}
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


def _tools(fields: Fields) -> list[dict[str, Any]] | None:
    tools = fields.array("tools", limits.TOOLS.most)
    return [_tool(tool, f"tools[{position}]") for position, tool in enumerate(tools)] if tools else None


def _tool(tool: object, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong_type(path, "an object", tool)
    fields = Fields(tool, path)
    kind = fields.text("type") or "custom"
    if kind != "custom":
        raise InvalidRequest(
            f"Unsupported '{path}.type': tools of type {shown(kind)} run at Anthropic or are defined there. "
            "Define a tool with 'name', 'description' and 'input_schema'.",
            param=f"{path}.type",
            code=UNSUPPORTED_PARAMETER,
        )
    for name in ("name", "input_schema"):
        fields.require(name)
    function = {"name": tool["name"], "parameters": fields.mapping("input_schema")}
    more = {name: tool[name] for name in ("description", "strict") if tool.get(name) is not None}
    return {"type": "function", "function": function | more}


def _choice(fields: Fields) -> dict[str, Any]:
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
    return {"tool_choice": choice, "parallel_tool_calls": parallel}


def _thinking(fields: Fields) -> dict[str, Any]:
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
        meant["thinking_token_budget"] = inner.integer("budget_tokens", 1, limits.TOKENS)
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
    (re.compile(r"^(tools\[\d+\])\.function\.parameters\b"), r"\1.input_schema"),
    (re.compile(r"^(tools\[\d+\])\.function\b"), r"\1"),
    (re.compile(r"^tool_choice\.function\b"), "tool_choice"),
)
_MESSAGE = re.compile(r"^messages\[(\d+)\]")


def here(param: str, sources: Sequence[str]) -> str:
    """Return the field that corresponds to chat's `param`. `sources[i]` is the path of chat message i."""
    if (message := _MESSAGE.match(param)) and int(message[1]) < len(sources):
        return sources[int(message[1])]
    for pattern, name in _NAMES:
        param = pattern.sub(name, param)
    return param
