"""
The draft head of all ranks, on rank 0: each rank computes its part of the head's passes, and has its states.

Rank 0 has the logits, so it chooses the tokens of drafts, and sends them with the next pass.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from baton_engine.batch import Batch
from baton_engine.kv.cache import KVCache
from baton_engine.model.draft_head import DraftHead
from baton_engine.parallel.messages import Draft, KeepStates, ReserveDrafts, SelectStates
from baton_engine.parallel.ranks import Ranks


class ParallelHead:
    """The same as a `DraftHead`. Methods raise RankFailed."""

    def __init__(self, part: DraftHead, ranks: Ranks) -> None:
        """`part` is rank 0's."""
        self.part = part
        self.ranks = ranks

    @property
    def capturable(self) -> bool:
        return self.part.capturable

    def reserve(self, rows: int) -> None:
        self.ranks.launch(ReserveDrafts(rows=rows), lambda: self.part.reserve(rows))

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        return self.ranks.launch(Draft.of(batch), lambda: self.part.forward(batch, cache))

    def keep(self, rows: Sequence[int], blocks: Sequence[int], cache: KVCache) -> None:
        message = KeepStates(rows=list(rows), blocks=list(blocks))
        self.ranks.launch(message, lambda: self.part.keep(rows, blocks, cache))

    def select(self, rows: Sequence[int]) -> None:
        self.ranks.launch(SelectStates(rows=list(rows)), lambda: self.part.select(rows))
