"""
Streams that another worker can resume: the state sent along with them, and its use.

A router that asks for it (`x-baton-follow`) is told between the events how the answer began and, behind
the events of each piece, the tokens that they came of. From the request and these tokens any worker of the
model can go on at the very next one: the tokens join the prompt, their text goes through the transcript as
if it had just come, and the events that it leads to are left out, because the client has them. A random
number depends on the seed and the position alone, so the answer is the one that would have come.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from baton_api.errors import InvalidRequest
from baton_api.messages import TokenChoice
from baton_api.resuming import BODY, Beginning, Resumption, begin_line, tokens_line
from baton_engine.api.answer_shape import Choice, Resumable
from baton_engine.api.fields import Fields
from baton_engine.api.streaming import Usage
from baton_engine.api.transcript import Piece
from baton_engine.api.work import Prompt, Work
from baton_engine.requests import FinishReason, Output


def resumable(work: Work) -> bool:
    """Whether a worker that did not begin the answer can end it."""
    single = len(work.prompts) == work.parameters.n == 1
    reads = work.parameters.sampling.prompt_logprobs is not None
    return work.parameters.streaming.wanted and single and not reads and isinstance(work.shape, Resumable)


def beginning(work: Work, cached_tokens: int) -> bytes:
    """What stands before the events of a resumable answer."""
    assert isinstance(work.shape, Resumable)
    begun = Beginning(work.shape.id, work.shape.created, work.parameters.seed, cached_tokens)
    return begin_line(begun)


def behind(piece: Piece) -> bytes:
    """What stands behind the events of a piece."""
    if not piece.tokens and piece.finish is None:
        return b""
    return tokens_line([choice.token for choice in piece.tokens], ended=piece.finish is not None)


def read_resumption(fields: Fields, vocab: int) -> Resumption | None:
    """What the router says of an answer that was begun elsewhere. Raises InvalidRequest."""
    given = fields.mapping(BODY)
    if given is None:
        return None
    try:
        resumption = msgspec.convert(given, Resumption)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"Invalid '{BODY}': {error}.", param=BODY) from error
    if not all(0 <= token < vocab for token in resumption.tokens):
        raise InvalidRequest(f"Invalid '{BODY}': a token is none of the {vocab} there are.", param=BODY)
    return resumption


def resumed(work: Work, resumption: Resumption) -> Work:
    """`work` as a part of the answer that was begun: its id, its seed, its tokens behind the prompt."""
    if not resumable(work):
        raise InvalidRequest("This answer has several choices, or is no stream of chunks.", param=BODY)
    (prompt,), drawn = work.prompts, tuple(resumption.tokens)
    left = prompt.max_tokens - len(drawn)
    if left < 0 or (left == 0 and not resumption.ended):
        raise InvalidRequest(
            f"{len(drawn)} tokens were drawn, but the request gets {prompt.max_tokens}.", param=BODY
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
    """Bring a choice and its shape to where the stream broke off."""
    assert work.resumption is not None
    choice.cached_tokens = work.resumption.beginning.cached_tokens
    if not work.resumption.tokens:
        return
    tokens = tuple(TokenChoice(token=token) for token in work.resumption.tokens)
    piece = choice.transcript.push(Output(choice.request.id, tokens))
    work.shape.events(choice, piece, lambda: Usage(0, 0, 0))
    if work.resumption.ended:
        choice.transcript.finish = FinishReason.STOP  # or another that the client has been told already
