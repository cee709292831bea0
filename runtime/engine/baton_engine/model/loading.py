"""Loads the model of a worker without ranks from its checkpoint, or from packed weights in Baton's cache."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

import torch

from baton_engine import machine
from baton_engine.devices import short, show_free
from baton_engine.lending import Seat
from baton_engine.model import native_decoder, stored_weights
from baton_engine.model.checkpoint import Checkpoint, load_weights
from baton_engine.model.decoder import Model, create_model
from baton_engine.model.head_loading import with_eagle3
from baton_engine.model.native_decoder import NativeDecoder
from baton_engine.model.progress import Progress
from baton_engine.model.stored_weights import Damaged, WeightsFile
from baton_engine.model.weights import WeightsSummary, show_formats
from baton_engine.ops.choice import interpreted, kept_formats
from baton_engine.ops.native import support
from baton_engine.quantized import Format
from baton_engine.settings import WorkerSettings
from baton_engine.spec import ModelSpec, Quantize

log = logging.getLogger(__name__)

WRITER = "weights-writer"
"""Name of the thread that writes packed weights."""

LEAST_BYTES = 16 * 1024 * 1024
"""Smaller models are packed in a few milliseconds at each start, and are not stored."""

NICENESS = 10
"""Of the thread that writes packed weights while the worker serves requests."""


@dataclass(frozen=True, slots=True)
class LoadedWeights:
    """A model with its weights."""

    model: Model
    digest: str
    """`weights_digest`."""
    bytes: int
    """`Weights.bytes`."""
    file: WeightsFile | None = None
    """Where `store` writes the packed weights. None: nowhere, or the file exists."""

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the weights that are in memory of a file. The system counts such memory as free."""
        return self.model.mapped_bytes if isinstance(self.model, NativeDecoder) else 0

    def store(self) -> None:
        """Write the packed weights for later starts, in a thread. The model may compute meanwhile."""
        if self.file is not None and self.bytes >= LEAST_BYTES:
            threading.Thread(target=self._store, name=WRITER, daemon=True).start()

    def _store(self) -> None:
        assert self.file is not None and isinstance(self.model, NativeDecoder)
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        try:
            self.model.store(self.file, self.digest, self.bytes)
        except OSError as error:
            log.warning("The packed weights are not stored for later starts: %s", error)


def load_model(
    settings: WorkerSettings,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
    seat: Seat | None,
    eagle3: Checkpoint | None = None,
) -> LoadedWeights:
    """
    Load the weights in the fastest way. Raises SetupError if settings or checkpoint do not allow it.

    `eagle3` has the weights of the head of `spec`, if that has a checkpoint of its own.
    """
    began = time.monotonic()
    quantize, formats = kept_formats(settings.quantize, spec, device, dtype)
    log.info("Load weight begin. avail mem=%s", show_free(device))
    file = _file(settings.weights_cache, checkpoint, spec, device, dtype, quantize, formats)
    loaded = None if file is None else _stored(file, spec, dtype, seat)
    source = "packed weights" if loaded else "checkpoint"
    if loaded is None:
        packs = _packs(spec, device, dtype)
        weights = load_weights(
            checkpoint,
            spec,
            dtype,
            progress,
            quantize,
            formats=formats,
            device=device,
            streamed=packs,
            lazy=True,
        )
        summary = WeightsSummary(with_eagle3(weights, eagle3, spec, dtype, device))
        model = create_model(spec, summary.weights, device, dtype, seat=seat)
        sizes = summary.formats
        log.info("Weights: %s", show_formats(sizes))
        loaded = LoadedWeights(model, summary.digest, sizes.total(), file)
    checkpoint.release()
    log.info(
        "Load weight end. type=%s, dtype=%s, avail mem=%s, took %.1f s from %s",
        spec.architecture,
        short(dtype),
        show_free(device),
        time.monotonic() - began,
        source,
    )
    return loaded


def _packs(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the CPU's kernels compute the model: `create_model` packs its weights."""
    return device.type == "cpu" and not interpreted() and support.runs(spec, dtype)


def _file(
    limit: int,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    quantize: Quantize,
    formats: Collection[Format],
) -> WeightsFile | None:
    """Return where the packed weights are stored. None: they are not packed, or the setting disables it."""
    if not limit or not _packs(spec, device, dtype):
        return None
    try:
        content = stored_weights.content_digest(checkpoint.path)
    except OSError:
        return None  # reading the weights raises the error, with its reason
    name = stored_weights.file_name(content, support.library_name(), short(dtype), quantize, sorted(formats))
    return WeightsFile(machine.cache_folder(os.environ) / name, limit)


def _stored(
    file: WeightsFile, spec: ModelSpec, dtype: torch.dtype, seat: Seat | None
) -> LoadedWeights | None:
    """Use the packed weights in `file`. None: the file is missing or cannot be used."""
    with file.open() as stored:
        if stored is None:
            return None
        try:
            model = native_decoder.native_decoder(spec, stored, dtype, seat=seat)
        except Damaged as reason:
            file.discard(reason)
            return None
        header = stored.header
        return None if model is None else LoadedWeights(model, header.digest, header.loaded_bytes)
