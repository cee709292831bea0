"""Quantized safetensors folders: their numbers, the formats that are kept, and rejected configurations."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.batch import Batch
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Decoder
from baton_engine.model.schemes import scheme_of
from baton_engine.quantized import Format, Quantized
from tests.engine.models import make_model
from tests.engine.test_cpu_ops import CPU, ROWS, filled_cache, rows_of
from tests.engine.test_quantized import ROUNDING, RoundingOps, distance, native_model

Stored = dict[str, Tensor]
Rounded = tuple[Stored, Tensor]
"""The tensors of one matrix in a checkpoint, by suffix, and its numbers."""
GENERATOR = torch.Generator().manual_seed(8)


def drawn(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=GENERATOR, dtype=torch.int32)


def scales_of(*shape: int) -> Tensor:
    return (torch.rand(*shape, generator=GENERATOR) * 0.02 + 0.01).to(torch.float16)


def into_words(nibbles: Tensor) -> Tensor:
    """[..., 8 n] to [..., n], the first in the lowest bits."""
    words = torch.zeros(*nibbles.shape[:-1], nibbles.shape[-1] // 8, dtype=torch.int64)
    for place in range(8):
        words |= nibbles[..., place::8].long() << 4 * place
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def gptq(
    outputs: int, inputs: int, group: int = 32, shuffled: bool = False, zero: int | None = None
) -> Rounded:
    numbers, groups = drawn(0, 16, inputs, outputs), inputs // group
    zeros = drawn(1, 16, groups, outputs) if zero is None else torch.full((groups, outputs), zero)
    scales = scales_of(groups, outputs)
    group_of = torch.arange(inputs) // group
    if shuffled:
        group_of = group_of[torch.randperm(inputs, generator=GENERATOR)]
    stored = {
        ".qweight": into_words(numbers.T).T.contiguous(),
        ".qzeros": into_words(zeros - 1),
        ".scales": scales,
        ".g_idx": group_of.to(torch.int32),
    }
    return stored, ((numbers - zeros[group_of]) * scales[group_of].float()).T


def awq(outputs: int, inputs: int, group: int = 32) -> Rounded:
    numbers, zeros = drawn(0, 16, inputs, outputs), drawn(0, 16, inputs // group, outputs)
    scales = scales_of(inputs // group, outputs)

    def words(nibbles: Tensor) -> Tensor:
        return into_words(nibbles.reshape(len(nibbles), -1, 8)[..., [0, 2, 4, 6, 1, 3, 5, 7]].flatten(1))

    stored = {".qweight": words(numbers), ".qzeros": words(zeros), ".scales": scales}
    wide = [each.repeat_interleave(group, 0).float() for each in (zeros, scales)]
    return stored, ((numbers - wide[0]) * wide[1]).T


def int8(outputs: int, inputs: int) -> Rounded:
    numbers, scales = drawn(-127, 128, outputs, inputs).to(torch.int8), scales_of(outputs, 1).bfloat16() / 16
    return {".weight": numbers, ".weight_scale": scales}, numbers * scales.float()


def int4(outputs: int, inputs: int, group: int = 32, zero_points: bool = False) -> Rounded:
    numbers, scales = drawn(-8, 8, outputs, inputs), scales_of(outputs, inputs // group)
    stored = {
        ".weight_packed": into_words(numbers + 8),
        ".weight_scale": scales,
        ".weight_shape": torch.tensor([outputs, inputs]),
    }
    zeros = torch.zeros(scales.shape, dtype=torch.int32)
    if zero_points:
        zeros = drawn(-8, 8, *scales.shape)
        stored[".weight_zero_point"] = into_words((zeros + 8).T).T.contiguous()
    wide = [each.repeat_interleave(group, 1).float() for each in (zeros, scales)]
    return stored, (numbers - wide[0]) * wide[1]


def fp8(outputs: int, inputs: int, block: int = 0) -> Rounded:
    numbers = torch.randn(outputs, inputs, generator=GENERATOR).to(torch.float8_e4m3fn)
    if not block:
        scale = torch.tensor(0.04)
        return {".weight": numbers, ".weight_scale": scale}, numbers.float() * scale
    scales = scales_of(-(-outputs // block), -(-inputs // block)).float()
    whole = scales.repeat_interleave(block, 0).repeat_interleave(block, 1)[:outputs, :inputs]
    return {".weight": numbers, ".weight_scale_inv": scales}, numbers.float() * whole


def compressed(form: str, kind: str, bits: int, **weights: Any) -> dict[str, Any]:
    given = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "channel", **weights}
    group = {"targets": ["Linear"], "weights": given, "input_activations": {"num_bits": 8, "dynamic": True}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
GROUPED = compressed("pack-quantized", "int", 4, strategy="group", group_size=32)
SCHEMES: dict[str, tuple[dict[str, Any], Callable[[int, int], Rounded], set[str]]] = {
    "gptq": (GPTQ, gptq, {"INT4"}),
    "gptq, symmetric": (GPTQ, lambda o, i: gptq(o, i, zero=8), {"Q4_0"}),
    "gptq, groups of 64": (GPTQ | {"group_size": 64}, lambda o, i: gptq(o, i, 64), {"INT4"}),
    "gptq in another order": (GPTQ | {"desc_act": True}, lambda o, i: gptq(o, i, shuffled=True), set()),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq, {"INT4"}),
    "int8": (compressed("int-quantized", "int", 8), int8, {"Q8_0"}),
    "int4": (GROUPED, int4, {"Q4_0"}),
    "int4 with zeros": (GROUPED, lambda o, i: int4(o, i, zero_points=True), {"INT4"}),
    "int4, groups of 16": (
        compressed("pack-quantized", "int", 4, strategy="group", group_size=16),
        lambda o, i: int4(o, i, 16),
        set(),
    ),
    "fp8": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8, set()),
    "fp8 of compressed-tensors": (compressed("float-quantized", "float", 8, strategy="tensor"), fp8, set()),
    "fp8 in blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [48, 48]},
        lambda o, i: fp8(o, i, 48),
        set(),
    ),
}
"""Config, matrices, and the formats of the kernels that hold them."""


def quantized_folder(
    folder: Path,
    config: dict[str, Any],
    matrix: Callable[[int, int], Rounded],
    variant: str = "llama",
    **sizes: Any,
) -> Stored:
    """A folder with quantized layers and a plain head; returns the numbers of the quantized matrices."""
    make_model(folder, variant, **{"hidden_size": 128, "intermediate_size": 192, "head_dim": 32, **sizes})
    return quantize_folder(folder, config, matrix)


def quantize_folder(folder: Path, config: dict[str, Any], matrix: Callable[[int, int], Rounded]) -> Stored:
    """Quantize the layers of the model in `folder`; returns the numbers of the quantized matrices."""
    # A tensor that is still mapped must not be in the file that is written.
    tensors = {name: each.clone() for name, each in load_file(folder / "model.safetensors").items()}
    exact = {}
    for name in [name for name in tensors if name.endswith(("_proj.weight", "_proj_with_mqa.weight"))]:
        stored, exact[name] = matrix(*tensors.pop(name).shape)
        tensors.update({name.removesuffix(".weight") + suffix: each for suffix, each in stored.items()})
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    whole = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    return exact


@pytest.mark.parametrize("name", SCHEMES)
def test_quantized_folder_has_the_checkpoints_numbers(tmp_path: Path, name: str) -> None:
    """Expanded they are equal; kept they give the logits of the same numbers."""
    config, matrix, formats = SCHEMES[name]
    exact = quantized_folder(tmp_path, config, matrix)
    checkpoint = Checkpoint(tmp_path, "quantized")
    spec = load_spec(checkpoint)
    floats = load_weights(checkpoint, spec, torch.float32)
    for number, layer in enumerate(floats.layers):
        prefix = f"model.layers.{number}."
        for ours, theirs in (
            (layer.qkv, [f"self_attn.{one}_proj.weight" for one in "qkv"]),
            (layer.output, ["self_attn.o_proj.weight"]),
            (layer.gate_up, ["mlp.gate_proj.weight", "mlp.up_proj.weight"]),
            (layer.down, ["mlp.down_proj.weight"]),
        ):
            assert isinstance(ours, Tensor)
            expected = torch.cat([exact[prefix + one] for one in theirs])
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)
    kept = load_weights(checkpoint, spec, torch.float32, quantize="keep")
    assert set(kept.formats) == {"float32", *formats}
    if not formats:
        return
    assert isinstance(next(iter(kept.layers)).qkv, Quantized)
    assert isinstance(kept.head, Tensor)
    batch = Batch(rows_of(ROWS, spec.vocab, random.Random(1)), 16, CPU)
    logits = native_model(spec, kept).forward(batch, filled_cache(spec, torch.float32))
    ops = RoundingOps(spec, exact_head=True)
    expected = Decoder(spec, floats, ops, CPU).forward(batch, filled_cache(spec, torch.float32))
    assert distance(logits, expected) < ROUNDING


@pytest.mark.parametrize("variant", ["qwen3 with experts", "deepseek-v3"])
def test_quantized_experts_have_the_checkpoints_numbers(tmp_path: Path, variant: str) -> None:
    config, matrix, _ = SCHEMES["fp8 in blocks"]
    exact = quantized_folder(tmp_path, config, matrix, variant, moe_intermediate_size=96)
    checkpoint = Checkpoint(tmp_path, "experts")
    spec = load_spec(checkpoint)
    weights = load_weights(checkpoint, spec, torch.float32)
    assert spec.experts is not None
    experts = range(spec.experts.count)
    layers = [number for number in range(spec.layers) if spec.experts.in_layer(number)]
    for number, layer in [(number, tuple(weights.layers)[number]) for number in layers]:
        prefix = f"model.layers.{number}."
        for ours, theirs in (
            (layer.output, exact[f"{prefix}self_attn.o_proj.weight"]),
            (layer.expert_down, [exact[f"{prefix}mlp.experts.{one}.down_proj.weight"] for one in experts]),
        ):
            assert isinstance(ours, Tensor)
            expected = torch.stack(theirs) if isinstance(theirs, list) else theirs
            torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)


TOKENS = {"type": "float", "num_bits": 8, "dynamic": True, "strategy": "token"}


def with_activations(given: dict[str, Any] | None, **weights: Any) -> dict[str, Any]:
    config = compressed("float-quantized", "float", 8, **weights)
    config["config_groups"]["group_0"]["input_activations"] = given
    return config


DECLARATIONS: dict[str, tuple[dict[str, Any], bool]] = {
    "fp8, dynamic": ({"quant_method": "fp8", "activation_scheme": "dynamic"}, True),
    "fp8 in blocks, dynamic": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        True,
    ),
    "fp8, static": ({"quant_method": "fp8", "activation_scheme": "static"}, False),
    "fp8, not said": ({"quant_method": "fp8"}, False),
    "compressed-tensors, by token": (with_activations(TOKENS), True),
    "compressed-tensors, by group": (
        with_activations(
            TOKENS | {"strategy": "group", "group_size": 128}, strategy="block", block_structure=[128, 128]
        ),
        True,
    ),
    "compressed-tensors, static": (with_activations(TOKENS | {"dynamic": False}, strategy="tensor"), False),
    "compressed-tensors, not at all": (with_activations(None), False),
    "compressed-tensors, to integers": (with_activations(TOKENS | {"type": "int"}), False),
}


@pytest.mark.parametrize("name", DECLARATIONS)
def test_declared_rounding_of_inputs_is_kept_with_the_matrices(name: str, tmp_path: Path) -> None:
    config, expected = DECLARATIONS[name]
    quantized_folder(tmp_path, config, lambda o, i: fp8(o, i, 128 if "block" in str(config) else 0))
    checkpoint = Checkpoint(tmp_path, "declared")
    weights = load_weights(
        checkpoint, load_spec(checkpoint), torch.float32, quantize="keep", formats=frozenset(Format)
    )
    for layer in weights.layers:
        for matrix in (layer.qkv, layer.down):
            assert isinstance(matrix, Quantized)
            assert {part.rounds_inputs for part in matrix.parts} == {expected}


REFUSED: dict[str, tuple[Any, str]] = {
    "an unknown method": (
        {"quant_method": "bitsandbytes"},
        "'bitsandbytes' are not supported.*awq, compressed-tensors, fp8, gptq",
    ),
    "no method": ({}, "quantized by 'None'"),
    "no object": ("int8", "quantization_config is 'int8'"),
    "8 bits of gptq": (GPTQ | {"bits": 8}, "gptq weights with bits 8.*Supported: 4.*--quantize q8_0"),
    "a group of nothing": (GPTQ | {"group_size": 0}, "group_size 0"),
    "awq of another packing": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv.*gemm"),
    "fp8 of another kind": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt e5m2.*e4m3"),
    "blocks of nothing": ({"quant_method": "fp8", "weight_block_size": [0, 128]}, r"weight_block_size \[0"),
    "float4": (compressed("nvfp4-pack-quantized", "float", 4), "float4 in nvfp4-pack-quantized, by channel"),
    "order of activations": (
        GROUPED | compressed("pack-quantized", "int", 4, actorder="group"),
        "actorder group",
    ),
    "no groups": ({"quant_method": "compressed-tensors"}, "damaged.*config_groups"),
    "two kinds": (
        compressed("int-quantized", "int", 8)
        | {"config_groups": {"a": {"weights": {"num_bits": 8}}, "b": {"weights": {"num_bits": 4}}}},
        "of 2 kinds",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_quantization_names_value_and_way_out(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(SetupError, match=f"^config.json.*{message}"):
        scheme_of({"quantization_config": config}, "config.json")


DAMAGE: dict[str, tuple[dict[str, Any], Callable[[int, int], Rounded], str]] = {
    "another group size": (GPTQ | {"group_size": 64}, gptq, r"qzeros has shape \[4, .*requires \[2, "),
    "a group size that does not divide": (
        GROUPED
        | {"config_groups": {"a": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 48}}}},
        int4,
        "128 inputs, not a multiple of the group size 48",
    ),
    "no scales": (
        GPTQ,
        lambda o, i: ({".qweight": gptq(o, i)[0][".qweight"]}, torch.empty(0)),
        "qzeros is missing",
    ),
    "another shape": (
        GROUPED,
        lambda o, i: (int4(o, i)[0] | {".weight_shape": torch.tensor([o, 2 * i])}, torch.empty(0)),
        "weight_shape says",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_quantized_folder_is_refused(tmp_path: Path, name: str) -> None:
    config, matrix, message = DAMAGE[name]
    quantized_folder(tmp_path, config, matrix)
    checkpoint = Checkpoint(tmp_path, "damaged")
    with pytest.raises(SetupError, match=message):
        load_weights(checkpoint, load_spec(checkpoint), torch.float32)
