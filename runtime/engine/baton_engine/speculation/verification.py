"""
Verification of drafts: each position is sampled like in a step of its own.

Positions are sampled one after the other, each with the state that the tokens before it left: random numbers
by position, penalties, token masks and the minimum length. A draft token is accepted if it is the sampled
token. The first other token is still a result of the model; the results after it are dropped.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Callable

from baton_engine import forward_pass
from baton_engine.forward_pass import PassResult, Sampled, ScheduledChunk
from baton_engine.sampling.token_masks import MaskFiller
from baton_engine.scheduling.sequence import Sequence, Stage


def verify(
    chunks: abc.Sequence[ScheduledChunk],
    result: PassResult,
    mask_filler: MaskFiller,
    take: Callable[[Sequence, Sampled], None],
) -> int:
    """
    Sample the positions after accepted draft tokens. Returns the number of accepted tokens.

    The tokens after the pending ones were already added to their sequences. `take` is called for each
    accepted draft token with the token sampled after it, and adds that one to the sequence, or ends it.
    """
    live = list(zip(chunks, result.rows, strict=True))
    accepted = ahead = 0
    while live := [(chunk, row) for chunk, row in live if _accepts(chunk, ahead)]:
        ahead += 1
        accepted += len(live)
        rows = [row + ahead for _, row in live]
        states = [chunk.sequence.sampling_state for chunk, _ in live]
        sampled = forward_pass.sample_rows(result.logits, rows, states, mask_filler)
        for (chunk, _), choice in zip(live, sampled, strict=True):
            take(chunk.sequence, choice)
    return accepted


def _accepts(chunk: ScheduledChunk, ahead: int) -> bool:
    """Return whether the last token of a sequence that still generates is its draft token `ahead`."""
    sequence = chunk.sequence
    return (
        ahead < len(chunk.draft)
        and sequence.stage is Stage.RUNNING
        and sequence.speculates
        and sequence.request.output[-1] == chunk.draft[ahead]
    )
