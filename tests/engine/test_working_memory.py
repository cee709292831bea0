"""Memory of the largest passes beside weights and cache, on devices that have too little."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.batch import Batch
from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Decoder
from baton_engine.ops.plain import PlainOps
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.working_memory import DevicePeak, largest_passes, working_memory
from tests.engine.fake_model import FakeModel
from tests.engine.greedy import CPU
from tests.engine.models import make_model


class FakePeak:
    """A device's memory in bytes: a pass of a `MeasuredModel` takes 100 per token and 1,000 per result."""

    def __init__(self) -> None:
        self.most = 0
        self.started = self.ended = 0

    def start(self) -> None:
        self.started += 1

    def peak(self) -> int:
        self.ended += 1
        return self.most


class MeasuredModel(FakeModel):
    """A model that only reports what it would need."""

    def __init__(self, memory: FakePeak, limit: int = 2**62, error: Exception | None = None) -> None:
        super().__init__()
        self.memory, self.limit = memory, limit
        self.error = error or torch.OutOfMemoryError("CUDA out of memory.")
        self.batches: list[Batch] = []

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        assert int(batch.slots.max()) < cache.blocks * cache.block_size
        self.batches.append(batch)
        needed = 100 * batch.size + 1000 * len(batch.wanted_at)
        if needed > self.limit:
            raise self.error
        self.memory.most = max(self.memory.most, needed)
        return torch.randn(len(batch.wanted_at), self.spec.vocab)


def limits(**changes: Any) -> EngineLimits:
    return EngineLimits(**{"max_model_len": 4096, "chunk_tokens": 512, "max_running": 64, **changes})


SHAPES: dict[str, tuple[dict[str, Any], list[tuple[int, int]]]] = {
    "chunks shared with all sequences": ({}, [(512, 1), (512, 65)]),
    "few prompt tokens beside sequences": ({"mixed_chunk_tokens": 128}, [(512, 1), (192, 65)]),
    "a context shorter than a chunk": ({"max_model_len": 100}, [(100, 1), (164, 65)]),
    "more sequences than tokens": ({"chunk_tokens": 64, "max_running": 100}, [(64, 1), (64, 49), (100, 100)]),
    "drafts of few sequences": (
        {"max_running": 4, "speculation_tokens": 16},
        [(512, 1), (512, 5), (68, 68)],
    ),
    "drafts of many sequences": ({"max_running": 300, "speculation_tokens": 16}, [(512, 1), (512, 301)]),
    "whole prompts": ({"whole_prompts": True}, [(4096, 1)]),
}


@pytest.mark.parametrize(("changes", "expected"), SHAPES.values(), ids=SHAPES)
def test_largest_passes_are_those_of_the_limits(
    changes: dict[str, Any], expected: list[tuple[int, int]]
) -> None:
    passes = largest_passes(limits(**changes))
    assert [(sum(len(row.tokens) for row in rows), len(rows)) for rows in passes] == expected
    longest = limits(**changes).max_model_len
    for rows in passes[:2]:
        assert rows[0].context == longest, "the last chunk of the longest prompt"
        assert all(len(row.blocks) * BLOCK_SIZE >= row.context and set(row.blocks) == {1} for row in rows)


def test_working_memory_is_the_peak_of_the_largest_pass() -> None:
    memory = FakePeak()
    model = MeasuredModel(memory)
    assert working_memory(model, limits(), torch.float32, CPU, memory) == 512 * 100 + 65 * 1000
    assert (len(model.batches), memory.started, memory.ended) == (2, 1, 1)


def test_working_memory_above_the_device_is_rejected() -> None:
    memory = FakePeak()
    model = MeasuredModel(memory, limit=60_000)
    with pytest.raises(SetupError) as caught:
        working_memory(model, limits(), torch.float32, CPU, memory)
    for part in ("--chunk-tokens 512", "--max-running 64", "52.2 kB were in use", "CUDA out of memory"):
        assert part in caught.value.message
    assert memory.ended == 1, "what the failed pass left is released"


def test_working_memory_other_errors_are_not_hidden() -> None:
    memory = FakePeak()
    model = MeasuredModel(memory, limit=0, error=RuntimeError("CUDA error: no kernel image is available"))
    with pytest.raises(RuntimeError, match="no kernel image"):
        working_memory(model, limits(), torch.float32, CPU, memory)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["llama", "deepseek-v3"])
def test_working_memory_passes_can_be_computed(variant: str, tmp_path: Path) -> None:
    """Repeated block ids are valid for attention, and for the gathers of latent attention."""
    checkpoint = Checkpoint(make_model(tmp_path, variant), variant)
    spec = load_spec(checkpoint)
    model = Decoder(spec, load_weights(checkpoint, spec, torch.float32), PlainOps(spec), CPU)
    memory = FakePeak()
    longest = min(spec.context, 200)
    small = limits(max_model_len=longest, chunk_tokens=48, max_running=5)
    assert working_memory(model, small, torch.float32, CPU, memory) == 0
    assert memory.ended == 1


def test_device_peak_counts_what_torch_took_since_the_start() -> None:
    calls: list[str] = []
    reserved = {"now": 700, "most": 2_000}

    def reset(device: torch.device) -> None:
        calls.append("reset")
        reserved["most"] = reserved["now"]

    def release() -> None:
        calls.append("release")
        reserved["now"] = min(reserved["now"], 500)

    cuda = SimpleNamespace(
        empty_cache=release,
        reset_peak_memory_stats=reset,
        memory_reserved=lambda device: reserved["now"],
        max_memory_reserved=lambda device: reserved["most"],
        synchronize=lambda device: calls.append("synchronize"),
    )
    peak = DevicePeak(torch.device("cuda", 0), cuda)
    peak.start()
    reserved["most"] = reserved["now"] = 1_300
    assert peak.peak() == 800
    assert calls == ["release", "reset", "synchronize", "release"]
