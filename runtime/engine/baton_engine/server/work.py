"""A checked request, ready for the engine: prompts as tokens, parameters, and the shape of the answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton_api.errors import ContextTooLong
from baton_engine.server.fields import Fields
from baton_engine.server.parameters import Parameters
from baton_engine.server.parts import PlainReader, Reader
from baton_engine.server.shape import Shape


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    max_tokens: int
    """Of each of its choices."""


@dataclass(frozen=True, slots=True)
class Work:
    """One request to generate: each prompt n times."""

    prompts: tuple[Prompt, ...]
    parameters: Parameters
    shape: Shape
    reader: Callable[[], Reader] = PlainReader
    """Makes what tells the parts of one choice's text."""


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
