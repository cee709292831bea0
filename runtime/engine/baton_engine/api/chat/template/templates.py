"""
Which template a conversation gets: the worker's own, the one that the model has for tools, or the
request's.

A worker's own template comes from whoever started it: with `--chat-template`, otherwise with the model. A
request brings one only where `--trust-request-chat-template` says so, and it runs in a process of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton_api.errors import InvalidRequest, SetupError
from baton_engine.api.chat.template import sandbox
from baton_engine.api.chat.template.prompt import TemplateInput, render
from baton_engine.api.chat.template.sandbox import TemplateError
from baton_engine.api.chat.template.subprocess import render_apart
from baton_engine.model.tokenizer import Tokenizer

DEFAULT = "default"
FOR_TOOLS = "tool_use"
"""What `transformers` calls a model's template for conversations with tools, where it has several."""

LONGEST_PATH = 4096
"""Characters up to which `--chat-template` may be the path of a file."""


@dataclass(frozen=True, slots=True)
class Templates:
    """The templates of one worker; none at all for a model that was not made to chat."""

    by_name: Mapping[str, str]
    specials: Mapping[str, str]
    """The tokenizer's special tokens, which templates write: `bos_token` and its like."""

    @property
    def default(self) -> str | None:
        """The one for conversations without tools, or None."""
        return self.by_name.get(DEFAULT)

    def source(self, tools: bool) -> str:
        """The template for a conversation with or without tools. Raises InvalidRequest if there is none."""
        chosen = self.by_name.get(FOR_TOOLS) if tools else None
        if chosen is None:
            chosen = self.default
        if chosen is None:
            raise InvalidRequest(
                "This model has no chat template. Use /v1/completions, or start the worker with "
                "--chat-template.",
                param="messages",
            )
        return chosen

    def knows_tools(self, tools: bool) -> bool:
        """Whether the template for a conversation with or without tools writes them; one that fails may."""
        try:
            return "tools" in sandbox.read(self.source(tools)).variables
        except TemplateError:
            return True

    def render(self, conversation: TemplateInput, brought: str | None = None) -> str:
        """The prompt, by the template that the request brought, if it did. Raises InvalidRequest."""
        try:
            if brought is not None:
                return render_apart(brought, conversation, self.specials)
            return render(self.source(bool(conversation.tools)), conversation, self.specials)
        except TemplateError as error:
            raise InvalidRequest(
                f"The chat template cannot render these messages: {error}.",
                param="messages" if brought is None else "chat_template",
            ) from error


def templates_of(tokenizer: Tokenizer, chosen: str = "") -> Templates:
    """
    The model's own templates, or `chosen`: a template, or the path of a file with one.

    Raises SetupError if that is neither; a template of the model that is none fails when it is used.
    """
    if not chosen:
        return Templates(tokenizer.chat_templates, tokenizer.special_tokens)
    source = _source(chosen)
    try:
        sandbox.read(source)
    except TemplateError as error:
        raise SetupError(f"--chat-template is no template: {error}.") from error
    return Templates({DEFAULT: source}, tokenizer.special_tokens)


def _source(chosen: str) -> str:
    """Whatever has braces or lines is a template, not a path."""
    if "{" in chosen or "\n" in chosen or len(chosen) > LONGEST_PATH:
        return chosen
    path = Path(chosen).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(
            f"--chat-template {chosen!r} is neither a template, which has {{{{ and }}}} in it, nor a file "
            f"that can be read: {error}"
        ) from error
