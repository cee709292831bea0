"""
Formats of reasoning in answers: a pair of marks, gpt-oss's channels, or the tokenizer's response template.

A format makes the reader of one choice from what is known before the answer: how the prompt ends, which
tools there are, and whether thoughts are wanted apart. `--reasoning-parser` chooses it.
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
    """A reader that knows which tokens are thoughts."""

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within a thought."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """What is known of an answer before it."""

    prompt: str
    """As it was rendered."""
    continued: str | None = None
    """The text of the message that it ends in the middle of."""
    toolbox: Toolbox | None = None
    apart: bool = True
    """Whether thoughts are wanted apart from the answer."""
    exact: bool = False
    """Whether every character of the answer counts, as it does under a constraint."""


class ReasoningFormat(Protocol):
    """One model's. Immutable; its readers belong to one choice each."""

    @property
    def name(self) -> str:
        """The parser's name."""
        ...

    @property
    def keeps(self) -> frozenset[str] | None:
        """Texts of special tokens that a reader must see; None is all."""
        ...

    def reader(self, opening: Opening, inner: Reader) -> Reader:
        """For one choice; `inner` reads what is not thought. It is a `Thinker`."""
        ...

    def thinking(self, opening: Opening) -> tuple[str, str] | None:
        """The marks before which a constraint does not hold, the first empty if it was written; or None."""
        ...


@dataclass(frozen=True, slots=True)
class Marked:
    """A thought between two marks, and then the answer."""

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
    """As a response template says; it does not say where an answer could be constrained."""

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
    The format that `--reasoning-parser` chooses; None if thoughts are to stay in the text.

    `auto` is the tokenizer's own description if it has one, else what the chat templates write, else none.
    Raises SetupError for a name that is unknown, or a description that there is not.
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
            "--reasoning-parser transformers needs a response_template in the model's tokenizer_config.json; "
            "this model has none. Name a parser, or use auto."
        )
    try:
        described.parser(template, "", None)
    except Exception as error:  # transformers raises what it likes about a file that is wrong
        raise SetupError(f"The tokenizer's response_template cannot be used: {error}") from error
    return Described(template)
