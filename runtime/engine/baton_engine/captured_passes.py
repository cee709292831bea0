"""
The captured passes of one device, or of one rank's part of a model.

A captured pass is a graph of the launches of `Model.forward` over a `StaticBatch`, with the operations of
other ranks that are part of it. Its replay repeats them with other values in the same memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from baton_engine.batch import Batch, StaticBatch
from baton_engine.kv.cache import KVCache
from baton_engine.streams import DeviceStreams

MOST_CONTEXT = 2**20
"""Sum of the context lengths of a captured pass. Sums of attention take 17 KB per 256 tokens with 32 heads of
128 dimensions, and all captured passes share them."""


class PassModel(Protocol):
    """The part of `Model` that a capture records."""

    def forward(self, batch: Batch, cache: KVCache) -> Tensor: ...


class Passes(Protocol):
    """Captured passes by their numbers of rows: those of one device, or equal ones of all ranks."""

    @property
    def used(self) -> int:
        """Bytes that all captured passes take, on the device where they take most."""
        ...

    def capture(self, rows: int) -> int:
        """Capture a pass. Returns `used`. Raises an error of any kind, and then has not captured it."""
        ...

    def drop(self, rows: int) -> None:
        """Free a captured pass, which is not replayed any more."""
        ...

    def fits(self, rows: int, batch: Batch) -> bool:
        """Return whether the pass of `rows` computes the same as a plain pass of `batch`."""
        ...

    def replay(self, rows: int, batch: Batch) -> Tensor:
        """Compute a batch that fits. Returns logits [rows, V] fp32, which the next replay overwrites."""
        ...

    def clear(self) -> None:
        """Free all captured passes. None may be under way."""
        ...


@dataclass(frozen=True, slots=True)
class CapturedPass:
    """One graph, its input and its result."""

    batch: StaticBatch
    logits: Tensor
    """[rows, V] fp32, overwritten by each replay of any pass."""
    replay: Callable[[], None]


class CapturedPasses:
    """Implementation of `Passes` on one device."""

    def __init__(
        self,
        model: PassModel,
        cache: KVCache,
        max_model_len: int,
        taken: Callable[[], int],
        adapter_rank: int = 0,
        share: Callable[[Tensor], object] = lambda tokens: tokens,
    ) -> None:
        """
        `taken` returns the bytes of the device that this process has. `adapter_rank`: that of `StaticBatch`.

        With several ranks, `share` gives rank 0's token ids to all of them, at the beginning of a pass.
        A device of which a pass is captured has `DeviceStreams`.
        """
        self._model = model
        self._cache = cache
        self._max_model_len = max_model_len
        self._taken = taken
        self._adapter_rank = adapter_rank
        self._share = share
        self._before = taken()
        self._passes: dict[int, CapturedPass] = {}
        self._logits: Tensor | None = None
        """The results of all passes, in memory of the largest one, which is captured first."""

    @property
    def states(self) -> bool:
        """Whether blocks have states of a draft head."""
        return self._cache.head is not None

    @property
    def used(self) -> int:
        return max(0, self._taken() - self._before)

    @torch.inference_mode()
    def capture(self, rows: int) -> int:
        model, cache, size = self._model, self._cache, self._cache.block_size
        streams = cache.streams
        assert isinstance(streams, DeviceStreams), "a CPU captures nothing"
        batch = StaticBatch(
            rows,
            blocks=-(-self._max_model_len // size),
            most_context=min(MOST_CONTEXT, rows * self._max_model_len),
            block_size=size,
            device=cache.kv.device,
            adapter_rank=self._adapter_rank,
        )

        def run() -> Tensor:
            self._share(batch.tokens)
            logits = model.forward(batch, cache)  # without tokens, nothing is stored
            if self._logits is None or len(self._logits) < rows:  # at the first run, which is not recorded
                self._logits = torch.empty_like(logits)
            return self._logits[:rows].copy_(logits)

        replay, logits = streams.capture(run)
        self._passes[rows] = CapturedPass(batch, logits, replay)
        return self.used

    def drop(self, rows: int) -> None:
        self._passes.pop(rows, None)
        self._logits = None  # the next pass may be smaller

    def fits(self, rows: int, batch: Batch) -> bool:
        return self._passes[rows].batch.fits(batch)

    def replay(self, rows: int, batch: Batch) -> Tensor:
        adapters = batch.token_adapters if self._adapter_rank else None
        states = batch.token_state_blocks if self.states else None
        return self.replay_values(rows, batch.values, batch.token_tables, batch.fed, adapters, states)

    @torch.inference_mode()
    def replay_values(
        self,
        rows: int,
        values: NDArray[np.int64],
        tables: NDArray[np.int32],
        fed: Tensor | None = None,
        adapters: NDArray[np.int64] | None = None,
        state_blocks: NDArray[np.int64] | None = None,
    ) -> Tensor:
        """Compute a batch that fits, as `replay`, from what `StaticBatch.load` takes of it."""
        captured = self._passes[rows]
        self._cache.streams.use()
        captured.batch.load(values, tables, fed, adapters, state_blocks)
        captured.replay()
        return captured.logits

    def clear(self) -> None:
        self._passes.clear()
