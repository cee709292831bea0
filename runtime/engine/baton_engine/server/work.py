"""A checked request, ready for the engine: prompts as tokens, parameters, and the shape of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from baton_api.errors import ContextTooLong
from baton_engine.server.fields import Fields
from baton_engine.server.parameters import Parameters
from baton_engine.server.transcript import Piece, Transcript


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    max_tokens: int
    """Of each of its choices."""


class Shape(Protocol):
    """How one endpoint writes its answers. `index` is the choice's; `prompt` the number of its prompt."""

    @property
    def id(self) -> str: ...

    def opening(self, index: int, prompt: int) -> dict[str, Any] | None:
        """The choice in the first chunk of its stream, if there is one before the text."""
        ...

    def chunks(self, index: int, piece: Piece, transcript: Transcript) -> list[dict[str, Any]]:
        """The choice in the chunks for one piece, the finish chunk included; maybe none."""
        ...

    def choice(self, index: int, prompt: int, whole: Piece, transcript: Transcript) -> dict[str, Any]:
        """The choice in an answer that is not streamed."""
        ...

    def envelope(self, choices: Sequence[dict[str, Any]], *, stream: bool) -> dict[str, Any]:
        """A chunk or an answer around its choices, without usage."""
        ...


@dataclass(frozen=True, slots=True)
class Work:
    """One request to generate: each prompt n times."""

    prompts: tuple[Prompt, ...]
    parameters: Parameters
    shape: Shape


def tokens_left(prompt: int, wanted: int | None, context: int, *, param: str, wanted_param: str) -> int:
    """
    How many tokens a prompt of `prompt` tokens may get: what was asked for, or all that the context leaves.

    Raises ContextTooLong if the prompt leaves no room, or not the room that was asked for.
    """
    if wanted is not None and wanted > context:
        raise ContextTooLong(prompt, wanted, context, param=wanted_param)
    if prompt + (1 if wanted is None else wanted) > context or prompt >= context:
        raise ContextTooLong(prompt, 1 if wanted is None else wanted, context, param=param)
    return context - prompt if wanted is None else wanted


def read_max_tokens(fields: Fields, *names: str, low: int = 1) -> tuple[int | None, str]:
    """The first of `names` that is given, and its name; the others are checked all the same."""
    values = [(fields.integer(name, low, 2**31 - 1), name) for name in names]
    return next(((value, name) for value, name in values if value is not None), (None, names[0]))
