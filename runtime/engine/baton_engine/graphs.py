"""
Captured decode passes: a graph repeats the launches of a pass without the host's calls.

A decode step of a small batch waits for the host, which needs longer for a launch than the device for a
kernel. So passes of some numbers of rows are captured at startup. A batch of decode rows is copied to the
input of the smallest one that it fits, and other batches are computed plainly.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from baton_api.setting_types import show_size
from baton_engine.batch import Batch, StaticBatch
from baton_engine.kv.cache import KVCache
from baton_engine.model.decoder import Decoder, Model
from baton_engine.model.lora import LoraWeights
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.settings import WorkerSettings
from baton_engine.streams import DeviceStreams

log = logging.getLogger(__name__)

MOST_CONTEXT = 2**20
"""Sum of the context lengths of a captured pass. Sums of attention take 17 KB per 256 tokens with 32 heads of
128 dimensions, and all captured passes share them."""


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """Limits of all captured passes together. `baton_engine.settings` documents them for users."""

    rows: int
    """Maximum rows of a pass. 0 disables captured passes."""
    memory: int
    """Bytes."""
    seconds: float


def capture_limits(settings: WorkerSettings, model: Model) -> CaptureLimits:
    """Return the limits of captured passes of `model`, which are 0 if it cannot be captured."""
    if not (isinstance(model, Decoder) and model.capturable and settings.graph_rows):
        return CaptureLimits(rows=0, memory=0, seconds=0)
    return CaptureLimits(settings.graph_rows, settings.graph_memory, settings.graph_seconds)


@dataclass(frozen=True, slots=True)
class CapturedPass:
    """One graph, its input and its result."""

    batch: StaticBatch
    logits: Tensor
    """[rows, V] fp32, overwritten by each replay."""
    replay: Callable[[], None]


class GraphModel:
    """A `Model` that replays captured passes where a batch fits one, and calls another model otherwise."""

    def __init__(self, model: Model, passes: list[CapturedPass]) -> None:
        self.spec = model.spec
        self.exact_rows = model.exact_rows
        self._model = model
        self._passes = sorted(passes, key=lambda one: one.batch.size)
        self.rows = [one.batch.size for one in self._passes]
        """Rows of the captured passes."""
        self.replays = 0
        """Number of batches that a graph computed."""

    @torch.inference_mode()
    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        place = bisect_left(self.rows, batch.size)
        if place == len(self._passes) or not self._passes[place].batch.fits(batch):
            return self._model.forward(batch, cache)
        captured = self._passes[place]
        cache.streams.use()
        captured.batch.load(batch)
        captured.replay()
        self.replays += 1
        return captured.logits[: batch.size]

    def interrupt(self) -> None:
        self._model.interrupt()

    def hidden_states(self, batch: Batch, cache: KVCache) -> Tensor:
        return self._model.hidden_states(batch, cache)

    def project(self, states: Tensor) -> Tensor:
        return self._model.project(states)

    def prepare_adapter(self, weights: LoraWeights) -> Any:
        return self._model.prepare_adapter(weights)


def row_counts(most: int) -> list[int]:
    """
    Return the numbers of rows of captured passes, up to `most`.

    >>> row_counts(70)
    [1, 2, 4, 8, 16, 24, 32, 48, 64, 70]
    """
    counts = []
    rows = 1
    while rows < most:
        counts.append(rows)
        rows += rows if rows < 8 else 8 if rows < 32 else 16 if rows < 64 else 32
    return [*counts, most] if most else []


def with_graphs(
    model: Model,
    cache: KVCache,
    engine: EngineLimits,
    limits: CaptureLimits,
    free: Callable[[], int | None],
    clock: Callable[[], float] = time.monotonic,
) -> Model:
    """
    Capture decode passes of `model` over `cache`, the largest first, because it also serves smaller batches.

    `free` returns the free bytes of the device. Returns `model` itself if no pass was captured. A pass that
    cannot be captured is logged, and computed plainly.
    """
    streams = cache.streams
    if not isinstance(streams, DeviceStreams):
        return model
    began, before = clock(), free() or 0
    passes: list[CapturedPass] = []
    for rows in reversed(row_counts(min(limits.rows, engine.max_running))):
        fewer = f"Passes of {rows} rows and fewer are not captured"
        if clock() - began > limits.seconds:
            log.warning("%s: the others took longer than --graph-seconds %g.", fewer, limits.seconds)
            break
        try:
            captured = _captured(model, cache, streams, rows, engine.max_model_len)
        except Exception as error:  # the engine works without graphs
            log.warning("%s: %s", fewer, error)
            break
        if (used := before - (free() or 0)) <= limits.memory:
            passes.append(captured)
        else:
            needed = show_size(used)
            log.warning("Passes of %d rows need %s, more than --graph-memory: not captured.", rows, needed)
        del captured
    if not passes:
        return model
    log.info(
        "Captured %d decode passes of up to %d rows as graphs in %.1f s, which take %s",
        len(passes),
        passes[0].batch.size,
        clock() - began,
        show_size(max(0, before - (free() or 0))),
    )
    return GraphModel(model, passes)


@torch.inference_mode()
def _captured(
    model: Model, cache: KVCache, streams: DeviceStreams, rows: int, max_model_len: int
) -> CapturedPass:
    size = cache.block_size
    batch = StaticBatch(
        rows,
        blocks=-(-max_model_len // size),
        most_context=min(MOST_CONTEXT, rows * max_model_len),
        block_size=size,
        device=cache.kv.device,
    )
    # Compiles kernels and allocates libraries' memory. Without tokens, nothing is stored.
    model.forward(batch, cache)
    replay, logits = streams.capture(lambda: model.forward(batch, cache))
    return CapturedPass(batch, logits, replay)
