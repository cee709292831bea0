"""One pass through the model: rows out of jobs, the forward pass, the draw, as separate steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from baton_api.messages import TokenChoice
from baton_engine import sampler
from baton_engine.batch import Batch, Row
from baton_engine.cache import KVCache
from baton_engine.jobs import Job
from baton_engine.model.decoder import Model


@dataclass(frozen=True, slots=True)
class Share:
    """What one job gets of a pass. Its figures are those from before the pass."""

    job: Job
    tokens: int
    """How many of its pending tokens are computed."""
    draws: bool
    """Whether these are all, so that its next token can be drawn."""
    generates: bool
    """Whether the token computed was drawn, not part of a prompt."""


def share(job: Job, tokens: int) -> Share:
    return Share(job, tokens, tokens == job.request.pending, job.decoding)


def run(
    model: Model, cache: KVCache, shares: list[Share], timed: Callable[[], float]
) -> tuple[list[TokenChoice | None], float]:
    """
    One choice for each share that draws, in their order, and the seconds of the forward pass alone.

    None instead of a choice for a job whose logits are not finite.
    """
    batch = Batch([_row(share) for share in shares], cache.block_size, cache.kv.device)
    started = timed()
    logits = model.forward(batch, cache)
    seconds = timed() - started
    draws = [share.job.draw for share in shares if share.draws]
    return (sampler.sample(logits, draws) if draws else []), seconds


def _row(share: Share) -> Row:
    job, start = share.job, share.job.request.computed
    return Row(
        job.tokens(start, start + share.tokens), start, job.request.blocks, share.draws, table=job.table
    )
