"""A format of tool calls: its reader, and the grammar that forces calls."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from baton_api.sampling import Constraint
from baton_engine.api.parsing.parts import PlainReader, Reader
from baton_engine.api.parsing.tools import grammar
from baton_engine.api.parsing.tools.grammar import Layout
from baton_engine.api.parsing.tools.source import CallReader, Reading, TextSource
from baton_engine.api.parsing.tools.toolbox import Toolbox


def fresh_id() -> str:
    """Return a new unique call id."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFamily:
    """One format of tool calls. Immutable. Each reader serves one choice."""

    name: str
    keeps: frozenset[str]
    """Special tokens that the reader needs in the text."""
    read: Callable[[TextSource], Reading]
    layout: Layout

    def reader(self, toolbox: Toolbox | None, ids: Callable[[], str] = fresh_id) -> Reader:
        """Return the reader of one choice. Calls of tools outside `toolbox` stay text."""
        if toolbox is None or not toolbox.callable:
            return PlainReader()
        return CallReader(self.read, toolbox, ids)

    def constraint(
        self, toolbox: Toolbox | None, tokens: Mapping[str, int], answer: Constraint | None = None
    ) -> Constraint | None:
        """
        Return the constraint that admits only allowed calls, or None if the text is unconstrained.

        `tokens` maps the text of special tokens to ids in grammars. `answer` is the constraint of the
        request. A JSON schema applies to answers without calls; any other constraint applies to the whole
        text. Raises InvalidRequest for a schema that this format cannot enforce.
        """
        if toolbox is None or not toolbox.callable:
            return answer
        if answer is not None and answer.kind != "json_schema":
            return answer
        if answer is None and not toolbox.constrained:
            return None
        schema = None if answer is None else answer.source
        return Constraint("tools", grammar.grammar(self.layout, toolbox, tokens, schema))
