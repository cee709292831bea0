"""Parts of quantized matrices: exactly the numbers of the whole matrix, or none."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.cuts import Cut
from baton_engine.model.family_tensors import FamilyTensors
from baton_engine.model.gguf_model import GGUFTensors
from baton_engine.model.quantized_folder import FLOAT4_VALUES, source_of
from baton_engine.model.shards import Shard, ShardTensors
from baton_engine.model.tensor_reader import TensorSource
from baton_engine.model.weights import weights_digest
from baton_engine.quantized import FLOAT8_FACTOR, Format, Quantized, pack_float8, unpack
from baton_engine.spec import Quantize
from tests.engine.expert_models import LATENT_BLOCKS
from tests.engine.gguf_files import write_gguf
from tests.engine.models import make_model
from tests.engine.test_quantized import OF_GGUF, STORED, random_blocks
from tests.engine.test_quantized_folder import SCHEMES, quantized_folder

OUTPUTS, INPUTS = 12, 512
ALL = frozenset(Format)
CUTS = {
    "outputs": Cut(0, (range(3, 10),)),
    "stacked outputs": Cut(0, (range(2), range(5, 6), range(8, 12))),
    "the first inputs": Cut(1, (range(256),)),
    "the last inputs": Cut(1, (range(256, 512),)),
}


def values_of(matrix: Quantized) -> Tensor:
    """The values [outputs, inputs] fp32, by the rule of `Unpacked`."""
    (part,) = matrix.parts
    unpacked = unpack(part, matrix.inputs)

    def wide(tensor: Tensor, group: int) -> Tensor:
        return tensor.to(torch.float32).repeat_interleave(group, 1)[:, : matrix.inputs]

    numbers = unpacked.numbers.to(torch.float32) - unpacked.zero
    scales = wide(unpacked.scales, unpacked.group)
    if unpacked.floats == "float4":
        numbers = torch.tensor(FLOAT4_VALUES)[unpacked.numbers.long()]
    if unpacked.floats == "float8":
        numbers = unpacked.numbers.view(torch.float8_e4m3fn).to(torch.float32) / FLOAT8_FACTOR
    if unpacked.zeros is not None:
        numbers -= wide(unpacked.zeros, unpacked.group)
    offsets = torch.zeros(()) if unpacked.minima is None else wide(unpacked.minima, unpacked.group)
    if unpacked.factors is not None:
        scales = scales * wide(unpacked.factors[..., 0], 256)
        offsets = offsets * wide(unpacked.factors[..., 1], 256)
    return numbers * scales + offsets


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("form", OF_GGUF, ids=lambda form: form.name)
def test_part_of_blocks_has_the_numbers_of_the_whole(form: Format, cut: Cut) -> None:
    whole = random_blocks(OUTPUTS, INPUTS, form, torch.Generator().manual_seed(1))
    part = cut.of_blocks(whole.parts[0], INPUTS)
    assert part is not None and part.shape == cut.shape((OUTPUTS, INPUTS))
    assert part.nbytes * OUTPUTS * INPUTS == whole.nbytes * part.shape[0] * part.inputs
    assert torch.equal(values_of(part), cut.of(values_of(whole)))


@pytest.mark.parametrize(
    ("form", "inputs"), [(Format.Q8_0, range(48, 512)), (Format.Q4_0, range(48)), (Format.Q4_K, range(384))]
)
def test_part_inside_a_block_is_not_kept(form: Format, inputs: range) -> None:
    whole = random_blocks(OUTPUTS, INPUTS, form, torch.Generator().manual_seed(1))
    assert Cut(1, (inputs,)).of_blocks(whole.parts[0], INPUTS) is None


FLOAT8: dict[str, tuple[int, Cut, int | None]] = {
    **{f"{name} in groups of 128": (128, cut, 128) for name, cut in CUTS.items()},
    "outputs with a scale each": (512, CUTS["stacked outputs"], 512),
    "inputs of outputs with a scale each": (512, Cut(1, (range(7, 50),)), 43),
    "to the inside of a group": (48, Cut(1, (range(72),)), 48),
    "the last group is shorter": (48, Cut(1, (range(480, 512),)), 32),
    "the last two groups": (48, Cut(1, (range(432, 512),)), 48),
    "from the middle of a group": (128, Cut(1, (range(192, 512),)), 64),
    "from a step inside a group": (48, Cut(1, (range(64, 512),)), 16),
    "from the inside of a step": (48, Cut(1, (range(72, 512),)), None),
    "one group": (48, Cut(1, (range(49, 60),)), 11),
}
"""Inputs of a group, the cut, and inputs of a group of the part."""


@pytest.mark.parametrize("name", FLOAT8)
def test_part_of_float8_has_the_numbers_of_the_whole(name: str) -> None:
    group, cut, expected = FLOAT8[name]
    generator = torch.Generator().manual_seed(2)
    numbers = torch.randn(OUTPUTS, INPUTS, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(OUTPUTS, -(-INPUTS // group), generator=generator) + 0.1
    part = cut.of_float8(numbers, scales, group)
    assert (part and part.parts[0].group) == expected
    if part is not None:
        assert part.shape == cut.shape((OUTPUTS, INPUTS))
        assert torch.equal(values_of(part), cut.of(values_of(pack_float8(numbers, scales, group))))


@pytest.mark.parametrize("seed", range(20))
def test_parts_of_any_ranks_are_kept_or_inside_a_group(seed: int) -> None:
    """The parts of inputs that 1 to 8 ranks have."""
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    inputs, size = 256 * chance.randint(1, 6), chance.randint(1, 8)
    form, group = chance.choice(STORED), chance.choice([16, 48, 64, 128, inputs])
    blocks = random_blocks(OUTPUTS, inputs, form, generator)
    numbers = torch.randn(OUTPUTS, inputs, generator=generator).to(torch.float8_e4m3fn).view(torch.uint8)
    scales = torch.rand(OUTPUTS, -(-inputs // group), generator=generator) + 0.1
    float8 = pack_float8(numbers, scales, group)
    for rank in range(size):
        own = Shard(rank, size).part(inputs)
        cut = Cut(1, (own,))
        part = cut.of_blocks(blocks.parts[0], inputs)
        assert (part is None) == bool(own.start % form.block or own.stop % form.block)
        kept = cut.of_float8(numbers, scales, group)
        one_group = own.start // group == (own.stop - 1) // group
        assert (kept is None) == bool(own.start % 16 and not one_group)
        for result, whole in ((part, blocks), (kept, float8)):
            assert result is None or torch.equal(values_of(result), cut.of(values_of(whole)))


# --- Checkpoints ---


def folder_of(name: str, path: Path, variant: str = "llama", **sizes: Any) -> tuple[Checkpoint, TensorSource]:
    config, matrix, _ = SCHEMES[name]
    quantized_folder(path, config, matrix, variant, **sizes)
    checkpoint = Checkpoint(path, name)
    spec = load_spec(checkpoint)
    whole = json.loads((path / "config.json").read_text())
    return checkpoint, FamilyTensors(source_of(path, whole, spec), spec)


def file_of(path: Path) -> tuple[Checkpoint, TensorSource]:
    """A file whose query and key rows are in another order, and whose embedding is quantized."""
    folder = make_model(path / "model", "llama with tied embeddings")
    checkpoint = Checkpoint(write_gguf(folder, path / "tiny.gguf", quantised=True), "tiny")
    return checkpoint, GGUFTensors(checkpoint.gguf, load_spec(checkpoint))


def latents_of(form: str, path: Path, variant: str = "deepseek-v3") -> tuple[Checkpoint, TensorSource]:
    """A checkpoint with latent attention, as a file or a folder."""
    sizes = {**LATENT_BLOCKS, **({} if variant == "deepseek-v3" else {"q_lora_rank": None})}
    if form != "gguf":
        return folder_of(form, path, variant, **sizes)
    folder = make_model(path / "model", variant, **sizes)
    checkpoint = Checkpoint(write_gguf(folder, path / "tiny.gguf", quantised=True), "tiny")
    return checkpoint, GGUFTensors(checkpoint.gguf, load_spec(checkpoint))


def assert_parts(checkpoint: Checkpoint, source: TensorSource, size: int) -> int:
    """Assert that kept parts have the numbers of the expanded matrix. Return the number of kept parts."""
    spec, kept = load_spec(checkpoint), 0
    for rank in range(size):
        part = ShardTensors(source, spec, Shard(rank, size))
        for name in source.shapes:
            if (matrix := part.read_quantized(name)) is not None:
                assert torch.equal(values_of(matrix), part.read(name)), name
                kept += 1
    return kept


NEVER_KEPT = ("gptq in another order", "int4, groups of 16")


@pytest.mark.parametrize("name", SCHEMES)
def test_ranks_keep_their_parts_of_a_folder(name: str, tmp_path: Path) -> None:
    """Of 14 matrices in 2 layers."""
    checkpoint, source = folder_of(name, tmp_path)
    assert assert_parts(checkpoint, source, 2) == (0 if name in NEVER_KEPT else 2 * 14)


def test_ranks_keep_their_parts_of_a_file(tmp_path: Path) -> None:
    """Parts of 32 inputs are blocks. Those of 48, of the down projection, are not."""
    checkpoint, source = file_of(tmp_path)
    assert assert_parts(checkpoint, source, 1) == 15
    spec = load_spec(checkpoint)
    for rank in (0, 1):
        part = ShardTensors(source, spec, Shard(rank, 2))
        assert part.read_quantized("model.layers.1.self_attn.o_proj.weight") is not None
        assert part.read_quantized("model.layers.1.mlp.down_proj.weight") is None
    assert assert_parts(checkpoint, source, 2) == 2 * (15 - 2)


MOVED: dict[str, tuple[str, str, set[str]]] = {
    "latents in fp8": ("fp8 in blocks", "deepseek-v3", {"q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"}),
    "latents in awq": ("awq", "deepseek-v3", {"q_b_proj", "kv_a_proj_with_mqa"}),
    "latents in a file": ("gguf", "deepseek-v3", {"q_b_proj", "kv_a_proj_with_mqa"}),
    "no latent of queries": ("fp8 in blocks", "deepseek-v2 with groups", {"q_proj", "kv_a_proj_with_mqa"}),
    "heads": ("awq", "glm4", {"q_proj", "k_proj"}),
}
"""Format, variant, and matrices, most of which have rows in another order than the checkpoint."""


@pytest.mark.parametrize("name", MOVED)
def test_rows_in_another_order_are_kept(name: str, tmp_path: Path) -> None:
    """All of them, and any part."""
    form, variant, matrices = MOVED[name]
    _, source = (
        folder_of(form, tmp_path, variant) if variant == "glm4" else latents_of(form, tmp_path, variant)
    )
    chance = random.Random(3)
    for matrix in (f"model.layers.1.self_attn.{part}.weight" for part in sorted(matrices)):
        exact, whole = source.read(matrix), source.read_quantized(matrix)
        assert whole is not None and torch.equal(values_of(whole), exact)
        for _ in range(8):
            rows = sorted(chance.sample(range(len(exact) + 1), 4))
            cut = Cut(0, (range(*rows[:2]), range(*rows[2:])))
            part = source.read_quantized(matrix, cut)
            assert part is not None and torch.equal(values_of(part), cut.of(exact))


@pytest.mark.parametrize(("form", "group"), [("fp8 in blocks", 16), ("gguf", 0)])
def test_ranks_keep_their_parts_of_latent_attention(form: str, group: int, tmp_path: Path) -> None:
    """Those of the inputs of o begin at 32: inside a block of 48, or between two blocks."""
    checkpoint, source = latents_of(form, tmp_path)
    whole = assert_parts(checkpoint, source, 1)
    assert whole and assert_parts(checkpoint, source, 2) == 2 * whole
    part = ShardTensors(source, load_spec(checkpoint), Shard(1, 2))
    output = part.read_quantized("model.layers.0.self_attn.o_proj.weight")
    assert output is not None and output.parts[0].group == group


def test_ranks_hold_only_their_part(tmp_path: Path) -> None:
    checkpoint, _ = folder_of("awq", tmp_path)
    spec = load_spec(checkpoint)
    sizes = [
        load_weights(checkpoint, spec, torch.float32, quantize="keep", shard=shard, formats=ALL).formats
        for shard in (Shard(0, 1), Shard(0, 2), Shard(1, 2))
    ]
    norms = (2 * spec.layers + 1) * spec.hidden * 4
    for part in sizes[1:]:
        assert part["INT4"] == sizes[0]["INT4"] // 2
        assert part["float32"] == (sizes[0]["float32"] + norms) // 2


def test_parts_inside_a_group_are_expanded_and_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint, _ = file_of(tmp_path)
    caplog.set_level(logging.INFO)
    part = load_weights(
        checkpoint, load_spec(checkpoint), torch.float32, quantize="keep", shard=Shard(1, 2), formats=ALL
    )
    for layer in part.layers:
        assert isinstance(layer.qkv, Quantized) and isinstance(layer.output, Quantized)
        assert isinstance(layer.gate_up, Quantized) and isinstance(layer.down, Tensor)
    assert isinstance(part.embedding, Quantized) and len(part.embedding.parts[0].rows) == 160
    (line,) = [record.getMessage() for record in caplog.records if "were expanded" in record.getMessage()]
    assert "2 matrices in Q8_0 were expanded" in line and line.endswith("in parts of whole groups of inputs")


@pytest.mark.parametrize("choice", ["keep", "off", "q8_0"])
@pytest.mark.parametrize(
    "name", ["gguf", "awq", "gptq in another order", "int4 with zeros", "fp8 in blocks", "latents in fp8"]
)
def test_digest_of_samples_is_that_of_all_weights(name: str, choice: Quantize, tmp_path: Path) -> None:
    if name == "latents in fp8":
        checkpoint, _ = latents_of("fp8 in blocks", tmp_path)
    else:
        checkpoint, _ = file_of(tmp_path) if name == "gguf" else folder_of(name, tmp_path)
    spec = load_spec(checkpoint)
    read, whole = (
        load_weights(checkpoint, spec, torch.float32, quantize=choice, sampled=sampled, formats=ALL)
        for sampled in (True, False)
    )
    assert weights_digest(read) == weights_digest(whole)
