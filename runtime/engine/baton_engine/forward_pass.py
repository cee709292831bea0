"""One pass through the model: rows out of jobs, the forward pass, the draw, as separate steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from baton_api.errors import BatonError
from baton_api.messages import TokenChoice
from baton_engine.batch import Batch, Row
from baton_engine.kv.cache import KVCache
from baton_engine.model.decoder import Model
from baton_engine.sampling import sampler
from baton_engine.sampling.mask_filler import Mask, Masks
from baton_engine.sampling.state import Draw
from baton_engine.scheduling.sequence import Job


class Share(NamedTuple):
    """What one job gets of a pass. Its figures are those from before the pass."""

    job: Job
    tokens: int
    """How many of its pending tokens are computed."""
    draws: bool
    """Whether these are all, so that its next token can be drawn."""
    ends: bool
    """Whether these are all, and no token is to follow them."""
    generates: bool
    """Whether the token computed was drawn, not part of a prompt."""
    skipped: int = 0
    """How many of them are before the first one that the job's reading wants."""
    reads: int = 0
    """How many of them it wants from there on."""

    @property
    def wanted(self) -> int:
        """Of how many of the last tokens the results are needed."""
        return self.tokens - self.skipped if self.reads else int(self.draws)


def share(job: Job, tokens: int) -> Share:
    request, reading = job.request, job.reading
    last, draws = tokens == request.pending, request.draws
    skipped = reads = 0
    if reading is not None:
        skipped = max(0, reading.needed - request.computed)
        reads = max(0, min(tokens, reading.end - request.computed) - skipped)
    return Share(job, tokens, last and draws, last and not draws, job.decoding, skipped, reads)


Drawn = TokenChoice | BatonError | None
"""A token, why none may be drawn, or None for a job whose logits are not finite."""


def run(
    model: Model,
    cache: KVCache,
    shares: list[Share],
    masks: Masks,
    timed: Callable[[], float],
    settle: Callable[[], None],
) -> tuple[list[Drawn], float]:
    """
    What is drawn for each share that draws, in their order, and the seconds of the forward pass alone.

    `settle` is `settling` of the cache's device.
    """
    batch = Batch([_row(share) for share in shares], cache.block_size, cache.kv.device)
    draws = [share.job.draw for share in shares if share.draws]
    filling = masks.begin(draws)
    try:
        started = timed()
        if any(share.reads for share in shares):
            states = model.hidden_states(batch, cache)
            logits = model.project(_read(model, shares, states))
        else:
            logits = model.forward(batch, cache)
        settle()
        seconds = timed() - started
    finally:
        filled = filling.wait()
    return (_draw(logits, draws, filled) if draws else []), seconds


def settling(device: torch.device) -> Callable[[], None]:
    """
    Waits until the device has computed what it was given, and raises what went wrong there.

    An accelerator only queues its work: without the wait a pass would seem to take no time, its failure would
    come up in a later one, and its blocks would be announced before they are written.
    """
    if device.type == "cpu":
        return lambda: None
    return partial(torch.accelerator.synchronize, device)


def is_lasting(error: BaseException) -> bool:
    """
    Whether every later pass of this process would fail too.

    An error of an accelerator stays in its context until the process ends; a lack of memory does not.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, torch.AcceleratorError) or "CUDA error" in str(error)


def _draw(logits: Tensor, draws: list[Draw], masks: list[Mask]) -> list[Drawn]:
    permitted = [None if isinstance(mask, BatonError) else mask for mask in masks]
    drawn = sampler.sample(logits, draws, permitted)
    return [
        mask if isinstance(mask, BatonError) else choice for mask, choice in zip(masks, drawn, strict=True)
    ]


def _read(model: Model, shares: list[Share], states: Tensor) -> Tensor:
    """Hand each reading the states that it wants; what is left are those to draw from."""
    drawn: list[int] = []
    place = 0
    for share in shares:
        if share.reads:
            assert share.job.reading is not None
            share.job.reading.read(states[place : place + share.reads], model.project)
        place += share.wanted
        if share.draws:
            drawn.append(place - 1)
    return states[drawn]


def _row(share: Share) -> Row:
    job, start = share.job, share.job.request.computed
    return Row(
        job.tokens(start, start + share.tokens), start, job.request.blocks, share.wanted, table=job.table
    )
