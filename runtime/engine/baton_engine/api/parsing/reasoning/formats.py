"""
Formats of reasoning in answers: a pair of marks, gpt-oss's channels, or the tokenizer's response template.

`--reasoning-parser` selects the format. A format creates the reader of a choice from the end of the prompt,
the tools of the request, and whether reasoning is separate from the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from baton_api.errors import SetupError
from baton_engine.api.parsing.parts import Reader
from baton_engine.api.parsing.reasoning import described, families, harmony
from baton_engine.api.parsing.reasoning.families import PromptState, ReasoningFamily
from baton_engine.api.parsing.reasoning.reader import ReasoningReader
from baton_engine.api.parsing.tools.family import fresh_id
from baton_engine.api.parsing.tools.toolbox import Toolbox


@runtime_checkable
class Thinker(Protocol):
    """A reader that reports which tokens are reasoning."""

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within reasoning."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """Context of an answer before its first token."""

    prompt: str
    """The rendered prompt."""
    continued: str | None = None
    """The text of the partial message at the end of the prompt."""
    toolbox: Toolbox | None = None
    apart: bool = True
    """Whether reasoning is separate from the answer."""
    exact: bool = False
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

    def reader(self, opening: Opening, inner: Reader) -> Reader:
        """Return the reader of one choice, a `Thinker`. `inner` reads the text that is not reasoning."""
        ...

    def thinking(self, opening: Opening) -> tuple[str, str] | None:
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

    def reader(self, opening: Opening, inner: Reader) -> Reader:
        return ReasoningReader(
            self.family, inner, self._state(opening), apart=opening.apart, exact=opening.exact
        )

    def thinking(self, opening: Opening) -> tuple[str, str] | None:
        match self._state(opening):
            case PromptState.OPEN:
                return "", self.family.end
            case PromptState.FREE:
                return self.family.start, self.family.end
            case PromptState.CLOSED:
                return None

    def _state(self, opening: Opening) -> PromptState:
        return self.family.state(opening.prompt, opening.continued)


@dataclass(frozen=True, slots=True)
class Harmony:
    """gpt-oss."""

    name = families.HARMONY
    keeps = harmony.KEEPS

    def reader(self, opening: Opening, inner: Reader) -> Reader:
        return harmony.HarmonyReader(inner, opening.toolbox, fresh_id, apart=opening.apart)

    def thinking(self, opening: Opening) -> tuple[str, str] | None:
        return ("", harmony.FINAL) if opening.continued is None else None


@dataclass(frozen=True, slots=True)
class Described:
    """Format of a response template. Such a template does not specify where a constrained answer begins."""

    template: Mapping[str, Any]

    name = families.DESCRIBED
    keeps = None

    def reader(self, opening: Opening, inner: Reader) -> Reader:
        parser = described.parser(self.template, opening.prompt, opening.toolbox)
        return described.DescribedReader(
            parser, inner, opening.toolbox, fresh_id, apart=opening.apart, exact=opening.exact
        )

    def thinking(self, opening: Opening) -> tuple[str, str] | None:
        return None


def format_of(
    chosen: str, templates: Sequence[str], response_template: Mapping[str, Any] | None
) -> ReasoningFormat | None:
    """
    Return the format that `--reasoning-parser` selects; None if reasoning stays in the text.

    `auto` uses the tokenizer's response template if it exists, then the marks in the chat templates. Raises
    SetupError for an unknown name or a missing response template.
    """
    name = families.canonical(chosen)
    if name == families.AUTO:
        if response_template is not None:
            name = families.DESCRIBED
        else:
            name = next(filter(None, map(families.detect, templates)), "")
    if name in ("", "none"):
        return None
    if name == families.HARMONY:
        return Harmony()
    if name == families.DESCRIBED:
        return _described(response_template)
    return Marked(families.named(name))


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
