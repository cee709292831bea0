"""How one model chats: its templates, how it marks thoughts, how it writes calls. Settled at the start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton_engine.api.chat.template.templates import Templates, templates_of
from baton_engine.api.parsing.reasoning.formats import ReasoningFormat, format_of
from baton_engine.api.parsing.tools import families
from baton_engine.api.parsing.tools.family import ToolFamily
from baton_engine.api.parsing.tools.toolbox import Toolbox
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.settings import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    templates: Templates
    reasoning: ReasoningFormat | None
    """None if thoughts stay in the text."""
    tools: ToolFamily
    tokens: Mapping[str, int]
    """The tokens that grammars write as ids, by their text."""

    def tells_tools(self, toolbox: Toolbox | None) -> bool:
        """Whether tools have to be told in words, since the template would leave them out without a word."""
        return self.tools is families.GENERIC and not self.templates.knows_tools(toolbox is not None)


def chat_format_of(tokenizer: Tokenizer, settings: WorkerSettings) -> ChatFormat:
    """
    What the settings say, and the chat template where they leave it open.

    Raises SetupError for a template that is none and for parsers that there are not.
    """
    templates = templates_of(tokenizer, settings.chat_template)
    sources = list(templates.by_name.values())
    spoken = next(filter(None, map(families.detect, sources)), "")
    return ChatFormat(
        templates=templates,
        reasoning=format_of(settings.reasoning_parser, sources, tokenizer.response_template),
        tools=families.family(settings.tool_call_parser or spoken),
        tokens=tokenizer.added_tokens,
    )
