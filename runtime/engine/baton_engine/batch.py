"""
One forward pass: the pending tokens of several requests, laid end to end.

There is no padding and no phase. A row is one request; a row with one token is what others call
decode, a row with many is a chunk of prefill, and both may be in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a pass."""

    tokens: Sequence[int]
    """The pending tokens that this pass computes, at least one."""
    start: int
    """Position of the first of them: tokens before it are in the cache."""
    blocks: Sequence[int]
    """The request's block ids; they have room for `start + len(tokens)` tokens."""
    wants_logits: bool
    """Whether the last token's logits are needed: true once the pass reaches the end."""

    @property
    def context(self) -> int:
        """Tokens in the cache after this pass."""
        return self.start + len(self.tokens)


class Batch:
    """
    Rows as tensors. T tokens in all, R rows, B the most blocks of a row, S rows that want logits.

    Built on the host; `device` is where the model computes.
    """

    def __init__(self, rows: Sequence[Row], block_size: int, device: torch.device) -> None:
        self.rows = tuple(rows)
        self.block_size = block_size
        self.device = device
        lengths = [len(row.tokens) for row in rows]
        self.tokens: Tensor = self._tensor([t for row in rows for t in row.tokens], torch.int64)
        """[T] token ids."""
        self.positions: Tensor = self._tensor(
            [p for row in rows for p in range(row.start, row.context)], torch.int64
        )
        """[T] positions in their sequences, from 0."""
        starts = [0]
        for length in lengths:
            starts.append(starts[-1] + length)
        self.starts = tuple(starts)
        """R + 1 offsets: row r is tokens starts[r] to starts[r + 1]."""
        self.contexts = tuple(row.context for row in rows)
        """R lengths of cached context after this pass."""
        self.logits_at: Tensor = self._tensor(
            [starts[r + 1] - 1 for r, row in enumerate(rows) if row.wants_logits], torch.int64
        )
        """[S] token offsets whose logits are wanted, in row order."""

    def _tensor(self, values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device, non_blocking=True)

    @property
    def size(self) -> int:
        """T, the tokens that this pass computes."""
        return self.starts[-1]

    @cached_property
    def slots(self) -> Tensor:
        """[T] int64: block id * block_size + offset at which each token's KV is written."""
        size = self.block_size
        return self._tensor(
            [
                row.blocks[p // size] * size + p % size
                for row in self.rows
                for p in range(row.start, row.context)
            ],
            torch.int64,
        )

    @cached_property
    def block_table(self) -> Tensor:
        """[R, B] int32 block ids of each row's context, padded with 0."""
        counts = [-(-row.context // self.block_size) for row in self.rows]
        width = max(counts)
        return self._tensor(
            [
                [*row.blocks[:count], *[0] * (width - count)]
                for row, count in zip(self.rows, counts, strict=True)
            ],
            torch.int32,
        )
