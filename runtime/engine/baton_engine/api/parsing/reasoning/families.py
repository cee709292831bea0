"""
How model families mark their thoughts.

Most write a start, think, write an end, and answer. What differs is the words, and who writes the start:
the chat template, the model, or nobody. So a family is two words and one bit; the prompt's own end tells
the rest.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from baton_api.errors import SetupError


class PromptState(enum.Enum):
    """Where an answer begins, as the prompt leaves it."""

    OPEN = "within a thought"
    FREE = "the model may think first, or not"
    CLOSED = "after the thought, or where there is to be none"


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """One way to mark thoughts."""

    name: str
    start: str
    end: str
    implied: bool = False
    """Whether the answer begins within a thought though nobody wrote `start`."""

    def state(self, prompt: str, continued: str | None = None) -> PromptState:
        """
        What the rendered prompt leaves open; `continued` is the message that it ends in the middle of.

        Only the end of the prompt counts: what users write of thoughts is not the model's.
        """
        if continued is not None:
            # The message, and what the template may have put before it.
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
"""Families that write <think> themselves, or whose templates do, and that may leave it out."""
ALWAYS = ("deepseek-r1", "qwen3-thinking")
"""Families that think in any case, and do not always say where they begin."""

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
"""The parsers that are no pair of marks, see `formats`."""


def canonical(name: str) -> str:
    """
    The name as it stands here: underlines and dashes are alike, and so are upper and lower case.

    >>> canonical("DeepSeek_R1"), canonical("openai_gptoss"), canonical("glm-4.5")
    ('deepseek-r1', 'gpt-oss', 'glm45')
    """
    plain = name.strip().lower().replace("_", "-")
    canonical_names = {each.replace("_", "-"): each for each in (*FAMILIES, HARMONY, DESCRIBED, AUTO)}
    aliases = {
        "openai-gptoss": HARMONY, "gptoss": HARMONY, "harmony": HARMONY, "glm-4.5": "glm45",
        "magistral": "mistral", "deepseek-v3.1": "deepseek-v3",
    }  # fmt: skip
    return aliases.get(plain) or canonical_names.get(plain, plain)


def named(name: str) -> ReasoningFamily:
    """Raises SetupError for one that there is not."""
    family = FAMILIES.get(canonical(name))
    if family is None:
        names = ", ".join((*FAMILIES, HARMONY, DESCRIBED, AUTO))
        raise SetupError(f"--reasoning-parser {name!r} is unknown; there are {names}.")
    return family


def detect(template: str) -> str:
    """
    The parser for models with this chat template, by the marks that it writes; empty if it writes none.

    A template that only knows the end of thoughts (it takes them out of earlier answers) is that of a model
    which thinks in any case.
    """
    if "<|channel|>" in template and "analysis" in template:
        return HARMONY
    if "<think>" in template and "</think>" in template:
        return "qwen3"
    if "</think>" in template:
        return "deepseek-r1"
    names = ("mistral", "granite")
    return next((name for name in names if FAMILIES[name].end in template), "")
