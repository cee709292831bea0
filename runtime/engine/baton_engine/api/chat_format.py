"""Chat format of a model: its templates, and its formats of reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton_engine.api.parsing.reasoning.formats import ReasoningFormat, format_of
from baton_engine.api.parsing.tools import families
from baton_engine.api.parsing.tools.family import ToolFamily
from baton_engine.api.parsing.tools.toolbox import Toolbox
from baton_engine.api.template.templates import Templates, templates_of
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.settings import WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatFormat:
    templates: Templates
    reasoning: ReasoningFormat | None
    """None if reasoning stays in the text."""
    tools: ToolFamily
    tokens: Mapping[str, int]
    """Ids of the tokens that grammars match as one, by their text."""

    def describes_tools(self, toolbox: Toolbox | None) -> bool:
        """Return whether messages must describe the tools, because the template would ignore them."""
        return self.tools is families.GENERIC and not self.templates.knows_tools(toolbox is not None)


def chat_format_of(tokenizer: Tokenizer, settings: WorkerSettings) -> ChatFormat:
    """
    Determine the chat format from the settings and, where they are empty, from the chat template.

    Raises SetupError for an invalid template or an unknown parser.
    """
    templates = templates_of(tokenizer, settings.chat_template)
    sources = list(templates.by_name.values())
    detected = next(filter(None, map(families.detect, sources)), "")
    return ChatFormat(
        templates=templates,
        reasoning=format_of(settings.reasoning_parser, sources, tokenizer.response_template),
        tools=families.family(settings.tool_call_parser or detected),
        tokens=tokenizer.added_tokens,
    )
