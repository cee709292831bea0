"""Checks a decode worker's prompt before anything is computed for it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton_api.errors import InvalidRequest
from baton_api.hashing import chain_hash, root_hash
from baton_api.messages import Prefill

SESSION_LIMIT = 512
"""Maximum characters of a session's name."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """The values that a prompt is checked against."""

    vocab: int
    max_tokens: int
    """Maximum tokens of a prompt."""
    block_size: int


def check(prefill: Prefill, limits: PromptLimits) -> list[bytes]:
    """
    Return the chain hashes of the prompt's blocks, a partial last one included. Raises InvalidRequest.

    Also compares the parent hash, which differs if the two workers have different tokens.
    """
    tokens, size = prefill.tokens, limits.block_size
    if not 0 < len(prefill.session) <= SESSION_LIMIT:
        raise InvalidRequest(
            f"the session's name has {len(prefill.session)} characters, not 1 to {SESSION_LIMIT}"
        )
    if not 0 < len(tokens) <= limits.max_tokens:
        raise InvalidRequest(f"the prompt has {len(tokens)} tokens, not 1 to {limits.max_tokens}")
    if min(tokens) < 0 or max(tokens) >= limits.vocab:
        raise InvalidRequest(f"the prompt has token {max(tokens)}, but the vocabulary has {limits.vocab}")
    blocks = -(-len(tokens) // size)
    if not 0 <= prefill.start_block < blocks:
        raise InvalidRequest(f"block {prefill.start_block} is asked for, but the prompt has {blocks}")
    if not 0 < prefill.deadline_s < math.inf:
        raise InvalidRequest(f"the deadline of {prefill.deadline_s} s is not in the future")
    problem = prefill.sampling.problem(limits.vocab)
    if problem:
        raise InvalidRequest(problem)
    hashes: list[bytes] = []
    parent = root_hash(prefill.salt, prefill.adapter_digest)
    for block in range(blocks):
        if block == prefill.start_block and parent != prefill.parent:
            raise InvalidRequest(f"the tokens before block {block} are not those that the decode worker has")
        parent = chain_hash(parent, tokens[block * size : (block + 1) * size])
        hashes.append(parent)
    return hashes
