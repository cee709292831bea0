"""The tools of one request, and which of them an answer may call, must call, or has to leave alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

INPUT = "input"
"""The one parameter of a custom tool, as its model knows it."""

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Of a function that gives none."""


@dataclass(frozen=True, slots=True)
class TextGrammar:
    """What the input of a custom tool must be."""

    syntax: Literal["lark", "regex"]
    definition: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One function, or one custom tool, which is called with text instead of JSON."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_PARAMETERS)
    """A JSON schema of type object."""
    strict: bool = False
    """Whether arguments have to fit the schema even where the model is free to call or not."""
    custom: bool = False
    grammar: TextGrammar | None = None
    """Of a custom tool; None is any text."""

    @property
    def exact(self) -> bool:
        """Whether what it is called with must be of its form wherever it is called."""
        return self.strict or self.grammar is not None

    @property
    def definition(self) -> dict[str, Any]:
        """As chat templates take it; a custom tool is a function with one string."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": self.schema}}

    @property
    def schema(self) -> dict[str, Any]:
        """Of the arguments as the model writes them."""
        if not self.custom:
            return dict(self.parameters)
        text: dict[str, Any] = {"type": "string"}
        if self.grammar is not None:
            text["description"] = f"Must match this {self.grammar.syntax} grammar:\n{self.grammar.definition}"
            if self.grammar.syntax == "regex":
                text["pattern"] = f"^(?:{self.grammar.definition})$"
        return {
            "type": "object",
            "properties": {INPUT: text},
            "required": [INPUT],
            "additionalProperties": False,
        }


@dataclass(frozen=True, kw_only=True)
class Toolbox:
    """What a request says about tools."""

    tools: tuple[Tool, ...]
    """At least one; names differ."""
    choice: Literal["none", "auto", "required"] = "auto"
    allowed: frozenset[str] | None = None
    """The names that may be called; None is all. With one name and `required`, it is a named choice."""
    parallel: bool = True
    """Whether one answer may have several calls."""
    legacy: bool = False
    """Whether the request speaks of `functions`, and is answered with `function_call`."""

    @property
    def forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.choice == "required"

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """All tools as chat templates take them."""
        return [tool.definition for tool in self.tools]

    @cached_property
    def callable(self) -> Mapping[str, Tool]:
        """The tools that this answer may call, by name."""
        if self.choice == "none":
            return {}
        return {tool.name: tool for tool in self.tools if self.allowed is None or tool.name in self.allowed}

    @property
    def constrained(self) -> bool:
        """Whether free calls would not do: some must be, or must fit a schema, or may not be."""
        return self.choice != "none" and (
            self.forced
            or len(self.callable) < len(self.tools)
            or any(tool.exact for tool in self.callable.values())
        )
