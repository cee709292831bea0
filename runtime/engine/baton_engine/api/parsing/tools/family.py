"""One way in which models write calls: how it is read, and how it is forced."""

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
    """Of a call, unlike any other."""
    return f"call_{secrets.token_hex(12)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFamily:
    """What is known of one wire format. Immutable; its readers belong to one choice each."""

    name: str
    keeps: frozenset[str]
    """Texts of special tokens that a reader must see."""
    read: Callable[[TextSource], Reading]
    layout: Layout

    def reader(self, toolbox: Toolbox | None, ids: Callable[[], str] = fresh_id) -> Reader:
        """For one choice; text that calls nothing of `toolbox` stays words."""
        if toolbox is None or not toolbox.callable:
            return PlainReader()
        return CallReader(self.read, toolbox, ids)

    def constraint(
        self, toolbox: Toolbox | None, tokens: Mapping[str, int], answer: Constraint | None = None
    ) -> Constraint | None:
        """
        What the text of an answer must be for its calls to be allowed ones; None if it may be anything.

        `tokens` are those that grammars write as ids, by their text. `answer` is what else the request wants:
        a JSON schema is the form of an answer that calls nothing, whatever else is that of the whole text, in
        which calls are where it has them. Raises InvalidRequest for a schema that this format cannot force.
        """
        if toolbox is None or not toolbox.callable:
            return answer
        if answer is not None and answer.kind != "json_schema":
            return answer
        if answer is None and not toolbox.constrained:
            return None
        schema = None if answer is None else answer.source
        return Constraint("lark", grammar.grammar(self.layout, toolbox, tokens, schema))
