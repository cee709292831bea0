"""
A request for a response as a request for chat.

What is called the same and means the same passes as it is, extensions included; what is called otherwise
is renamed; what chat has and responses lack is refused with the name to use instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from baton_api import limits
from baton_api.errors import UNSUPPORTED_PARAMETER, InvalidRequest
from baton_engine.server.fields import Fields, shown, wrong_type
from baton_engine.server.parameters import not_served
from baton_engine.server.responses import conversation, tools
from baton_engine.server.responses.conversation import Conversation

LOGPROBS = "message.output_text.logprobs"
INCLUDABLE = (
    LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "code_interpreter_call.outputs", "message.input_image.image_url",
    "computer_call_output.output.image_url",
)  # fmt: skip
"""All but the first ask for what there is not: of tools that are not served, and of thoughts in cipher."""

NOT_SERVED = ("background", "conversation", "prompt", "context_management", "moderation")
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
"""Fields of chat, and what they are here."""

OWN = frozenset({
    *NOT_SERVED, *MOVED, "input", "instructions", "previous_response_id", "max_output_tokens", "text",
    "reasoning", "include", "tools", "tool_choice", "truncation", "max_tool_calls", "store", "top_logprobs",
    "n",
})  # fmt: skip
"""Fields that chat is not to see as they are."""

FORMATS = ("text", "json_object", "json_schema", "structural_tag")
SUMMARIES = ("auto", "concise", "detailed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request, read."""

    conversation: Conversation
    options: dict[str, Any]
    """The fields of chat, but for the messages."""
    echo: dict[str, Any]
    """What the response object repeats."""
    custom: frozenset[str]
    """Names of the tools that take text and not arguments."""
    logprobs: bool
    truncate: bool


def read(fields: Fields, items: Sequence[object], earlier: int) -> Asked:
    """`items` are the whole conversation, the first `earlier` of them from earlier responses."""
    _refuse(fields)
    include = _include(fields)
    top_logprobs = fields.integer("top_logprobs", *limits.TOP_LOGPROBS.range)
    fields.integer("max_tool_calls", *limits.MAX_TOOL_CALLS.range)
    fields.integer("n", 1, 1)
    instructions = fields.text("instructions")
    text = Fields(fields.mapping("text") or {}, "text")
    reasoning = Fields(fields.mapping("reasoning") or {}, "reasoning")
    reasoning.choice("summary", SUMMARIES)
    choice = tools.read_choice(fields)
    offered = tools.read_tools(fields)
    options = {name: fields.get(name) for name in fields if name not in OWN} | {
        "max_completion_tokens": fields.get("max_output_tokens"),
        "verbosity": text.get("verbosity"),
        "reasoning_effort": reasoning.get("effort"),
        "response_format": _format(text),
        "tools": [tools.for_chat(tool) for tool in offered] or None,
        "tool_choice": tools.choice_for_chat(choice),
        "logprobs": True if LOGPROBS in include else None,
        "top_logprobs": top_logprobs if LOGPROBS in include else None,
    }
    return Asked(
        conversation=conversation.read(items, earlier, instructions),
        options={name: value for name, value in options.items() if value is not None},
        echo={
            "instructions": instructions,
            "max_output_tokens": fields.get("max_output_tokens"),
            "max_tool_calls": fields.get("max_tool_calls"),
            "metadata": fields.get("metadata") or {},
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
            "tool_choice": choice,
            "tools": offered,
            "top_logprobs": top_logprobs or 0,
            "truncation": fields.choice("truncation", ("auto", "disabled")) or "disabled",
            "user": fields.get("user"),
        },
        custom=frozenset(tool["name"] for tool in offered if tool["type"] == "custom"),
        logprobs=LOGPROBS in include,
        truncate=fields.get("truncation") == "auto",
    )


def _refuse(fields: Fields) -> None:
    for name in NOT_SERVED:
        if fields.given(name):
            raise not_served(name)
    for name, here in MOVED.items():
        if fields.get(name) is not None:
            raise InvalidRequest(
                f"Unsupported parameter: '{name}'. Responses have {here!r} in its place.",
                param=name,
                code=UNSUPPORTED_PARAMETER,
            )


def _include(fields: Fields) -> frozenset[str]:
    wanted = fields.array("include", len(INCLUDABLE)) or ()
    for position, name in enumerate(wanted):
        param = f"include[{position}]"
        if not isinstance(name, str):
            raise wrong_type(param, "a string", name)
        if name not in INCLUDABLE:
            Fields({param: name}).wrong_value(param, f"there is no {shown(name)} to include")
    return frozenset(wanted)


def _format(text: Fields) -> dict[str, Any] | None:
    """Chat has the particulars of a schema one level deeper."""
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
