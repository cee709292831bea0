"""
Formats of reasoning in answers: a pair of marks, gpt-oss's channels, or the tokenizer's response template.

`--reasoning-parser` selects the format. A format creates the reader of a choice from the end of the prompt,
the tools of the request, and whether reasoning is separate from the answer. The request's options say how
reasoning is shown: in one piece, or not at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from baton_api import limits
from baton_api.errors import SetupError
from baton_engine.api.fields import Fields
from baton_engine.api.parsing.parts import Part, Reader, Thought
from baton_engine.api.parsing.reasoning import described, harmony
from baton_engine.api.parsing.reasoning.marked import FAMILIES, PromptState, ReasoningFamily, ReasoningReader
from baton_engine.api.parsing.tools.family import fresh_id
from baton_engine.api.parsing.tools.toolbox import Toolbox
from baton_engine.model import families as models

HARMONY = "gpt-oss"
DESCRIBED = "transformers"
AUTO = "auto"
"""Parsers besides those of `FAMILIES`."""


@runtime_checkable
class Thinker(Protocol):
    """A reader that reports which tokens are reasoning."""

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within reasoning."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerStart:
    """Context of an answer before its first token."""

    prompt: str
    """The rendered prompt."""
    continued: str | None = None
    """The text of the partial message at the end of the prompt."""
    toolbox: Toolbox | None = None
    separate: bool = True
    """Whether reasoning is separate from the answer."""
    keep_space: bool = False
    """Whether to keep all white space of the answer, as for constrained answers."""


class ReasoningFormat(Protocol):
    """Format of one model. Immutable. Each reader serves one choice."""

    @property
    def name(self) -> str:
        """The parser's name."""
        ...

    @property
    def keeps(self) -> frozenset[str] | None:
        """Special tokens that a reader needs in the text; None: all."""
        ...

    def reader(self, opening: AnswerStart, inner: Reader) -> Reader:
        """Return the reader of one choice, a `Thinker`. `inner` reads the text that is not reasoning."""
        ...

    def thinking(self, opening: AnswerStart) -> tuple[str, str] | None:
        """
        Return start and end mark of reasoning that precedes a constrained answer, or None.

        The start mark is empty if the prompt already contains it.
        """
        ...


@dataclass(frozen=True, slots=True)
class Marked:
    """Reasoning between two marks, then the answer."""

    family: ReasoningFamily

    @property
    def name(self) -> str:
        return self.family.name

    @property
    def keeps(self) -> frozenset[str]:
        return frozenset((self.family.start, self.family.end))

    def reader(self, opening: AnswerStart, inner: Reader) -> Reader:
        return ReasoningReader(
            self.family, inner, self._state(opening), separate=opening.separate, keep_space=opening.keep_space
        )

    def thinking(self, opening: AnswerStart) -> tuple[str, str] | None:
        match self._state(opening):
            case PromptState.OPEN:
                return "", self.family.end
            case PromptState.FREE:
                return self.family.start, self.family.end
            case PromptState.CLOSED:
                return None

    def _state(self, opening: AnswerStart) -> PromptState:
        return self.family.state(opening.prompt, opening.continued)


@dataclass(frozen=True, slots=True)
class Harmony:
    """gpt-oss."""

    name = HARMONY
    keeps = harmony.KEEPS

    def reader(self, opening: AnswerStart, inner: Reader) -> Reader:
        return harmony.HarmonyReader(inner, opening.toolbox, fresh_id, separate=opening.separate)

    def thinking(self, opening: AnswerStart) -> tuple[str, str] | None:
        return ("", harmony.FINAL) if opening.continued is None else None


@dataclass(frozen=True, slots=True)
class Described:
    """Format of a response template. Such a template does not specify where a constrained answer begins."""

    template: Mapping[str, Any]

    name = DESCRIBED
    keeps = None

    def reader(self, opening: AnswerStart, inner: Reader) -> Reader:
        parser = described.parser(self.template, opening.prompt, opening.toolbox)
        return described.DescribedReader(
            parser, inner, opening.toolbox, fresh_id, separate=opening.separate, keep_space=opening.keep_space
        )

    def thinking(self, opening: AnswerStart) -> tuple[str, str] | None:
        return None


def canonical(name: str) -> str:
    """
    Return the canonical form of a parser's name or alias. Ignores case, and treats `_` as `-`.

    >>> canonical("DeepSeek_R1"), canonical("openai_gptoss"), canonical("glm-4.5")
    ('deepseek-r1', 'gpt-oss', 'glm45')
    """
    plain = name.strip().lower().replace("_", "-")
    canonical_names = {parser.replace("_", "-"): parser for parser in (*FAMILIES, HARMONY, DESCRIBED, AUTO)}
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


def format_of(
    chosen: str, templates: Sequence[str], response_template: Mapping[str, Any] | None
) -> ReasoningFormat | None:
    """
    Return the format that `--reasoning-parser` selects; None if reasoning stays in the text.

    `auto` uses the tokenizer's response template if it exists, then the marks in the chat templates. Raises
    SetupError for an unknown name or a missing response template.
    """
    name = canonical(chosen)
    if name == AUTO:
        marks = next(filter(None, map(detect, templates)), "")
        name = marks if response_template is None else DESCRIBED
    if name in ("", "none"):
        return None
    if name == HARMONY:
        return Harmony()
    if name == DESCRIBED:
        return _described(response_template)
    return Marked(named(name))


def _described(template: Mapping[str, Any] | None) -> Described:
    if template is None:
        raise SetupError(
            "--reasoning-parser transformers requires a response_template in the model's "
            "tokenizer_config.json, which is missing. Use auto or the name of a parser."
        )
    try:
        described.parser(template, "", None)
    except Exception as error:  # transformers raises many types for an invalid template
        raise SetupError(f"Invalid response_template of the tokenizer: {error}") from error
    return Described(template)


class ReasoningFilter:
    """Passes on the parts of another reader, with the reasoning joined into one part or omitted."""

    def __init__(self, inner: Reader, *, left_out: bool) -> None:
        self._inner = inner
        self._thinker = inner if isinstance(inner, Thinker) else None
        self._left_out = left_out
        self._thought: list[str] = []

    @property
    def thinking(self) -> bool:
        return self._thinker is not None and self._thinker.thinking

    def push(self, text: str) -> Sequence[Part]:
        return self._shown(self._inner.push(text))

    def flush(self, cut: bool = False) -> Sequence[Part]:
        return [*self._shown(self._inner.flush(cut)), *self._parts()]

    def _shown(self, parts: Sequence[Part]) -> Sequence[Part]:
        shown: list[Part] = []
        for part in parts:
            if not isinstance(part, Thought):
                shown += self._parts()
                shown.append(part)
            elif not self._left_out:
                self._thought.append(part.text)
        return shown

    def _parts(self) -> Sequence[Part]:
        thought = "".join(self._thought)
        self._thought.clear()
        return [Thought(thought)] if thought else []


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningOptions:
    separate: bool
    """SGLang's `separate_reasoning`: whether the answer's text excludes the reasoning."""
    streamed: bool
    """SGLang's `stream_reasoning`: whether reasoning is streamed, or sent in one piece at its end."""
    included: bool
    """vLLM's `include_reasoning`: whether separate reasoning is part of the response."""
    budget: int | None
    """vLLM's `thinking_token_budget`: maximum tokens of reasoning. None: no limit."""


def read_options(fields: Fields) -> ReasoningOptions:
    budget = fields.integer("thinking_token_budget", *limits.THINKING_BUDGET.range)
    return ReasoningOptions(
        separate=fields.boolean("separate_reasoning", True),
        streamed=fields.boolean("stream_reasoning", True),
        included=fields.boolean("include_reasoning", True),
        budget=None if budget == -1 else budget,
    )
