"""
Outputs of a prompt itself: one vector, or a logprob for each token.

A prompt output receives the final hidden states chunk by chunk and reduces them immediately. It stores one
vector, or a few numbers per token. Its state survives a retraction: the prefix cache may then provide the
positions that were processed, and later positions must be computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from baton_engine.requests import Pooling, PromptLogprobs, Request, Vector
from baton_engine.sampling.logprobs import ALTERNATIVES
from baton_engine.streams import copied

ROWS = 64
"""Number of tokens whose logits are computed at once: 40 MB for a vocabulary of 150,000."""

Project = Callable[[Tensor], Tensor]
"""The model's head: converts states [S, N] to logits [S, V]."""


class PromptOutput(Protocol):
    """Output of one prompt. Used on the engine's thread only."""

    next_position: int
    """First position whose state is needed. Increases with `update`."""
    end: int
    """First position whose state is not needed."""

    def update(self, states: Tensor, project: Project) -> None:
        """Process the states of the positions from `next_position` on."""
        ...

    @property
    def result(self) -> Vector | PromptLogprobs | None:
        """The output after all updates. None if it contains numbers that are not finite."""
        ...


def prompt_output_of(request: Request) -> PromptOutput | None:
    """Create the prompt output of a request; None if it does not request one."""
    if request.pooling is not None:
        return _Pooled(request.pooling, len(request.prompt))
    if request.sampling.prompt_logprobs is not None:
        return _Logprobs(request.prompt, request.sampling.prompt_logprobs)
    return None


class _Pooled:
    """Mean of all states, the first or the last state, or the scores of the first state."""

    def __init__(self, pooling: Pooling, length: int) -> None:
        self.next_position = length - 1 if pooling is Pooling.LAST else 0
        self.end = 1 if pooling in (Pooling.CLS, Pooling.SCORE) else length
        self._scores = pooling is Pooling.SCORE
        self._count = self.end - self.next_position
        self._sum: Tensor | None = None

    def update(self, states: Tensor, project: Project) -> None:
        states = project(states) if self._scores else states
        total = states.sum(0, dtype=torch.float64)  # float64 makes the result independent of chunks
        self._sum = total if self._sum is None else self._sum + total
        self.next_position += len(states)

    @property
    def result(self) -> Vector | None:
        assert self._sum is not None
        vector: Vector = (self._sum / self._count).to(torch.float32).cpu().numpy()
        return vector if bool(np.isfinite(vector).all()) else None


class _Logprobs:
    """Logprobs of all prompt tokens except the first."""

    def __init__(self, prompt: tuple[int, ...], alternatives: int) -> None:
        self.next_position = 0
        self.end = len(prompt) - 1
        self._tokens = np.array(prompt, dtype=np.int64)
        self._alternatives = alternatives
        self._parts: list[PromptLogprobs] = []

    def update(self, states: Tensor, project: Project) -> None:
        for first in range(0, len(states), ROWS):
            piece = states[first : first + ROWS]
            values = project(piece).log_softmax(-1)
            start, self.next_position = self.next_position, self.next_position + len(piece)
            tokens = copied(self._tokens[start + 1 : self.next_position + 1], values.device)
            chosen = values.gather(1, tokens[:, None])
            # As in the sampler, so that ties have the same order for any number.
            count = min(ALTERNATIVES, values.shape[1]) if self._alternatives else 0
            top, ids = values.topk(count)
            part = PromptLogprobs(
                logprobs=chosen[:, 0].cpu().numpy(),
                ranks=((values > chosen).sum(-1) + 1).cpu().numpy(),
                top_ids=ids[:, : self._alternatives].cpu().numpy(),
                top=top[:, : self._alternatives].cpu().numpy(),
            )
            self._parts.append(part)

    @property
    def result(self) -> PromptLogprobs | None:
        parts = self._parts or [_nothing(self._alternatives)]
        if any(np.isnan(part.logprobs).any() for part in parts):
            return None
        return PromptLogprobs(
            logprobs=np.concatenate([part.logprobs for part in parts]),
            ranks=np.concatenate([part.ranks for part in parts]),
            top_ids=np.concatenate([part.top_ids for part in parts]),
            top=np.concatenate([part.top for part in parts]),
        )


def _nothing(alternatives: int) -> PromptLogprobs:
    """Return the result of a prompt with one token."""
    return PromptLogprobs(
        logprobs=np.empty(0, dtype=np.float32),
        ranks=np.empty(0, dtype=np.int64),
        top_ids=np.empty((0, alternatives), dtype=np.int64),
        top=np.empty((0, alternatives), dtype=np.float32),
    )
