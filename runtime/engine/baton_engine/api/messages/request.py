"""
Translation of a request of Anthropic's Messages API to a chat request.

Sampling fields that Anthropic's API lacks pass unchanged. Fields that this server does not support are
rejected. Fields that do not change the answer, such as `cache_control`, are ignored, and so are those that
only shorten the client's context, such as `context_management`. Tools that run at Anthropic are left out,
because agents send them with every request.

A user's message may contain results of tools, which chat has as messages of their own. Consecutive messages
of one role are joined, as in Anthropic's API. Each chat message records the path of its source, so that
errors of chat refer to it.

Agents send back everything that a service answered, and cannot leave parts of it out. Blocks that only their
own service can read are therefore skipped. An image in a tool's result becomes a note, because the agent has
not chosen it; an image of the user is rejected.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_api import limits
from baton_api.errors import EMPTY_ARRAY, UNSUPPORTED_PARAMETER, InvalidRequest
from baton_engine.api.chat.messages import unreadable_note
from baton_engine.api.fields import Fields, shown
from baton_engine.api.parameters import reject_moved, reject_unsupported
from baton_engine.api.parsing.tools.request import log_left_out, only_hosted

ROLES = ("user", "assistant", "system")
UNREADABLE = "the model supports text only"
UNSUPPORTED_BLOCKS = {
    "image": UNREADABLE,
    "document": f"{UNREADABLE}. Send the document's text as a text block",
}
"""Types of blocks that cannot be served, with the reason."""
SKIPPED_BLOCKS = ("redacted_thinking", "container_upload", "fallback", "mcp_tool_listing")
"""Types of blocks without text for this model, besides those of `_skipped`."""
SKIPPED_SUFFIXES = ("_tool_use", "_tool_result")
"""Ends of the types of calls that ran at Anthropic, such as `server_tool_use`, and of their results."""
SKIPPED_CHANGES = ("tool_addition", "tool_removal")
"""Types of blocks that change the tools during a conversation. All tools of a request are offered anyway."""
ATTRIBUTION = "x-anthropic-billing-header:"
"""Start of a system block of Claude Code for Anthropic's accounting. It is no instruction, and differs from
request to request, so that no prefix of the prompt would be cached."""

ChatMessage = dict[str, Any]


@dataclass(slots=True)
class TranslatedMessages:
    """Chat messages, and the path of the source of each."""

    messages: list[ChatMessage] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def add(self, message: ChatMessage, source: str) -> None:
        self.messages.append(message)
        self.sources.append(source)

    def of_role(self, role: str, source: str) -> ChatMessage:
        """Return the last message if it has this role, otherwise a new one."""
        if not self.messages or self.messages[-1]["role"] != role:
            self.add({"role": role, "content": []}, source)
        return self.messages[-1]

    @property
    def continued(self) -> bool:
        """Whether the answer continues the assistant's last message."""
        return bool(self.messages[-1]["role"] == "assistant")


def read_conversation(fields: Fields) -> TranslatedMessages:
    """Translate `system` and `messages`. Raises InvalidRequest."""
    conversation = TranslatedMessages()
    if fields.get("system") is not None:
        _add_system(conversation, fields, "system")
    fields.require("messages")
    if not fields.array("messages", limits.MESSAGES.most):
        raise _empty("messages", "message")
    for message in fields.objects("messages", limits.MESSAGES.most):
        _add(conversation, message)
    if all(message["role"] == "system" for message in conversation.messages):
        fields.wrong_value("messages", "they contain nothing that this model can read")
    last = conversation.messages[-1]
    if last.get("tool_calls"):
        raise InvalidRequest(
            f"Invalid '{conversation.sources[-1]}': the last message calls tools. "
            "Add a user's message with a 'tool_result' for each 'tool_use'.",
            param=conversation.sources[-1],
        )
    return conversation


def _add(conversation: TranslatedMessages, message: Fields) -> None:
    message.require("role")
    role = message.choice("role", ROLES)
    content = message.require("content")
    if role == "system":
        _add_system(conversation, message, "content")
        return
    add = _add_assistant_block if role == "assistant" else _add_user_block
    if isinstance(content, str):
        add(conversation, Fields({"type": "text", "text": content}, message.param("content")))
        return
    blocks = message.array("content", limits.PARTS.most)
    if role == "assistant":
        conversation.of_role("assistant", message.param("content"))  # even without blocks
    elif not blocks:
        raise _empty(message.param("content"), "block")
    for block in message.objects("content", limits.PARTS.most):
        add(conversation, block)


def _add_system(conversation: TranslatedMessages, fields: Fields, name: str) -> None:
    """Add a system message, unless all of its blocks are skipped."""
    content = _texts(fields, name)
    if isinstance(content, str):
        instructions: str | list[dict[str, str]] = "" if content.startswith(ATTRIBUTION) else content
    else:
        instructions = [part for part in content if not part["text"].startswith(ATTRIBUTION)]
    if instructions or not fields.get(name):
        conversation.add({"role": "system", "content": instructions or ""}, fields.param(name))


def _add_user_block(conversation: TranslatedMessages, block: Fields) -> None:
    """Add a block of a user's message."""
    kind, path = block.require("type"), block.path
    if _skipped(kind):
        return
    if kind in TEXT_BLOCKS:
        conversation.of_role("user", path)["content"].append(_text_part(block))
    elif kind == "tool_result":
        result = "" if block.get("content") is None else _texts(block, "content", noted=True)
        call = block.required_text("tool_use_id")
        block.boolean("is_error")
        conversation.add({"role": "tool", "tool_call_id": call, "content": result}, path)
    else:
        raise _unsupported(block, kind)


def _add_assistant_block(conversation: TranslatedMessages, block: Fields) -> None:
    """Add a block of the assistant's message."""
    kind, message = block.require("type"), conversation.of_role("assistant", block.path)
    if _skipped(kind):
        return
    if kind in TEXT_BLOCKS or kind == "compaction":
        message["content"].append(_text_part(block))
    elif kind == "thinking":
        thought = block.required_text("thinking")
        message["reasoning_content"] = "\n".join(filter(None, (message.get("reasoning_content"), thought)))
    elif kind == "tool_use":
        block.require("input")
        function = {"name": block.required_text("name"), "arguments": block.mapping("input")}
        call = {"id": block.required_text("id"), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
    else:
        raise _unsupported(block, kind)


def finished(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with plain text where it is the only content; templates know it best."""
    return [message | {"content": _simplest(message)} for message in messages]


def _simplest(message: ChatMessage) -> Any:
    content = message["content"]
    if isinstance(content, str):
        return content
    if not content:
        return None if message.get("tool_calls") else ""
    return content[0]["text"] if len(content) == 1 else content


def _texts(fields: Fields, name: str, *, noted: bool = False) -> str | list[dict[str, str]]:
    """Read a string, or an array of blocks. With `noted`, a note stands for what the model cannot read."""
    value = fields.require(name)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        fields.wrong_type(name, "a string or an array of text blocks", value)
    parts = []
    for block in fields.objects(name, limits.PARTS.most):
        kind = block.require("type")
        if _skipped(kind):
            continue
        if noted and (kind not in TEXT_BLOCKS or (kind == "document" and not _readable(block))):
            parts.append({"type": "text", "text": unreadable_note(kind)})
        elif kind in TEXT_BLOCKS:
            parts.append(_text_part(block))
        else:
            raise _unsupported(block, kind)
    return parts or ""


TEXT_BLOCKS = ("text", "document", "search_result", "tool_reference")
"""Types of blocks that have text, or whose source may be text."""


def _text_part(block: Fields) -> dict[str, str]:
    match block.get("type"):
        case "document":
            if not _readable(block):
                raise _unsupported(block, "document")
            source = block.member("source")
            text = (
                _texts(source, "content", noted=True)
                if source.get("type") == "content"
                else source.required_text("data")
            )
            lines = [block.text("title"), block.text("context"), *_lines(text)]
        case "search_result":
            lines = [block.text("title"), block.text("source"), *_lines(_texts(block, "content"))]
        case "tool_reference":
            lines = [block.required_text("tool_name")]
        case "compaction":
            lines = [block.text("content")]
        case _:
            return {"type": "text", "text": block.required_text("text")}
    return {"type": "text", "text": "\n".join(filter(None, lines))}


def _lines(content: str | list[dict[str, str]]) -> list[str]:
    return [content] if isinstance(content, str) else [part["text"] for part in content]


def _readable(document: Fields) -> bool:
    """Return whether the source of a document is text."""
    return (document.mapping("source") or {}).get("type") in ("text", "content")


def _skipped(kind: object) -> bool:
    """Return whether a block of this type is skipped, because it has nothing for this model."""
    return isinstance(kind, str) and (
        kind in SKIPPED_BLOCKS or kind in SKIPPED_CHANGES or kind.endswith(SKIPPED_SUFFIXES)
    )


def _unsupported(block: Fields, kind: object) -> InvalidRequest:
    reason = UNSUPPORTED_BLOCKS.get(kind, "") if isinstance(kind, str) else ""
    param = block.param("type")
    return InvalidRequest(
        f"Unsupported '{param}': blocks of type {shown(kind)} are not served here"
        + (f", because {reason}." if reason else "."),
        param=param,
        code=UNSUPPORTED_PARAMETER,
    )


def _empty(param: str, item: str) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid '{param}': empty array. Expected at least 1 {item}.", param=param, code=EMPTY_ARRAY
    )


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
    reject_unsupported(fields, UNSUPPORTED)
    reject_moved(fields, MOVED)
    fields.mapping("metadata")
    conversation = read_conversation(fields)
    output = fields.member("output_config")
    tools = _tools(fields)
    options = {name: fields.get(name) for name in PASSED} | {
        "messages": finished(conversation.messages),
        "continue_final_message": True if conversation.continued else None,
        "stop": fields.array("stop_sequences", limits.STOPS.most),
        "tools": list(tools.values()) or None,
        "reasoning_effort": output.get("effort"),
        "response_format": _format(output),
    }
    options |= _choice(fields, offered=bool(tools)) | _thinking(fields, reasons)
    return MessagesRequest(
        conversation=conversation,
        chat={name: value for name, value in options.items() if value is not None},
        tools=list(tools),
        edits=fields.get("context_management") is not None,
    )


SERVICE = "Anthropic"
HOSTED = ("web_search_", "web_fetch_", "code_execution_", "tool_search_tool_", "advisor_", "mcp_toolset")
"""Starts of the types of tools that run at Anthropic. Its other types are for the client to run, but only a
model that was trained for them knows their parameters."""


def _tools(fields: Fields) -> dict[str, dict[str, Any]]:
    """Return the tools that the client runs, by the paths of their sources."""
    tools: dict[str, dict[str, Any]] = {}
    for tool in fields.objects("tools", limits.TOOLS.most):
        kind = tool.text("type") or "custom"
        if kind.startswith(HOSTED):
            log_left_out(kind, SERVICE)
        else:
            tools[tool.path] = _tool(tool, kind)
    return tools


def _tool(fields: Fields, kind: str) -> dict[str, Any]:
    if kind != "custom":
        raise InvalidRequest(
            f"Unsupported '{fields.param('type')}': the parameters of {shown(kind)} tools are defined at "
            "Anthropic. Define a tool with 'name', 'description' and 'input_schema'.",
            param=fields.param("type"),
            code=UNSUPPORTED_PARAMETER,
        )
    for name in ("name", "input_schema"):
        fields.require(name)
    function = {"name": fields.get("name"), "parameters": fields.mapping("input_schema")}
    more = {name: fields.get(name) for name in ("description", "strict") if fields.get(name) is not None}
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
    options: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": kind != "disabled"} | variables}
    if display == "omitted":
        options["include_reasoning"] = False
    if kind == "enabled":
        inner.require("budget_tokens")
        budget = inner.integer("budget_tokens", 1, limits.TOKENS)
        if reasons:
            options["thinking_token_budget"] = budget
    return options


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
