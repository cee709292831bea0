"""
One conversation as one prompt: the variables that a template gets, and the text that it returns.

To continue the last message, a marker is put at its end and the prompt is cut there, so the prompt ends
inside the message whatever the template writes after one.

`chat_template_kwargs` are passed on, except names with a meaning of their own. `reasoning_effort` becomes the
variables that templates know: the effort, and whether to reason at all (`enable_thinking` or `thinking`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_api import limits
from baton_api.errors import UNSUPPORTED_PARAMETER, InvalidRequest
from baton_engine.api.chat.template import dialect, sandbox
from baton_engine.api.chat.template.sandbox import TemplateError
from baton_engine.api.fields import Fields, shown

MARK = "THE_MESSAGE_GOES_ON_HERE "
"""With a space at its end, by which a template that strips messages is noticed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInput:
    """All that a template gets."""

    messages: Sequence[Mapping[str, Any]]
    """As `baton_engine.api.chat.messages` gives them."""
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    prompted: bool = True
    """Whether the prompt ends with the beginning of the assistant's next message."""
    continued: bool = False
    """Whether it ends within the last message."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further ones, which have no names of those above."""


def render(source: str, conversation: TemplateInput, specials: Mapping[str, str]) -> str:
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


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
SWITCHES = ("enable_thinking", "thinking")
RESERVED = frozenset({
    "messages", "conversation", "tools", "functions", "documents", "template", "chat_template", "loop",
    "self", "tokenize", "tokenizer", "add_generation_prompt", "continue_final_message", "raise_exception",
    "strftime_now", "namespace", "range", "dict", "cycler", "joiner", "lipsum", "caller", "varargs", "kwargs",
})  # fmt: skip
"""What a template gets from this server alone, special tokens aside."""


def read_variables(
    fields: Fields, defaults: Mapping[str, Any], specials: Mapping[str, str]
) -> dict[str, Any]:
    """`defaults`, over them what the effort means, and over that what the request says itself."""
    given = dict(fields.mapping("chat_template_kwargs") or {})
    given.pop("chat_template", None)  # see `read_template`
    most = limits.TEMPLATE_KWARGS.most
    if len(given) > most:
        fields.wrong_value("chat_template_kwargs", f"Expected at most {most}, but got {len(given)}")
    for name in given:
        if name in RESERVED or name in specials or not name.isidentifier() or name.startswith("_"):
            fields.wrong_value("chat_template_kwargs", f"{shown(name)} cannot be set by a request")
    effort = fields.choice("reasoning_effort", EFFORTS)
    meant: dict[str, Any] = {}
    if effort is not None:
        meant = {"reasoning_effort": "max" if effort == "ultra" else effort}
        meant |= dict.fromkeys(SWITCHES, effort != "none")
    return _both(defaults) | meant | _both(given)


def read_template(fields: Fields, trusted: bool) -> str | None:
    """The template that the request brings, by itself or among the variables. Raises InvalidRequest."""
    inner = Fields(fields.mapping("chat_template_kwargs") or {}, fields.param("chat_template_kwargs"))
    for place in (fields, inner):
        source = place.text("chat_template")
        if source is None:
            continue
        if not trusted:
            raise InvalidRequest(
                f"'{place.param('chat_template')}' is not allowed: this server runs no such templates. "
                "Start it with --trust-request-chat-template if those who send requests may be trusted.",
                param=place.param("chat_template"),
                code=UNSUPPORTED_PARAMETER,
            )
        return source
    return None


def _both(given: Mapping[str, Any]) -> dict[str, Any]:
    """With both names of the switch, where it has one."""
    switches = [name for name in SWITCHES if given.get(name) is not None]
    if len(switches) != 1:
        return dict(given)
    return dict(given) | dict.fromkeys(SWITCHES, given[switches[0]])
