"""
The input of one forward pass: the pending tokens of several requests, concatenated without padding.

A row holds the tokens of one request. Rows of one token (decode) and rows of many (a chunk of prefill) may
be in the same batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_engine.streams import copied, staged


class PassInterrupted(Exception):
    """`Model.interrupt` ended a pass early. It has no results, and can be computed again."""


class BatchRow(msgspec.Struct, frozen=True):
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

    Built on the host. A tensor is copied to `device`, on which the model computes, when it is first used.
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
        self.fed: Tensor | None = None
        """`tokens`, if the host does not know them."""
        self.continues = False
        """Whether `continue_states` was called."""
        self.token_ids: NDArray[np.int64] = np.array(tokens, dtype=np.int64)
        """`tokens` on the host."""
        self.token_positions: NDArray[np.int64] = np.empty(len(tokens), dtype=np.int64)
        """`positions` on the host."""
        for row, start, stop in zip(rows, starts, starts[1:], strict=False):
            if stop - start == 1:
                self.token_positions[start] = row.start
            else:
                self.token_positions[start:stop] = np.arange(row.start, row.context)
        self.starts = tuple(starts)
        """R + 1 offsets: row r has the tokens starts[r] to starts[r + 1]."""
        self.contexts = tuple([row.context for row in rows])
        """R context lengths after this pass, in tokens."""

    @cached_property
    def tokens(self) -> Tensor:
        """[T] token ids."""
        return self._tensor(self.token_ids) if self.fed is None else self.fed

    def feed(self, tokens: Tensor) -> None:
        """Replace the token ids by `tokens` [T] int64 on the device, which the host does not know."""
        self.fed = tokens

    @cached_property
    def positions(self) -> Tensor:
        """[T] positions in the sequences, from 0."""
        return self._tensor(self.token_positions)

    @cached_property
    def wanted_at(self) -> Tensor:
        """[S] offsets of the tokens whose results are needed, in order."""
        if self.decodes:
            return self._tensor(np.arange(self.size))
        wanted: list[int] = []
        for row, stop in zip(self.rows, self.starts[1:], strict=True):
            wanted += range(stop - row.wanted, stop)
        return self._tensor(np.array(wanted, dtype=np.int64))

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
        return copied(values, self.device)

    @property
    def size(self) -> int:
        """T, the number of tokens that this pass computes."""
        return self.starts[-1]

    @cached_property
    def decodes(self) -> bool:
        """Whether the result of each token is needed."""
        return all(row.wanted == len(row.tokens) for row in self.rows)

    @property
    def has_adapters(self) -> bool:
        return any(row.adapter is not None for row in self.rows)

    @property
    def token_adapters(self) -> NDArray[np.int64]:
        """[T] for each token the slot of its adapter on the device, or -1."""
        slots = [-1 if row.adapter is None else row.adapter.slot for row in self.rows]
        return np.array(slots, dtype=np.int64)[self._owners]

    @cached_property
    def slots(self) -> Tensor:
        """[T] int64: for each token, block id * block_size + offset to which its KV is written."""
        return self._tensor(self.token_slots)

    @cached_property
    def block_table(self) -> Tensor:
        """[R, B] int32 block ids of each row's context, padded with 0."""
        return self._tensor(self.tables)

    @cached_property
    def token_slots(self) -> NDArray[np.int64]:
        """`slots` on the host."""
        offsets = self.token_positions // self.block_size
        blocks = self.tables[self._owners, offsets].astype(np.int64)
        return blocks * self.block_size + self.token_positions % self.block_size

    @cached_property
    def _owners(self) -> NDArray[np.int64]:
        """[T] for each token its row."""
        return np.repeat(np.arange(len(self.rows)), np.diff(self.starts))

    @property
    def token_tables(self) -> NDArray[np.int32]:
        """[T, B] for each token the block ids of its row, on the host."""
        return self.tables if len(self.rows) == self.size else self.tables[self._owners]

    @cached_property
    def first_tokens(self) -> Tensor:
        """[R] int64 offsets of the first token of each row."""
        return self._tensor(np.array(self.starts[:-1]))

    @cached_property
    def state_blocks(self) -> Tensor:
        """`token_state_blocks` on the device."""
        return self._tensor(self.token_state_blocks)

    @cached_property
    def token_state_blocks(self) -> NDArray[np.int64]:
        """
        [2, T] ids of blocks whose state (`HeadCache`) a token reads and writes.

        The first token of a row reads that of the token before it, in block 0 if there is none; the others
        have -1. The last token of a row in each block writes its own, and the others write to block 0.
        """
        firsts, lasts = np.array(self.starts[:-1]), np.array(self.starts[1:]) - 1
        read = np.full(self.size, -1, dtype=np.int64)
        before = self.token_positions[firsts] - 1
        tables = self.tables[np.arange(len(self.rows)), np.maximum(before, 0) // self.block_size]
        read[firsts] = np.where(before >= 0, tables, 0)
        ends = (self.token_positions + 1) % self.block_size == 0
        ends[lasts] = True
        return np.stack((read, np.where(ends, self.token_slots // self.block_size, 0)))

    def continue_states(self) -> None:
        """Let no token read or write the state of a block: `DraftHead` has those of its last pass."""
        self.continues = True
        self.token_state_blocks = np.stack((np.full(self.size, -1), np.zeros(self.size, dtype=np.int64)))

    @property
    def values(self) -> NDArray[np.int64]:
        """[3, T] token ids, positions and slots on the host."""
        return np.stack((self.token_ids, self.token_positions, self.token_slots))

    @cached_property
    def tables(self) -> NDArray[np.int32]:
        """`block_table` on the host."""
        counts = [-(-context // self.block_size) for context in self.contexts]
        tables = np.zeros((len(counts), max(counts)), dtype=np.int32)
        for index, (row, count) in enumerate(zip(self.rows, counts, strict=True)):
            tables[index, :count] = row.blocks[:count] if row.table is None else row.table[:count]
        return tables


class StaticBatch(Batch):
    """
    Rows of one token each, in tensors that keep their places: the input of a captured pass.

    `load` replaces their values. A row without a token has the slot -1: its KV is not stored, it attends to
    nothing, and its results are not used. `rows`, `contexts` and the values on the host mean nothing.
    """

    def __init__(
        self,
        rows: int,
        blocks: int,
        most_context: int,
        block_size: int,
        device: torch.device,
        adapter_rank: int = 0,
    ) -> None:
        """
        `blocks`: blocks of the longest row. `most_context`: sum of the context lengths. `adapter_rank`: the
        highest one of an adapter; 0 if rows have none.
        """
        super().__init__([BatchRow([0], 0, [0], 1)] * rows, block_size, device)
        self.most_context = most_context
        self.adapter_rank = adapter_rank
        self._inputs: Tensor = torch.zeros((6, rows), dtype=torch.int64, device=device)
        self.tokens, self.positions, self.slots, adapters = self._inputs[:4]
        self._inputs[2:4].fill_(-1)
        self.state_blocks = self._inputs[4:]
        self.adapters: Tensor | None = adapters if adapter_rank else None
        """[rows] `token_adapters`."""
        self.block_table = torch.zeros((rows, blocks), dtype=torch.int32, device=device)

    def fits(self, batch: Batch) -> bool:
        """
        Return whether `load` accepts the batch, and a plain pass would compute the same.

        A token of a longer row is a row here: keys are stored before attention, which ends at its position.
        """
        if not batch.decodes or batch.size > self.size or batch.has_adapters != self.has_adapters:
            return False
        contexts = batch.token_positions + 1
        longest = self.block_table.shape[1] * self.block_size
        return bool(contexts.max() <= longest and contexts.sum() <= self.most_context)

    @property
    def has_adapters(self) -> bool:
        return self.adapters is not None

    def load(
        self,
        values: NDArray[np.int64],
        tables: NDArray[np.int32],
        fed: Tensor | None = None,
        adapters: NDArray[np.int64] | None = None,
        state_blocks: NDArray[np.int64] | None = None,
    ) -> None:
        """
        Copy values of a batch, which `fits`.

        They are its `values`, `token_tables`, `fed`, `token_adapters` if this batch has adapters, and
        `token_state_blocks` if the cache has states.
        """
        rows, (count, blocks) = self.size, tables.shape
        inputs = np.zeros((6, rows), dtype=np.int64)
        inputs[2:4] = -1
        inputs[:3, :count] = values
        if adapters is not None:
            inputs[3, :count] = adapters
        if state_blocks is not None:
            inputs[4:, :count] = state_blocks
        self._inputs.copy_(staged(inputs, self.device), non_blocking=True)
        if fed is not None:
            self.tokens[:count].copy_(fed)
        self.block_table[:count, :blocks].copy_(staged(tables, self.device), non_blocking=True)
