"""Checkpoints whose experts are stored together: one name for each expert, and MXFP4 is expanded exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.weights import Weights
from baton_engine.quantized import Format, Quantized
from tests.engine.models import make_model
from tests.engine.test_quantized import expanded

BLOCK, BYTES = 32, 16


def loaded(folder: Path) -> Weights:
    checkpoint = Checkpoint(folder, folder.name)
    return load_weights(checkpoint, load_spec(checkpoint), torch.float32)


def as_mxfp4(folder: Path, target: Path) -> None:
    """Random experts in MXFP4 in `target`, and the same expanded by transformers in `folder`."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    packed = dict(tensors)
    generator = torch.Generator().manual_seed(3)
    for name, values in tensors.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            continue
        count, inputs, outputs = values.shape
        shape = (count, outputs, inputs // BLOCK)
        blocks = torch.randint(0, 256, (*shape, BYTES), generator=generator, dtype=torch.uint8)
        scales = torch.randint(115, 131, shape, generator=generator, dtype=torch.uint8)
        del packed[name]
        packed[f"{name}_blocks"], packed[f"{name}_scales"] = blocks, scales
        expanded = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert expanded.shape == values.shape
        tensors[name] = expanded.contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(packed, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (target / "config.json").write_text(json.dumps(config))


@pytest.fixture
def packed(tmp_path: Path) -> tuple[Path, Path]:
    folder = make_model(tmp_path / "expanded", "gpt-oss", intermediate_size=96)
    (target := tmp_path / "packed").mkdir()
    as_mxfp4(folder, target)
    return folder, target


def test_mxfp4_experts_equal_those_of_transformers(packed: tuple[Path, Path]) -> None:
    expanded, ours = (loaded(folder) for folder in packed)
    for wanted, got in zip(expanded.layers, ours.layers, strict=True):
        for name in ("expert_gate_up", "expert_gate_up_bias", "expert_down", "expert_down_bias", "sinks"):
            assert torch.equal(getattr(wanted, name), getattr(got, name))
        assert isinstance(wanted.expert_down, Tensor) and wanted.expert_down.abs().max() > 1


def test_mxfp4_experts_stay_for_kernels_that_read_them(packed: tuple[Path, Path]) -> None:
    """They are as many bytes as in the file, and the same numbers."""
    _, folder = packed
    checkpoint = Checkpoint(folder, folder.name)
    spec = load_spec(checkpoint)
    kept = load_weights(checkpoint, spec, torch.float32, quantize="keep", formats=frozenset(Format))
    for ours, exact in zip(kept.layers, loaded(folder).layers, strict=True):
        for name in ("expert_gate_up", "expert_down"):
            matrix, values = getattr(ours, name), getattr(exact, name)
            assert isinstance(matrix, Quantized)
            assert torch.equal(expanded(matrix).view_as(values), values)
            assert matrix.nbytes == values.numel() * 17 // 32


def test_mxfp4_exponent_that_is_not_a_number_is_refused(packed: tuple[Path, Path]) -> None:
    _, folder = packed
    tensors = {name: each.clone() for name, each in load_file(folder / "model.safetensors").items()}
    name = "model.layers.0.mlp.experts.gate_up_proj_scales"
    tensors[name][1, 2, 0] = 255
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SetupError, match=f"tensor {name} has an exponent of 255"):
        loaded(folder)


def test_mxfp4_of_other_bytes_is_rejected(packed: tuple[Path, Path]) -> None:
    _, folder = packed
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name].to(torch.int16)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SetupError, match=f"tensor {name} has the unsupported dtype I16. Expected U8"):
        loaded(folder)


def test_expert_tensor_that_is_missing_is_named(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "gpt-oss")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.0.mlp.experts.gate_up_proj_bias"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SetupError, match=r"model.layers.0.mlp.experts.0.gate_proj.bias"):
        loaded(folder)
