"""Answers with calls, as each family writes them, and what a reader makes of a text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from baton_engine.api.parsing.parts import AnswerText, Arguments, Part, ToolCall
from baton_engine.api.parsing.tools.families import family
from baton_engine.api.parsing.tools.toolbox import TextGrammar, Tool, Toolbox

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
        "unit": {"enum": ["c", "f"]},
        "flag": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 4}, "maxItems": 2},
        "limit": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 99}, {"type": "null"}]},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/point"}},
    "required": ["at"],
    "$defs": {
        "point": {"type": "object", "properties": {"x": {"type": "integer", "maximum": 9, "minimum": 0}}}
    },
}
SELECT = TextGrammar("lark", 'start: "SELECT " NAME ("," NAME){0,3}\nNAME: /[a-z]{1,5}/')
CODE = TextGrammar("regex", r'[0-9]{3}/[a-z"]{2}')

BOX = Toolbox(
    tools=(
        Tool(name="weather", parameters=WEATHER),
        Tool(name="place", parameters=PLACE),
        Tool(name="now"),
        Tool(name="write", custom=True),
    )
)

BAR = "\uff5c"


def deepseek(words: str) -> str:
    return f"<{BAR}{words.replace(' ', chr(0x2581))}{BAR}>"


def named(*calls: str) -> list[tuple[str, str]]:
    """`name arguments` of each call."""
    return [(call.split(" ", 1)[0], call.split(" ", 1)[1]) for call in calls]


def read(name: str, pieces: Iterable[str], toolbox: Toolbox = BOX, *, cut: bool = False) -> list[Part]:
    """Return the reader's parts of a text that comes in `pieces`; adjacent parts of one kind are joined."""
    numbers = itertools.count()
    reader = family(name).reader(toolbox, lambda: f"call_{next(numbers)}")
    read_parts: list[Part] = []
    for piece in pieces:
        read_parts += reader.push(piece)
    read_parts += reader.flush(cut)
    joined: list[Part] = []
    for part in read_parts:
        last = joined[-1] if joined else None
        if isinstance(part, AnswerText) and isinstance(last, AnswerText):
            joined[-1] = AnswerText(last.text + part.text)
        elif isinstance(part, Arguments) and isinstance(last, Arguments) and last.index == part.index:
            joined[-1] = Arguments(part.index, last.text + part.text)
        else:
            joined.append(part)
    return joined


def calls_of(parts: Iterable[Part]) -> list[tuple[str, str]]:
    """Name and arguments of each call."""
    calls: dict[int, tuple[str, str]] = {}
    for part in parts:
        if isinstance(part, ToolCall):
            calls[part.index] = part.name, ""
        elif isinstance(part, Arguments):
            name, text = calls[part.index]
            calls[part.index] = name, text + part.text
    return list(calls.values())


def words_of(parts: Iterable[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, AnswerText))
