"""Whether a decode worker's wish makes sense, decided before anything is computed for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton_api.errors import InvalidRequest
from baton_api.hashing import chain_hash, root_hash
from baton_api.messages import Prefill

ROOM_LIMIT = 512
"""Characters in the name of a room."""


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
    problem = ask.sampling.problem(limits.vocab)
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
