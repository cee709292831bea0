"""A validated request: tokenized prompts, parameters, grammar matchers and the format of the response."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton_api.errors import BatonError, ContextTooLong, InvalidRequest
from baton_api.stream_comments import Resumption
from baton_engine.api import structured_output
from baton_engine.api.answer_shape import AnswerShape
from baton_engine.api.fields import Fields
from baton_engine.api.parameters import Parameters
from baton_engine.api.parsing.parts import PlainReader, Reader
from baton_engine.api.streaming import DONE, error_event
from baton_engine.grammar.grammars import MatcherSource
from baton_engine.requests import GrammarMatcher, LoadedAdapter


@dataclass(frozen=True, slots=True)
class Prompt:
    tokens: tuple[int, ...]
    max_tokens: int
    """Maximum tokens of each choice."""
    hashes: Sequence[bytes] | None = None
    """`Request.hashes` of all its choices."""


@dataclass(frozen=True, slots=True)
class Work:
    """One request for generation: n choices of each prompt."""

    prompts: tuple[Prompt, ...]
    parameters: Parameters
    shape: AnswerShape
    reader: Callable[[], Reader] = PlainReader
    """Creates the reader of one choice."""
    marks: frozenset[str] | None = frozenset()
    """Special tokens that the reader needs, even if they are not part of the response. None: all."""
    matchers: Callable[[], GrammarMatcher] | None = None
    """Creates the matcher of one choice: it enforces constraint and reasoning budget, see `with_matchers`."""
    adapter: LoadedAdapter | None = None
    constrained_by: str | None = None
    """Path of the request's field with the constraint, for errors."""
    resumption: Resumption | None = None
    """Resume state of the answer that this request continues. Its tokens are the last ones of the prompt."""
    failure: Callable[[BatonError], bytes] = error_event
    """Encodes the error event of a stream."""
    prediction: tuple[int, ...] = ()
    """Tokens that the client expects as the answer; they only make it faster."""
    done: bytes = DONE
    """Regular end of a stream."""


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
    Return the prompt and its maximum number of tokens: `wanted`, else `default`, else the rest of the
    context.

    Raises ContextTooLong if they do not fit. With `truncate`, `wanted` is reduced to the rest of the context.
    A prompt that fills the context loses its oldest tokens, except for the first one, which may be the
    begin-of-sequence token. This frees space for the requested tokens, but at most half of the context.
    Without a requested number, it frees an eighth of the context.
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
    Return the maximum number of tokens after a prompt of `prompt` tokens: `wanted`, or the rest of the
    context.

    Raises ContextTooLong if `wanted` tokens, or one, do not fit.
    """
    if wanted is not None and wanted > context:
        raise ContextTooLong(prompt, wanted, context, param=wanted_param)
    if prompt + (1 if wanted is None else wanted) > context:
        raise ContextTooLong(prompt, 1 if wanted is None else wanted, context, param=param)
    return context - prompt if wanted is None else wanted


def read_max_tokens(fields: Fields, *names: str, low: int = 1) -> tuple[int | None, str]:
    """Return the first field of `names` that is set, and its name. Validates the others too."""
    values = [(fields.integer(name, low, 2**31 - 1), name) for name in names]
    return next(((value, name) for value, name in values if value is not None), (None, names[0]))


def with_constraint_field(work: Work, fields: Fields) -> Work:
    """Return `work` with the path of the field that causes its constraint."""
    param = structured_output.constrained_by(fields)
    if param is None and fields.given("tools"):
        param = "tools"
    return dataclasses.replace(work, constrained_by=param)


async def with_matchers(work: Work, grammars: MatcherSource, tenant: str = "") -> Work:
    """
    Return `work` with its constraint compiled, in the turn of `tenant`.

    Raises InvalidRequest if it cannot be enforced.
    """
    sampling = work.parameters.sampling
    if sampling.constraint is None and sampling.thinking is None:
        return work
    try:
        matchers = await grammars.prepare(sampling.constraint, sampling.thinking, tenant)
    except InvalidRequest as error:
        raise InvalidRequest(str(error), param=work.constrained_by, code=error.code) from error
    return dataclasses.replace(work, matchers=matchers)
