"""How calls stand in a text, for the grammar that forces them: marks, separators, and one call's own form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from baton_engine.server.tools.toolbox import Tool

if TYPE_CHECKING:
    from baton_engine.server.tools.lark import Lark


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A text has blocks of calls; what leaves no choice is as the family's own template writes it."""

    triggers: tuple[str, ...] = ()
    """What a reader takes for a beginning: none of it may stand in free text. The first begins `opening`."""
    bare: str = ""
    """Characters with which an answer that calls nothing may not begin: calls do, without a trigger."""
    opening: str
    call: Callable[[Lark, Tool, bool], str]
    """One call as an expression of the grammar; whether its arguments must fit the tool's schema."""
    separator: str | None = None
    """Between the calls of a block; None if a block has one call."""
    closing: str
    between: str | None = None
    """Between blocks; None if a text has one block."""
