"""
Rendering of one conversation: the variables of the template, and the prompt that it returns.

To continue the last message, a marker is appended to it, and the prompt is cut at the marker. The prompt then
ends within the message, independent of the text that the template adds after messages.

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

MARK = "THE_MESSAGE_CONTINUES_HERE "
"""The trailing space shows whether the template strips messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateInput:
    """Input of a template."""

    messages: Sequence[Mapping[str, Any]]
    """Messages in the format of `baton_engine.api.chat.messages`."""
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    prompted: bool = True
    """Whether the prompt ends with the start of the assistant's next message."""
    continued: bool = False
    """Whether the prompt ends within the last message."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Further variables of the template."""


def render(source: str, conversation: TemplateInput, specials: Mapping[str, str]) -> str:
    """Render a conversation with the template `source`. Raises TemplateError."""
    program = sandbox.read(source)
    message_format = dialect.learn(program, tuple(sorted(specials.items())))
    messages = message_format.adapt(conversation.messages)
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
        raise TemplateError("the last message cannot be continued, because it has no content")


def _cut(prompt: str) -> str:
    at = prompt.rfind(MARK.strip())
    if at < 0:
        raise TemplateError("the last message cannot be continued, because the prompt does not contain it")
    return prompt[:at] if prompt.startswith(MARK, at) else prompt[:at].rstrip()


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max", "ultra")
SWITCHES = ("enable_thinking", "thinking")
RESERVED = frozenset({
    "messages", "conversation", "tools", "functions", "documents", "template", "chat_template", "loop",
    "self", "tokenize", "tokenizer", "add_generation_prompt", "continue_final_message", "raise_exception",
    "strftime_now", "namespace", "range", "dict", "cycler", "joiner", "lipsum", "caller", "varargs", "kwargs",
})  # fmt: skip
"""Variables that requests cannot set, besides special tokens."""


def read_variables(
    fields: Fields, defaults: Mapping[str, Any], specials: Mapping[str, str]
) -> dict[str, Any]:
    """Merge variables: `defaults`, then those of `reasoning_effort`, then the request's own."""
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
    """Read the request's own template, a field or a variable. Raises InvalidRequest if it is not allowed."""
    inner = Fields(fields.mapping("chat_template_kwargs") or {}, fields.param("chat_template_kwargs"))
    for place in (fields, inner):
        source = place.text("chat_template")
        if source is None:
            continue
        if not trusted:
            raise InvalidRequest(
                f"'{place.param('chat_template')}' is not allowed: templates of requests are disabled. "
                "Start the worker with --trust-request-chat-template if its clients are trusted.",
                param=place.param("chat_template"),
                code=UNSUPPORTED_PARAMETER,
            )
        return source
    return None


def _both(given: Mapping[str, Any]) -> dict[str, Any]:
    """Set both names of the reasoning switch if one of them is set."""
    switches = [name for name in SWITCHES if given.get(name) is not None]
    if len(switches) != 1:
        return dict(given)
    return dict(given) | dict.fromkeys(SWITCHES, given[switches[0]])
