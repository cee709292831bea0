"""Logprobs of sampled tokens and of their alternatives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from baton_api.messages import TokenChoice
from baton_engine.sampling.state import SamplingState
from baton_engine.streams import copied, to_host

ALTERNATIVES = 20
"""Number of alternatives from which logprobs are selected, so that ties have the same order for any
number."""


class Logprobs:
    """Logprobs of the rows that request them, computed before logits are modified."""

    def __init__(self, logits: Tensor, states: Sequence[SamplingState]) -> None:
        self._states = states
        self.rows = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        """Rows that request logprobs."""
        self._position_of = {row: position for position, row in enumerate(self.rows)}
        if not self.rows:
            return
        self._values = logits[copied(np.array(self.rows), logits.device)].log_softmax(-1)
        self._chosen: Tensor
        self._named: dict[int, Tensor] = {}
        if any(states[row].params.logprobs for row in self.rows):
            top, ids = self._values.topk(min(ALTERNATIVES, logits.shape[1]))
            self._top, self._ids = to_host(top), to_host(ids)

    def gather(self, tokens: Tensor) -> None:
        """Copy the logprobs of the selected tokens [S], and of ids that requests name, to the host."""
        device = tokens.device
        selected = tokens[copied(np.array(self.rows), device)].clamp(min=0).long()
        self._chosen = to_host(self._values.gather(1, selected[:, None]).squeeze(1))
        for row, position in self._position_of.items():
            if named_ids := self._states[row].params.logprob_ids:
                named = copied(np.array(named_ids, dtype=np.int64), device)
                self._named[row] = to_host(self._values[position].index_select(0, named))

    def choice(self, row: int, token: int) -> TokenChoice:
        """Return the token of `row` with its logprobs, after an event behind `gather`."""
        params = self._states[row].params
        if params.logprobs is None:
            return TokenChoice(token=token)
        position = self._position_of[row]
        top: list[tuple[int, float]] = []
        if row in self._named:
            top = list(zip(params.logprob_ids, self._named[row].tolist(), strict=True))
        elif count := params.logprobs:
            ids, values = self._ids[position, :count].tolist(), self._top[position, :count].tolist()
            top = list(zip(ids, values, strict=True))
        return TokenChoice(token=token, logprob=self._chosen[position].item(), top=top)
