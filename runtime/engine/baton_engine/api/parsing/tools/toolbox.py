"""The tools of one request, and which of them the answer may or must call."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

INPUT = "input"
"""The single parameter of a custom tool, as the model sees it."""

NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a function without `parameters`."""


@dataclass(frozen=True, slots=True)
class TextGrammar:
    """Grammar of a custom tool's input."""

    syntax: Literal["lark", "regex"]
    definition: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A function, or a custom tool, whose input is text instead of JSON."""

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=lambda: NO_PARAMETERS)
    """A JSON schema of type object."""
    strict: bool = False
    """Whether arguments must match the schema even if the call is optional."""
    custom: bool = False
    grammar: TextGrammar | None = None
    """Grammar of a custom tool's input. None: any text."""

    @property
    def exact(self) -> bool:
        """Whether the arguments must match the schema or grammar in every call."""
        return self.strict or self.grammar is not None

    @property
    def definition(self) -> dict[str, Any]:
        """The tool in the format of chat templates. A custom tool is a function with one string."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": function | {"parameters": self.schema}}

    @property
    def schema(self) -> dict[str, Any]:
        """JSON schema of the arguments as the model writes them."""
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
    """The tools of a request and the tool choice."""

    tools: tuple[Tool, ...]
    """At least one, with distinct names."""
    choice: Literal["none", "auto", "required"] = "auto"
    allowed: frozenset[str] | None = None
    """Names of the tools that the answer may call. None: all."""
    named: bool = False
    """Whether the choice is one tool by its name."""
    parallel: bool = True
    """Whether one answer may contain several calls."""
    legacy: bool = False
    """Whether the request uses `functions`, and the response `function_call`."""

    @property
    def forced(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice == "required"

    @property
    def definitions(self) -> list[dict[str, Any]]:
        """All tools in the format of chat templates."""
        return [tool.definition for tool in self.tools]

    @cached_property
    def callable(self) -> Mapping[str, Tool]:
        """The tools that the answer may call, by name."""
        if self.choice == "none":
            return {}
        return {tool.name: tool for tool in self.tools if self.allowed is None or tool.name in self.allowed}

    @property
    def constrained(self) -> bool:
        """Whether a grammar must constrain calls: a call is required, restricted, or must match a schema."""
        return self.choice != "none" and (
            self.forced
            or len(self.callable) < len(self.tools)
            or any(tool.exact for tool in self.callable.values())
        )
