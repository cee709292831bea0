"""
One conversation as one prompt: what the server gives to a template, and what it takes back.

Where the last message is to be continued, a mark is put at its end and the prompt is cut there: so the
prompt ends in the middle of the message, whatever the template writes after one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_engine.server.template import dialect, sandbox
from baton_engine.server.template.sandbox import TemplateError

MARK = "THE_MESSAGE_GOES_ON_HERE "
"""With a space at its end, by which a template that strips messages is noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """All that a template gets."""

    messages: Sequence[Mapping[str, Any]]
    """As `baton_engine.server.messages` gives them."""
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    prompted: bool = True
    """Whether the prompt ends with the beginning of the assistant's next message."""
    continued: bool = False
    """Whether it ends within the last message."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further ones, which have no names of those above."""


def render(source: str, conversation: Conversation, specials: Mapping[str, str]) -> str:
    """The prompt that the template `source` makes. Raises TemplateError."""
    program = sandbox.read(source)
    learnt = dialect.learn(program, tuple(sorted(specials.items())))
    messages = learnt.adapt(conversation.messages)
    if conversation.continued:
        _mark(messages[-1])
    prompt = program.run(
        {
            **specials,
            **conversation.variables,
            "messages": messages,
            "tools": conversation.tools,
            "documents": conversation.documents,
            "add_generation_prompt": conversation.prompted,
        }
    )
    return _cut(prompt) if conversation.continued else prompt


def _mark(message: dict[str, Any]) -> None:
    content = message.get("content")
    if isinstance(content, list) and content:
        content[-1] = content[-1] | {"text": content[-1]["text"] + MARK}
    elif isinstance(content, str):
        message["content"] = content + MARK
    else:
        raise TemplateError("the last message has no content that could be continued")


def _cut(prompt: str) -> str:
    at = prompt.rfind(MARK.strip())
    if at < 0:
        raise TemplateError("the last message is not in the prompt and cannot be continued")
    return prompt[:at] if prompt.startswith(MARK, at) else prompt[:at].rstrip()
