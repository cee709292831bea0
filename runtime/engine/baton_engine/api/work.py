"""A validated request, ready for the engine: prompts as tokens, parameters, grammar matchers, the form of the
answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton_api.errors import BatonError, ContextTooLong, InvalidRequest
from baton_api.resuming import Resumption
from baton_engine.api import structured_output
from baton_engine.api.answer_shape import AnswerShape
from baton_engine.api.fields import Fields
from baton_engine.api.parameters import Parameters
from baton_engine.api.parsing.parts import PlainReader, Reader
from baton_engine.api.streaming import DONE, error_event
from baton_engine.grammar.grammars import Grammars
from baton_engine.requests import GrammarMatcher


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    max_tokens: int
    """Of each of its choices."""
    hashes: Sequence[bytes] | None = None
    """`Request.hashes`, the same for all of its choices."""


@dataclass(frozen=True, slots=True)
class Work:
    """One request to generate: each prompt n times."""

    prompts: tuple[Prompt, ...]
    parameters: Parameters
    shape: AnswerShape
    reader: Callable[[], Reader] = PlainReader
    """Makes what tells the parts of one choice's text."""
    marks: frozenset[str] | None = frozenset()
    """The texts of special tokens that it must see, whether or not they are to be shown; None is all."""
    matchers: Callable[[], GrammarMatcher] | None = None
    """Makes what keeps one choice to its constraint and its thoughts in bounds; see `guided.guided`."""
    constrained_by: str | None = None
    """The request's field that brings the constraint, as an error names it."""
    resumption: Resumption | None = None
    """Where the answer broke off that this one goes on with; the tokens are the prompt's last."""
    failure: Callable[[BatonError], bytes] = error_event
    """The event that says in a stream why it does not go on."""
    done: bytes = DONE
    """What a stream that is not broken ends with, whatever was in it."""


def fit(
    tokens: tuple[int, ...],
    wanted: int | None,
    context: int,
    *,
    param: str,
    wanted_param: str,
    default: int | None = None,
    truncate: bool = False,
) -> Prompt:
    """
    The prompt and how many tokens it gets: `wanted`, else `default` or all that the context leaves.

    Raises ContextTooLong for what does not fit. With `truncate` it is made to fit: `wanted` shrinks to what
    the prompt leaves; a prompt that leaves nothing loses its oldest tokens after the first, which may be
    the one that begins every text, until what was wanted fits, or half of the context is free, or an eighth
    where nobody said.
    """
    if truncate and len(tokens) >= context:
        requested = wanted or default
        limit = max(1, min(requested, context // 2) if requested else context // 8)
        tokens = tokens[:1] + tokens[len(tokens) - (context - limit - 1) :]
    if truncate and wanted is not None:
        wanted = min(wanted, context - len(tokens))
    limit = tokens_left(len(tokens), wanted, context, param=param, wanted_param=wanted_param)
    return Prompt(tokens, limit if wanted is not None or default is None else min(default, limit))


def tokens_left(prompt: int, wanted: int | None, context: int, *, param: str, wanted_param: str) -> int:
    """
    How many tokens a prompt of `prompt` tokens may get: what was asked for, or all that the context leaves.

    Raises ContextTooLong if the prompt leaves no room, or not the room that was asked for.
    """
    if wanted is not None and wanted > context:
        raise ContextTooLong(prompt, wanted, context, param=wanted_param)
    if prompt + (1 if wanted is None else wanted) > context:
        raise ContextTooLong(prompt, 1 if wanted is None else wanted, context, param=param)
    return context - prompt if wanted is None else wanted


def read_max_tokens(fields: Fields, *names: str, low: int = 1) -> tuple[int | None, str]:
    """The first of `names` that is given, and its name; the others are checked all the same."""
    values = [(fields.integer(name, low, 2**31 - 1), name) for name in names]
    return next(((value, name) for value, name in values if value is not None), (None, names[0]))


def named(work: Work, fields: Fields) -> Work:
    """`work` with the field of the request noted that an error of its constraint names."""
    param = structured_output.constrained_by(fields)
    if param is None and fields.given("tools"):
        param = "tools"
    return dataclasses.replace(work, constrained_by=param)


async def guided(work: Work, grammars: Grammars) -> Work:
    """`work` with its constraint compiled. Raises InvalidRequest for one that cannot be kept to."""
    sampling = work.parameters.sampling
    if sampling.constraint is None and sampling.thinking is None:
        return work
    try:
        matchers = await grammars.prepare(sampling.constraint, sampling.thinking)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param=work.constrained_by, code=error.code) from error
    return dataclasses.replace(work, matchers=matchers)
