"""The prompt of a chat request: messages and tools, rendered by the chat template and tokenized."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from baton_api import limits, response_items
from baton_api.errors import EMPTY_ARRAY, InvalidRequest
from baton_engine.api.chat import input_items
from baton_engine.api.chat.messages import Message, read_messages
from baton_engine.api.fields import Fields, renamed_fields
from baton_engine.api.parsing.tools.objects import END, START
from baton_engine.api.parsing.tools.request import read_tools
from baton_engine.api.parsing.tools.toolbox import Toolbox
from baton_engine.api.prompts import check_text, read_ids
from baton_engine.api.served import Served
from baton_engine.api.template.rendering import TemplateInput, read_template, read_variables
from baton_engine.model.tokenizer import BREAK, Tokenizer

IDS = ("input_ids", "prompt_token_ids")
"""Fields with a prompt of token ids, which replaces messages."""

TAIL = 256
"""Number of tokens at the end of such a prompt that are decoded to detect open reasoning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    tokens: tuple[int, ...]
    text: str
    """The rendered prompt; for token ids, its end."""
    toolbox: Toolbox | None
    last: str | None
    """Text of the last message, if it is the assistant's."""
    continued: bool
    """Whether the answer continues the last message."""
    param: str
    """The field with the prompt, for errors."""


def read_prompt(fields: Fields, served: Served, *, any_length: bool = False) -> ChatPrompt:
    """
    Validate, render and tokenize. Blocks for long conversations, so do not call it on the event loop.

    Raises ContextTooLong, without `any_length`, for a text that cannot fit the context.
    """
    toolbox = read_tools(fields)
    name = next((name for name in IDS if fields.get(name) is not None), None)
    if name is not None:
        return _of_ids(fields, name, toolbox, served)
    templates, settings = served.chat.templates, served.settings
    own_template = read_template(fields, settings.trust_request_chat_template)
    if own_template is None:
        templates.source(toolbox is not None)  # a missing template is reported before invalid messages
    messages = _messages(fields)
    last = _last(messages)
    continued = _continued(fields, last)
    tools = None if toolbox is None else toolbox.definitions
    documents = _documents(fields)
    encode: Callable[[str], list[int]] = partial(served.tokenizer.encode, add_special_tokens=False)
    if settings.plain_message_texts:
        messages = [_plain_message(message, served.tokenizer) for message in messages]
        documents, encode = _broken(documents, served.tokenizer.broken), served.tokenizer.encode_plain
    if own_template is None and _has_tools(messages, toolbox) and served.chat.describes_tools(toolbox):
        messages, tools = describe_tools(messages, toolbox), None
    template_input = TemplateInput(
        messages=messages,
        tools=tools,
        documents=documents,
        prompted=fields.boolean("add_generation_prompt", not continued),
        continued=continued,
        variables=read_variables(fields, settings.default_chat_template_kwargs, templates.specials),
    )
    text = templates.render(template_input, own_template)
    if not any_length:
        check_text(served, "messages", text)
    return ChatPrompt(
        tokens=tuple(encode(text)),
        text=text.replace(BREAK, ""),
        toolbox=toolbox,
        last=last,
        continued=continued,
        param="messages",
    )


NAMES = ("role", "type", "id", "tool_call_id")
"""Members of messages and calls that are no texts."""


def _plain_message(message: Message, tokenizer: Tokenizer) -> Message:
    """Break the control tokens in a message. Templates look for marks of reasoning in the assistant's."""
    broken = partial(tokenizer.broken, special_only=message["role"] == "assistant")
    plain: Message = _broken(message, broken)
    return plain


def _broken(value: Any, broken: Callable[[str], str]) -> Any:
    match value:
        case str():
            return broken(value)
        case dict():
            return {
                name: member if name in NAMES else _broken(member, broken) for name, member in value.items()
            }
        case list() | tuple():
            return [_broken(member, broken) for member in value]
        case _:
            return value


def _messages(fields: Fields) -> list[Message]:
    """Read the messages. For some models, Cursor sends them as `input`, as on `/v1/responses`."""
    items = fields.get("input")
    if fields.get("messages") is not None or not isinstance(items, str | list):
        return read_messages(fields)
    conversation = input_items.read(response_items.listed(items), 0, fields.text("instructions"))
    with renamed_fields(lambda param: input_items.source(param, conversation) or param):
        return read_messages(Fields({"messages": conversation.messages}))


def _of_ids(fields: Fields, name: str, toolbox: Toolbox | None, served: Served) -> ChatPrompt:
    ids = fields.array(name, limits.TOKENS) or []
    tokens = read_ids(ids, served.tokenizer, fields.param(name))
    if not tokens:
        raise InvalidRequest(
            f"Invalid '{name}': empty array. Expected at least 1 token.", param=name, code=EMPTY_ARRAY
        )
    text = served.tokenizer.decode(tokens[-TAIL:], skip_special_tokens=False)
    return ChatPrompt(tokens=tokens, text=text, toolbox=toolbox, last=None, continued=False, param=name)


def _has_tools(messages: Sequence[Message], toolbox: Toolbox | None) -> bool:
    return toolbox is not None or any(
        message["role"] == "tool" or message.get("tool_calls") for message in messages
    )


def _last(messages: Sequence[Message]) -> str | None:
    """Return the text of the last message if it is the assistant's, otherwise None."""
    if messages[-1]["role"] != "assistant":
        return None
    content: str | list[str] | None = messages[-1]["content"]
    return "\n".join(content) if isinstance(content, list) else content or ""


def _continued(fields: Fields, last: str | None) -> bool:
    continued = fields.boolean("continue_final_message")
    if not continued:
        return False
    if fields.boolean("add_generation_prompt"):
        raise InvalidRequest(
            "'continue_final_message' and 'add_generation_prompt' cannot be combined. Remove one of them.",
            param="continue_final_message",
        )
    if last is None:
        fields.wrong_value("continue_final_message", "the last message is not the assistant's")
    return True


def _documents(fields: Fields) -> list[dict[str, Any]] | None:
    for _ in fields.objects("documents", limits.DOCUMENTS.most):
        pass  # objects with any members
    return fields.array("documents", limits.DOCUMENTS.most)


RESULT, RESULT_END = "<tool_response>", "</tool_response>"


def describe_tools(messages: Sequence[Mapping[str, Any]], toolbox: Toolbox | None) -> list[dict[str, Any]]:
    """
    Rewrite tools, calls and results as text in messages, for templates that do not support tools.

    A system message describes the tools, and user messages contain the results.
    """
    rewritten: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"{RESULT}\n{_text(message.get('content'))}\n{RESULT_END}"
            if rewritten and rewritten[-1].get("results"):
                rewritten[-1]["content"] += f"\n{result}"
            else:
                rewritten.append({"role": "user", "content": result, "results": True})
        elif message.get("tool_calls"):
            text_part = _text(message.get("content"))
            calls = [_call(call["function"]) for call in message["tool_calls"]]
            others = {key: value for key, value in message.items() if key != "tool_calls"}
            rewritten.append(others | {"content": "\n".join([*([text_part] if text_part else []), *calls])})
        elif message["role"] == "user" and rewritten and rewritten[-1].get("results"):
            results = rewritten.pop()["content"]  # many templates require alternating roles
            rewritten.append(dict(message) | {"content": f"{results}\n{_text(message['content'])}"})
        else:
            rewritten.append(dict(message))
    for message in rewritten:
        message.pop("results", None)
    if toolbox is None or not toolbox.callable:
        return rewritten
    instructions = _instructions(toolbox)
    if rewritten and rewritten[0]["role"] in ("system", "developer"):
        return [
            rewritten[0] | {"content": f"{_text(rewritten[0]['content'])}\n\n{instructions}"},
            *rewritten[1:],
        ]
    return [{"role": "system", "content": instructions}, *rewritten]


def _instructions(toolbox: Toolbox) -> str:
    example = _call({"name": "the name of the tool", "arguments": {"parameter": "value"}})
    definitions = [tool.definition["function"] for tool in toolbox.callable.values()]
    tools = [json.dumps(definition, ensure_ascii=False) for definition in definitions]
    introduction = "To answer, call" if toolbox.forced else "If it helps to answer, call"
    amount = "one of these tools, or several of them" if toolbox.parallel else "one of these tools"
    return "\n".join([f"{introduction} {amount}:", *tools, "A call is written like this:", example])


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{START}\n{json.dumps(call, ensure_ascii=False)}\n{END}"


def _text(content: str | Sequence[str] | None) -> str:
    return content if isinstance(content, str) else "\n".join(content or ())
