"""
Marks of reasoning, by model family.

Most families write a start mark, the reasoning, an end mark and the answer. The families differ in the marks,
and in whether the chat template or the model writes the start mark, or neither. The end of the prompt shows
whether the template has written it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from baton_api.errors import SetupError
from baton_engine.model import families as models


class PromptState(enum.Enum):
    """Position of the answer's start relative to the reasoning."""

    OPEN = "within the reasoning"
    FREE = "before optional reasoning"
    CLOSED = "after the reasoning, or reasoning is disabled"


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """One pair of marks."""

    name: str
    start: str
    end: str
    implied: bool = False
    """Whether the answer begins within reasoning even if the prompt does not end with `start`."""

    def state(self, prompt: str, continued: str | None = None) -> PromptState:
        """
        Return the state at the end of a rendered prompt. `continued` is the partial message at its end.

        Only the end of the prompt is examined, because messages of users may contain marks.
        """
        if continued is not None:
            # The message, and marks that the template may have put before it.
            tail = prompt[-len(continued) - len(self.start) - len(self.end) - 16 :]
            started, ended = tail.rfind(self.start), tail.rfind(self.end)
            if started != ended:
                return PromptState.OPEN if started > ended else PromptState.CLOSED
            return PromptState.CLOSED if continued.strip() else self._beginning
        written = prompt.rstrip()
        if written.endswith(self.start):
            return PromptState.OPEN
        return PromptState.CLOSED if written.endswith(self.end) else self._beginning

    @property
    def _beginning(self) -> PromptState:
        return PromptState.OPEN if self.implied else PromptState.FREE


def _tags(name: str, implied: bool = False) -> ReasoningFamily:
    return ReasoningFamily(name, "<think>", "</think>", implied)


THINK = ("qwen3", "glm45", "kimi_k2", "deepseek-v3", "nemotron")
"""Families with optional reasoning. The model or its template writes <think>."""
ALWAYS = ("deepseek-r1", "qwen3-thinking")
"""Families that always reason, sometimes without a start mark."""

FAMILIES: Mapping[str, ReasoningFamily] = {
    family.name: family
    for family in (
        *(_tags(name) for name in THINK),
        *(_tags(name, implied=True) for name in ALWAYS),
        ReasoningFamily("mistral", "[THINK]", "[/THINK]"),
        ReasoningFamily("granite", "Here is my thought process:", "Here is my response:"),
    )
}

HARMONY = "gpt-oss"
DESCRIBED = "transformers"
AUTO = "auto"
"""Further parsers, which `formats` implements."""


def canonical(name: str) -> str:
    """
    Return the canonical form of a parser's name or alias. Ignores case, and treats `_` as `-`.

    >>> canonical("DeepSeek_R1"), canonical("openai_gptoss"), canonical("glm-4.5")
    ('deepseek-r1', 'gpt-oss', 'glm45')
    """
    plain = name.strip().lower().replace("_", "-")
    canonical_names = {each.replace("_", "-"): each for each in (*FAMILIES, HARMONY, DESCRIBED, AUTO)}
    aliases = {
        "openai-gptoss": HARMONY, "gptoss": HARMONY, "harmony": HARMONY, "glm-4.5": "glm45", "deepseek-v3.1":
        "deepseek-v3", **{alias: name for family in models.FAMILIES for alias, name in
        family.reasoning_parser_aliases.items()},
    }  # fmt: skip
    return aliases.get(plain) or canonical_names.get(plain, plain)


def named(name: str) -> ReasoningFamily:
    """Return the family with this name or alias. Raises SetupError if it is unknown."""
    family = FAMILIES.get(canonical(name))
    if family is None:
        names = ", ".join((*FAMILIES, HARMONY, DESCRIBED, AUTO))
        raise SetupError(f"Unknown --reasoning-parser: {name!r}. Supported: {names}.")
    return family


def detect(template: str) -> str:
    """
    Return the parser for a chat template, by the marks in it; empty if it contains no known marks.

    A template with the end mark only (it removes reasoning from earlier answers) belongs to a model that
    always reasons.
    """
    if "<|channel|>" in template and "analysis" in template:
        return HARMONY
    if "<think>" in template and "</think>" in template:
        return "qwen3"
    if "</think>" in template:
        return "deepseek-r1"
    names = ("mistral", "granite")
    return next((name for name in names if FAMILIES[name].end in template), "")
