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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from baton_api.errors import SetupError
from baton_api.setting_types import show_size
from baton_api.workers import Role
from baton_engine.batch import Batch
from baton_engine.captured_passes import CapturedPasses, Passes, PassModel
from baton_engine.kv.cache import KVCache
from baton_engine.model.decoder import Decoder, Model
from baton_engine.model.draft_head import DraftHead
from baton_engine.model.lora import LoraWeights
from baton_engine.parallel.parallel_head import ParallelHead
from baton_engine.parallel.parallel_passes import ParallelPasses
from baton_engine.parallel.ranks import ParallelModel
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.settings import WorkerSettings
from baton_engine.streams import DeviceStreams

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CaptureLimits:
    """Limits of all captured passes together. `baton_engine.settings` documents them for users."""

    rows: int
    """Maximum rows of a pass. 0 disables captured passes."""
    memory: int
    """Bytes of each device."""
    seconds: float
    adapter_rank: int = 0
    """The highest rank of adapters, for which passes are captured too. 0: there are none."""


def capture_limits(settings: WorkerSettings, model: Model) -> CaptureLimits:
    """
    Return the limits of captured passes of `model`. They are 0 if it cannot be captured.

    A prefill worker captures none: its passes are chunks of prompts.
    """
    part = model.part if isinstance(model, ParallelModel) else model
    decodes = settings.graph_rows and settings.role is not Role.PREFILL
    if not (decodes and isinstance(part, Decoder) and part.capturable):
        return CaptureLimits(rows=0, memory=0, seconds=0)
    rank = settings.max_lora_rank if settings.enable_lora else 0
    return CaptureLimits(settings.graph_rows, settings.graph_memory, settings.graph_seconds, rank)


class GraphPasses:
    """Replays captured passes where a batch fits one, and calls a model otherwise."""

    def __init__(self, model: PassModel, passes: Passes, rows: Iterable[int]) -> None:
        """`rows`: those of the captured passes."""
        self._plain = model
        self._passes = passes
        self.rows = sorted(rows)
        """Rows of the captured passes."""
        self.replays = 0
        """Number of batches that these passes computed."""

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        index = bisect_left(self.rows, batch.size)
        if index == len(self.rows) or not self._passes.fits(self.rows[index], batch):
            return self._plain.forward(batch, cache)
        self.replays += 1
        return self._passes.replay(self.rows[index], batch)[: batch.size]

    def close(self) -> None:
        """Free the graphs. NCCL's communicator cannot end before the graphs that contain its operations."""
        self._passes.clear()
        if isinstance(self._plain, GraphPasses):
            self._plain.close()


class GraphModel(GraphPasses):
    """The same as a `Model`."""

    def __init__(self, model: Model, passes: Passes, rows: Iterable[int]) -> None:
        super().__init__(model, passes, rows)
        self.spec = model.spec
        self._model = model

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
    taken: Callable[[], int],
    clock: Callable[[], float] = time.monotonic,
) -> Model:
    """
    Capture decode passes of `model` over `cache`, the largest first, because it also serves smaller batches.

    `taken` returns the bytes of the device that this process has; others may share the device. Returns
    `model` itself if no pass was captured. Passes with adapters are captured apart, so that others need not
    look for them. A pass that cannot be captured is logged, and computed plainly.
    Raises SetupError if a rank has ended.
    """
    counts = row_counts(min(limits.rows, engine.results))
    if not (counts and isinstance(cache.streams, DeviceStreams)):
        return model
    first = _passes_of(model, cache, engine.max_model_len, taken)
    if not limits.adapter_rank:
        return _with_passes(model, first, counts, limits, clock)
    began, before = clock(), taken()
    plain = _with_passes(model, first, counts, limits, clock)
    left, seconds = limits.memory - (taken() - before), max(0.0, limits.seconds - (clock() - began))
    passes = CapturedPasses(model, cache, engine.max_model_len, taken, limits.adapter_rank)
    return _with_passes(plain, passes, counts, replace(limits, memory=left, seconds=seconds), clock)


def head_with_graphs(
    head: DraftHead | ParallelHead,
    cache: KVCache,
    engine: EngineLimits,
    limits: CaptureLimits,
    taken: Callable[[], int],
    clock: Callable[[], float] = time.monotonic,
) -> PassModel:
    """Capture passes of a draft head, as `with_graphs` does of a model. Returns what computes its passes."""
    counts = row_counts(min(limits.rows, engine.max_running))
    if not (counts and head.capturable and isinstance(cache.streams, DeviceStreams)):
        return head
    part = head.part if isinstance(head, ParallelHead) else head
    own = CapturedPasses(part, cache, engine.max_model_len, taken)
    passes = ParallelPasses(head.ranks, own, of_head=True) if isinstance(head, ParallelHead) else own
    captured = _capture(passes, counts, limits, clock)
    return GraphPasses(head, passes, captured) if captured else head


def _with_passes(
    model: Model, passes: Passes, counts: Sequence[int], limits: CaptureLimits, clock: Callable[[], float]
) -> Model:
    """Capture passes of `counts` rows. Returns a model that replays them, and calls `model` for others."""
    captured = _capture(passes, counts, limits, clock)
    return GraphModel(model, passes, captured) if captured else model


def _capture(
    passes: Passes, counts: Sequence[int], limits: CaptureLimits, clock: Callable[[], float]
) -> list[int]:
    """Capture passes of `counts` rows, the largest first. Returns the rows of those that were captured."""
    began = clock()
    captured: list[int] = []
    for rows in reversed(counts):
        fewer = f"Passes of {rows} rows and fewer are not captured"
        if clock() - began > limits.seconds:
            log.warning("%s: the others took longer than --graph-seconds %g.", fewer, limits.seconds)
            break
        try:
            used = passes.capture(rows)
        except SetupError:
            raise
        except Exception as error:  # the engine works without graphs
            log.warning("%s: %s", fewer, error)
            break
        if used <= limits.memory:
            captured.append(rows)
        else:
            passes.drop(rows)
            needed = show_size(used)
            log.warning("Passes of %d rows need %s, more than --graph-memory: not captured.", rows, needed)
    if captured:
        log.info(
            "Captured %d decode passes of up to %d rows as graphs in %.1f s, which take %s",
            len(captured),
            captured[0],
            clock() - began,
            show_size(passes.used),
        )
    return captured


def _passes_of(model: Model, cache: KVCache, max_model_len: int, taken: Callable[[], int]) -> Passes:
    if not isinstance(model, ParallelModel):
        return CapturedPasses(model, cache, max_model_len, taken)
    rank0 = CapturedPasses(model.part, cache, max_model_len, taken, share=model.group.broadcast)
    return ParallelPasses(model.ranks, rank0)
