"""
The input of one forward pass: the pending tokens of several requests, concatenated without padding.

A row holds the tokens of one request. Rows of one token (decode) and rows of many (a chunk of prefill) may
be in the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class PassInterrupted(Exception):
    """`Model.interrupt` ended a pass early. It has no results, and can be computed again."""


@dataclass(frozen=True, slots=True)
class BatchRow:
    """The tokens of one request in a pass."""

    tokens: Sequence[int]
    """The pending tokens that this pass computes, at least one."""
    start: int
    """Position of the first of them; the tokens before it are in the cache."""
    blocks: Sequence[int]
    """The request's block ids, enough for `start + len(tokens)` tokens."""
    wanted: int
    """Number of last tokens whose results are needed: 1 if the pass reaches the end of the sequence, more for
    a request with outputs about its prompt."""
    table: NDArray[np.int32] | None = None
    """`blocks` as an array, if the caller has one: it is copied faster."""
    adapter: Any = None
    """The request's adapter, as `Model.prepare_adapter` returned it. None: the base model."""

    @property
    def context(self) -> int:
        """Tokens in the cache after this pass."""
        return self.start + len(self.tokens)


class Batch:
    """
    Rows as tensors: T tokens, R rows, at most B blocks per row, S tokens whose results are needed.

    Built on the host and copied to `device`, on which the model computes.
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
        """[T] positions in the sequences, from 0."""
        self.starts = tuple(starts)
        """R + 1 offsets: row r has the tokens starts[r] to starts[r + 1]."""
        self.contexts = tuple([row.context for row in rows])
        """R context lengths after this pass, in tokens."""
        wanted: list[int] = []
        for row, stop in zip(rows, starts[1:], strict=True):
            wanted += range(stop - row.wanted, stop)
        self.wanted_at: Tensor = self._tensor(np.array(wanted, dtype=np.int64))
        """[S] offsets of the tokens whose results are needed, in order."""

    def adapted(self, *, wanted: bool) -> list[tuple[slice, Any]]:
        """Return the tokens of each row with an adapter, among all tokens or among `wanted_at`."""
        counts = [row.wanted if wanted else len(row.tokens) for row in self.rows]
        spans, start = [], 0
        for row, count in zip(self.rows, counts, strict=True):
            if row.adapter is not None:
                spans.append((slice(start, start + count), row.adapter))
            start += count
        return spans

    def _tensor(self, values: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self.device, non_blocking=True)

    @property
    def size(self) -> int:
        """T, the number of tokens that this pass computes."""
        return self.starts[-1]

    @cached_property
    def slots(self) -> Tensor:
        """[T] int64: for each token, block id * block_size + offset to which its KV is written."""
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
