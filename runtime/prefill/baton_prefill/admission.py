"""Whether a decode worker's wish makes sense, decided before anything is computed for it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from baton_api.errors import InvalidRequest
from baton_api.hashing import chain_hash, root_hash
from baton_api.messages import Prefill, Sampling

ROOM_LIMIT = 512
"""Characters in the name of a room."""

TOP_LOGPROBS_LIMIT = 20


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """What a prompt is measured by."""

    vocab: int
    max_tokens: int
    """Most tokens of a prompt."""
    block_size: int


def check(ask: Prefill, limits: PromptLimits) -> list[bytes]:
    """
    The chain hashes of the prompt's blocks, the part in the last one included.

    Raises InvalidRequest, which says what is wrong.

    The parent hash is compared on the way: it differs if the two workers mean different tokens.
    """
    tokens, size = ask.tokens, limits.block_size
    if not 0 < len(ask.room) <= ROOM_LIMIT:
        raise InvalidRequest(f"the room's name has {len(ask.room)} characters, not 1 to {ROOM_LIMIT}")
    if not 0 < len(tokens) <= limits.max_tokens:
        raise InvalidRequest(f"the prompt has {len(tokens)} tokens, not 1 to {limits.max_tokens}")
    if min(tokens) < 0 or max(tokens) >= limits.vocab:
        raise InvalidRequest(f"the prompt has token {max(tokens)}, but the vocabulary has {limits.vocab}")
    blocks = -(-len(tokens) // size)
    if not 0 <= ask.start_block < blocks:
        raise InvalidRequest(f"block {ask.start_block} is asked for, but the prompt has {blocks}")
    if not 0 < ask.deadline_s < math.inf:
        raise InvalidRequest(f"the deadline of {ask.deadline_s} s is not in the future")
    problem = _sampling_problem(ask.sampling, limits.vocab)
    if problem:
        raise InvalidRequest(problem)
    hashes: list[bytes] = []
    parent = root_hash(ask.salt)
    for block in range(blocks):
        if block == ask.start_block and parent != ask.parent:
            raise InvalidRequest(f"the tokens before block {block} are not those that the decode worker has")
        parent = chain_hash(parent, tokens[block * size : (block + 1) * size])
        hashes.append(parent)
    return hashes


def _sampling_problem(sampling: Sampling, vocab: int) -> str | None:
    finite = (
        sampling.temperature,
        sampling.presence_penalty,
        sampling.frequency_penalty,
        sampling.repetition_penalty,
        *sampling.logit_bias.values(),
    )
    claims = {
        "a number that is not finite": all(math.isfinite(number) for number in finite),
        "a seed outside 64 bits": 0 <= sampling.seed < 2**64,
        "a negative temperature": sampling.temperature >= 0,
        "a negative top_k": sampling.top_k >= 0,
        "top_p outside 0 to 1": 0 <= sampling.top_p <= 1,
        "min_p outside 0 to 1": 0 <= sampling.min_p <= 1,
        "a repetition penalty that is not positive": sampling.repetition_penalty > 0,
        "too many logprobs": sampling.logprobs is None or 0 <= sampling.logprobs <= TOP_LOGPROBS_LIMIT,
        "a token outside the vocabulary": all(0 <= token < vocab for token in _tokens(sampling)),
        "a bad word of no token": all(sampling.bad_words),
        "a thought that never ends": sampling.thinking is None or bool(sampling.thinking.end),
    }
    wrong = [name for name, holds in claims.items() if not holds]
    return f"the sampling has {wrong[0]}" if wrong else None


def _tokens(sampling: Sampling) -> Iterator[int]:
    """All ids that it names."""
    yield from sampling.logit_bias
    yield from sampling.logprob_ids
    yield from sampling.stop_ids
    yield from sampling.allowed_ids
    for word in sampling.bad_words:
        yield from word
    if sampling.thinking is not None:
        yield from sampling.thinking.start
        yield from sampling.thinking.end
