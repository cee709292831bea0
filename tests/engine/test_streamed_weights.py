"""Layers that are read one by one to the same memory have the values of layers that are read at once."""

from __future__ import annotations

import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from baton_api.errors import SetupError
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.file_reader import FileReader, Location
from baton_engine.model.weights import Weights, WeightsSummary, weights_digest
from baton_engine.quantized import Quantized
from baton_engine.spec import Quantize
from tests.engine.gguf_files import write_gguf
from tests.engine.models import make_model

VARIANTS = ("llama", "qwen2", "gemma2", "phi3", "glm4", "qwen3 with experts in some layers", "mixtral")


def same(one: object, other: object) -> bool:
    if isinstance(one, Quantized) and isinstance(other, Quantized):
        return all(
            torch.equal(left.rows, right.rows) for left, right in zip(one.parts, other.parts, strict=True)
        )
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one is None and other is None


def check(checkpoint: Checkpoint, dtype: torch.dtype, quantize: Quantize = "off") -> None:
    spec = load_spec(checkpoint)
    expected = load_weights(checkpoint, spec, dtype, quantize=quantize)
    for streamed in (True, False):
        read = load_weights(checkpoint, spec, dtype, quantize=quantize, streamed=streamed, lazy=True)
        summary = WeightsSummary(read)
        count = 0
        for ours, theirs in zip(summary.weights.layers, expected.layers, strict=True):
            for field in fields(ours):
                assert same(getattr(ours, field.name), getattr(theirs, field.name)), field.name
            count += 1
        assert count == spec.layers
        assert same(read.embedding, expected.embedding) and same(read.head, expected.head)
        assert summary.digest == weights_digest(expected) and summary.formats == expected.formats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_streamed_layers_equal_those_read_at_once(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Tensors are read in the stored dtype, converted, offset (norms of Gemma) or reordered (GLM)."""
    check(Checkpoint(make_model(tmp_path / variant, variant), variant), dtype)


@pytest.mark.parametrize("quantize", ["keep", "q8_0"])
def test_streamed_quantized_layers_equal_those_read_at_once(quantize: Quantize, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    check(Checkpoint(folder, "folder"), torch.bfloat16, quantize)
    file = write_gguf(folder, tmp_path / "model.gguf", quantised=True)
    check(Checkpoint(file, "file"), torch.bfloat16, quantize)


def test_summary_of_weights_without_stream_is_the_digest(tmp_path: Path) -> None:
    checkpoint = Checkpoint(make_model(tmp_path / "model"), "model")
    weights: Weights = load_weights(checkpoint, load_spec(checkpoint), torch.float32)
    summary = WeightsSummary(weights)
    copied = replace(summary.weights, layers=tuple(summary.weights.layers))
    assert summary.digest == weights_digest(copied) and summary.formats.total() == weights.bytes


def test_file_reader_reads_every_location(tmp_path: Path) -> None:
    values = torch.arange(5000, dtype=torch.float32)
    file = tmp_path / "values"
    file.write_bytes(values.numpy().tobytes())
    locations = [Location(file, 4 * first, 400, torch.float32) for first in range(0, 5000, 100)]
    reader = FileReader(locations)
    target = torch.empty(100)
    for number, location in enumerate(locations):
        reader.read(location, target)
        assert torch.equal(target, values[100 * number : 100 * number + 100])
    reader.close()
    abandoned = FileReader(locations)
    abandoned.close()


def test_file_reader_of_a_truncated_file_says_so(tmp_path: Path) -> None:
    file = tmp_path / "values"
    file.write_bytes(bytes(400))
    reader = FileReader([Location(file, 0, 400, torch.float32)])
    os.truncate(file, 100)
    with pytest.raises(SetupError, match="truncated"):
        reader.read(Location(file, 0, 400, torch.float32), torch.empty(100))
    reader.close()
