"""
One forward pass: the pending tokens of several requests, laid end to end.

There is no padding and no phase. A row is one request; a row with one token is what others call
decode, a row with many is a chunk of prefill, and both may be in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BatchRow:
    """One request's share of a pass."""

    tokens: Sequence[int]
    """The pending tokens that this pass computes, at least one."""
    start: int
    """Position of the first of them: tokens before it are in the cache."""
    blocks: Sequence[int]
    """The request's block ids; they have room for `start + len(tokens)` tokens."""
    wanted: int
    """Of how many of the last tokens the results are needed: 1 once the pass reaches the end, more for a
    request that looks at its prompt."""
    table: NDArray[np.int32] | None = None
    """`blocks` as an array, where the caller keeps one: it is copied faster."""

    @property
    def context(self) -> int:
        """Tokens in the cache after this pass."""
        return self.start + len(self.tokens)


class Batch:
    """
    Rows as tensors. T tokens in all, R rows, B the most blocks of a row, S tokens whose results are wanted.

    Built on the host; `device` is where the model computes.
    """

    def __init__(self, rows: Sequence[BatchRow], block_size: int, device: torch.device) -> None:
        self.rows = tuple(rows)
        self.block_size = block_size
        self.device = device
        starts = [0]
        tokens: list[int] = []
        for row in rows:
            tokens += row.tokens
            starts.append(len(tokens))
        self.tokens: Tensor = self._tensor(np.array(tokens, dtype=np.int64))
        """[T] token ids."""
        self._positions = np.empty(len(tokens), dtype=np.int64)
        for row, start, stop in zip(rows, starts, starts[1:], strict=False):
            if stop - start == 1:
                self._positions[start] = row.start
            else:
                self._positions[start:stop] = np.arange(row.start, row.context)
        self.positions: Tensor = self._tensor(self._positions)
        """[T] positions in their sequences, from 0."""
        self.starts = tuple(starts)
        """R + 1 offsets: row r is tokens starts[r] to starts[r + 1]."""
        self.contexts = tuple([row.context for row in rows])
        """R lengths of cached context after this pass."""
        wanted: list[int] = []
        for row, stop in zip(rows, starts[1:], strict=True):
            wanted += range(stop - row.wanted, stop)
        self.wanted_at: Tensor = self._tensor(np.array(wanted, dtype=np.int64))
        """[S] offsets of the tokens whose results are wanted, in order."""

    def _tensor(self, values: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    @property
    def size(self) -> int:
        """T, the tokens that this pass computes."""
        return self.starts[-1]

    @cached_property
    def slots(self) -> Tensor:
        """[T] int64: block id * block_size + offset at which each token's KV is written."""
        offsets = self._positions // self.block_size
        owners = np.repeat(np.arange(len(self.rows)), np.diff(self.starts))
        blocks = self._tables[owners, offsets].astype(np.int64)
        return self._tensor(blocks * self.block_size + self._positions % self.block_size)

    @cached_property
    def block_table(self) -> Tensor:
        """[R, B] int32 block ids of each row's context, padded with 0."""
        return self._tensor(self._tables)

    @cached_property
    def _tables(self) -> NDArray[np.int32]:
        counts = [-(-context // self.block_size) for context in self.contexts]
        tables = np.zeros((len(counts), max(counts)), dtype=np.int32)
        for index, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            tables[index, :count] = row.blocks[:count] if row.table is None else row.table[:count]
        return tables
