"""
Selection of the chat template: the setting `--chat-template`, the model's templates, or the request's.

A model may have a separate template for conversations with tools. Requests may contain a template only with
`--trust-request-chat-template`; it runs in a separate process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from baton_api.errors import InvalidRequest, SetupError
from baton_engine.api.template import sandbox
from baton_engine.api.template.rendering import TemplateInput, render, render_apart
from baton_engine.api.template.sandbox import TemplateError
from baton_engine.model.tokenizer import Tokenizer

DEFAULT = "default"
FOR_TOOLS = "tool_use"
"""Name of a model's template for conversations with tools, as in `transformers`."""

LONGEST_PATH = 4096
"""Maximum characters of a path in `--chat-template`. Longer values are templates."""


@dataclass(frozen=True, slots=True)
class Templates:
    """The templates of one worker; empty for a model without chat template."""

    by_name: Mapping[str, str]
    specials: Mapping[str, str]
    """The tokenizer's special tokens for templates, such as `bos_token`."""

    @property
    def default(self) -> str | None:
        """The template for conversations without tools, or None."""
        return self.by_name.get(DEFAULT)

    def source(self, tools: bool) -> str:
        """Return the template for a conversation. Raises InvalidRequest if the model has no template."""
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
        """Return whether the template uses the variable `tools`. True for an invalid template."""
        try:
            return "tools" in sandbox.read(self.source(tools)).variables
        except TemplateError:
            return True

    def render(self, conversation: TemplateInput, own_template: str | None = None) -> str:
        """Render the prompt, with the request's template if `own_template` is set. Raises InvalidRequest."""
        try:
            if own_template is not None:
                return render_apart(own_template, conversation, self.specials)
            return render(self.source(bool(conversation.tools)), conversation, self.specials)
        except TemplateError as error:
            raise InvalidRequest(
                f"The chat template cannot render these messages: {error}.",
                param="messages" if own_template is None else "chat_template",
            ) from error


def templates_of(tokenizer: Tokenizer, chosen: str = "") -> Templates:
    """
    Return the model's templates, or `chosen`: a template, or the path of a file with one.

    Raises SetupError if `chosen` is invalid. An invalid template of the model fails when it is used.
    """
    if not chosen:
        return Templates(tokenizer.chat_templates, tokenizer.special_tokens)
    source = _source(chosen)
    try:
        sandbox.read(source)
    except TemplateError as error:
        raise SetupError(f"Invalid --chat-template: {error}.") from error
    return Templates({DEFAULT: source}, tokenizer.special_tokens)


def _source(chosen: str) -> str:
    """Return the text of a template. Text with braces or several lines is a template, other text a path."""
    if "{" in chosen or "\n" in chosen or len(chosen) > LONGEST_PATH:
        return chosen
    path = Path(chosen).expanduser()
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(
            f"Invalid --chat-template: {chosen!r} is neither a template with {{{{ and }}}} nor a readable "
            f"file: {error}"
        ) from error
