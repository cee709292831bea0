"""
Streams that another worker can resume: the state in the stream, and its use.

On request of a router (`x-baton-resumable`), the stream contains resume state between its events: the
beginning of the answer and, after the events of each piece, its tokens. With the request and these tokens,
any worker of the model can continue with the next token. The tokens become part of the prompt. The transcript
processes them again without emitting events, because the client has received them. Random numbers depend only
on seed and position, so the resumed answer equals the uninterrupted one.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from baton_api.errors import InvalidRequest
from baton_api.messages import TokenChoice
from baton_api.stream_comments import BODY, Beginning, Resumption, begin_line, tokens_line
from baton_engine.api.answer_shape import Choice, Resumable
from baton_engine.api.fields import Fields
from baton_engine.api.streaming import Usage
from baton_engine.api.transcript import Piece
from baton_engine.api.work import Prompt, Work
from baton_engine.requests import FinishReason, Output


def resumable(work: Work) -> bool:
    """Return whether another worker can resume the answer."""
    single = len(work.prompts) == work.parameters.n == 1
    reads = work.parameters.sampling.prompt_logprobs is not None
    return work.parameters.streaming.wanted and single and not reads and isinstance(work.shape, Resumable)


def resume_start(work: Work, cached_tokens: int) -> bytes:
    """Return the resume state before the first event."""
    assert isinstance(work.shape, Resumable)
    begun = Beginning(work.shape.id, work.shape.created, work.parameters.seed, cached_tokens)
    return begin_line(begun)


def resume_tokens(piece: Piece) -> bytes:
    """Return the resume state after the events of a piece."""
    if not piece.tokens and piece.finish is None:
        return b""
    return tokens_line([choice.token for choice in piece.tokens], ended=piece.finish is not None)


def read_resumption(fields: Fields, vocab: int) -> Resumption | None:
    """Read the router's resume state of an answer that another worker began. Raises InvalidRequest."""
    given = fields.mapping(BODY)
    if given is None:
        return None
    try:
        resumption = msgspec.convert(given, Resumption)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"Invalid '{BODY}': {error}.", param=BODY) from error
    if not all(0 <= token < vocab for token in resumption.tokens):
        raise InvalidRequest(
            f"Invalid '{BODY}': a token id is outside the vocabulary of {vocab} tokens.", param=BODY
        )
    return resumption


def resumed(work: Work, resumption: Resumption) -> Work:
    """Return `work` as continuation of an answer: with its id and seed, and its tokens after the prompt."""
    if not resumable(work):
        raise InvalidRequest(
            "The request cannot be resumed: only streams with one choice can be resumed.", param=BODY
        )
    (prompt,), drawn = work.prompts, tuple(resumption.tokens)
    left = prompt.max_tokens - len(drawn)
    if left < 0 or (left == 0 and not resumption.ended):
        raise InvalidRequest(
            f"Invalid '{BODY}': it has {len(drawn)} tokens, but the request allows {prompt.max_tokens}.",
            param=BODY,
        )
    shape, begun = work.shape, resumption.beginning
    assert isinstance(shape, Resumable)
    shape.resume(begun.id, begun.created)
    sampling = replace(work.parameters.sampling, drawn=len(drawn))
    parameters = replace(work.parameters, seed=begun.seed, sampling=sampling)
    return replace(
        work,
        prompts=(Prompt(prompt.tokens + drawn, left),),
        parameters=parameters,
        resumption=resumption,
    )


def catch_up(work: Work, choice: Choice) -> None:
    """Set a choice and its shape to the state at the interruption."""
    assert work.resumption is not None
    choice.cached_tokens = work.resumption.beginning.cached_tokens
    if not work.resumption.tokens:
        return
    tokens = tuple(TokenChoice(token=token) for token in work.resumption.tokens)
    piece = choice.transcript.push(Output(choice.request.id, tokens))
    work.shape.events(choice, piece, lambda: Usage(0, 0, 0))
    if work.resumption.ended:
        choice.transcript.finish = FinishReason.STOP  # the client has received the actual reason
