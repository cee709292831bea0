"""Quantized matrices: kernels against dequantized weights, and the formats that loading keeps."""

from __future__ import annotations

import logging
import math
import os
import random
import shlex
import struct
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode

from baton_api.errors import SetupError
from baton_engine import machine
from baton_engine.batch import Batch, BatchRow
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Decoder
from baton_engine.model.gguf import GGUFFile
from baton_engine.model.native_decoder import NativeDecoder, check_memory, native_decoder
from baton_engine.model.weights import LayerWeights, Weights, weights_digest
from baton_engine.ops import Linear
from baton_engine.ops.choice import kept_formats
from baton_engine.ops.native import library
from baton_engine.ops.native.products import products_of
from baton_engine.ops.plain import PlainLinear, PlainOps
from baton_engine.quantized import (
    BLOCK,
    NATIVE_FORMATS,
    Format,
    Matrix,
    Quantized,
    QuantizedPart,
    floats,
    quantize,
)
from baton_engine.spec import ExpertSpec, ModelSpec, Quantize
from tests.engine.gguf_files import write_gguf
from tests.engine.models import make_model
from tests.engine.random_weights import random_weights, tiny_spec
from tests.engine.test_cpu_ops import CPU, ROWS, filled_cache, rows_of

SHAPES: dict[str, dict[str, Any]] = {
    "heads of 64, tied": {"hidden": 256, "heads": 4, "head_dim": 64, "intermediate": 512},
    "own head, biases and a vocabulary of no multiple": {
        "hidden": 256,
        "heads": 8,
        "head_dim": 32,
        "intermediate": 256,
        "qkv_bias": True,
        "mlp_bias": True,
        "output_bias": True,
        "tied_embeddings": False,
    },
    "three of five experts": {
        "hidden": 256,
        "heads": 4,
        "head_dim": 64,
        "experts": ExpertSpec(count=5, chosen=3, intermediate=256, normalized=True),
    },
    "experts beside a dense layer": {
        "hidden": 256,
        "heads": 4,
        "head_dim": 64,
        "intermediate": 512,
        "layers": 3,
        "experts": ExpertSpec(
            count=4, chosen=2, intermediate=256, scoring="sigmoid", scale=1.5, layers=(False, True, True)
        ),
    },
}
ROUNDING = 0.01
"""Tolerance of logits, relative to their norm: activations at the edge of two 8-bit numbers fall apart."""


def expanded(matrix: Matrix) -> Tensor:
    """Dequantize by the gguf package."""
    if isinstance(matrix, Tensor):
        return matrix
    kinds = [(part.rows.numpy(), GGMLQuantizationType(part.format)) for part in matrix.parts]
    return torch.from_numpy(numpy.concatenate([gguf.quants.dequantize(rows, kind) for rows, kind in kinds]))


def random_blocks(outputs: int, inputs: int, form: Format, generator: torch.Generator) -> Quantized:
    """Random bytes, with scales that give numbers of about 1 / sqrt(inputs)."""
    values, size = gguf.GGML_QUANT_SIZES[GGMLQuantizationType(form)]
    blocks = torch.randint(0, 256, (outputs * inputs // values, size), generator=generator, dtype=torch.uint8)
    steps = {Format.Q4_K: 15 * 32, Format.Q5_K: 31 * 32, Format.Q6_K: 32 * 64, Format.Q8_0: 128}
    steps[Format.IQ4_NL] = 127
    step = steps.get(form, 31 if form in (Format.Q5_0, Format.Q5_1) else 15)
    scale = torch.rand(len(blocks), 1, generator=generator) * 2 / inputs**0.5 / step
    bits = scale.to(torch.float16).view(torch.uint8)
    if form is Format.MXFP4:
        exponents = torch.randint(120, 125, (len(blocks),), generator=generator)
        blocks[:, 0] = exponents - round(math.log2(inputs) / 2)
    elif form is Format.Q6_K:
        blocks[:, -2:] = bits
    else:
        blocks[:, :2] = bits
    minimum = {Format.Q4_1: -7.5, Format.Q5_1: -15.5, Format.Q4_K: 7, Format.Q5_K: 7}.get(form)
    if minimum is not None:
        blocks[:, 2:4] = (scale * minimum).to(torch.float16).view(torch.uint8)
    return Quantized((QuantizedPart(form, blocks.reshape(outputs, -1)),), inputs)


def quantized_weights(spec: ModelSpec, forms: Sequence[Format]) -> tuple[Weights, Weights]:
    """Weights whose matrices take the formats in turn, and the same dequantized. Stacked ones are mixed."""
    generator = torch.Generator().manual_seed(3)
    numbers = iter(range(1000))

    def of(matrix: Matrix) -> Quantized:
        form = forms[next(numbers) % len(forms)]
        assert isinstance(matrix, Tensor)
        return random_blocks(matrix.shape[0], matrix.shape[1], form, generator)

    base = random_weights(spec, torch.float32)
    layers = []
    for layer in base.layers:
        parts = {field.name: getattr(layer, field.name) for field in fields(layer)}
        experts = parts["router"] is not None
        for name in ("output", *(() if experts else ("gate_up", "down"))):
            parts[name] = of(parts[name])
        for name in ("expert_gate_up", "expert_down") if experts else ():
            parts[name] = of_experts(parts[name], forms[next(numbers) % len(forms)], generator)
        rows = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim)
        stacked = [of(piece) for piece in parts["qkv"].split(rows)]
        parts["qkv"] = Quantized(tuple(part for each in stacked for part in each.parts), spec.hidden)
        layers.append(LayerWeights(**parts))
    embedding = of(base.embedding)
    head = embedding if spec.tied_embeddings else of(base.head)
    kept = Weights(embedding=embedding, layers=tuple(layers), final_norm=base.final_norm, head=head)
    return kept, dequantized(kept)


def of_experts(matrices: Tensor, form: Format, generator: torch.Generator) -> Quantized:
    """Random blocks in the shape of the matrices [E, outputs, inputs], two parts for each expert."""
    count, outputs, inputs = matrices.shape
    halves = [random_blocks(outputs // 2, inputs, form, generator) for _ in range(2 * count)]
    return Quantized(tuple(part for half in halves for part in half.parts), inputs)


def dequantized(kept: Weights) -> Weights:
    def plain(layer: LayerWeights, name: str) -> Any:
        value = getattr(layer, name)
        if not isinstance(value, Quantized):
            return value
        if layer.router is None or not name.startswith("expert_"):
            return expanded(value)
        return expanded(value).view(len(layer.router), -1, value.inputs)

    layers = tuple(
        LayerWeights(**{field.name: plain(layer, field.name) for field in fields(layer)})
        for layer in kept.layers
    )
    embedding = expanded(kept.embedding)
    head = embedding if kept.head is kept.embedding else expanded(kept.head)
    return Weights(embedding=embedding, layers=layers, final_norm=kept.final_norm, head=head)


class RoundingOps(PlainOps):
    """Plain operations whose products have rows in 8 bits with a scale per 32 numbers."""

    def __init__(self, spec: ModelSpec, exact_head: bool = False) -> None:
        super().__init__(spec)
        self._exact = spec.vocab if exact_head else None

    def prepare(self, weight: Matrix, bias: Tensor | None = None) -> Linear:
        product = PlainLinear(floats(weight), bias)
        if weight.shape[0] == self._exact:
            return product

        def rounded(x: Tensor) -> Tensor:
            blocks = x.reshape(*x.shape[:-1], -1, BLOCK)
            scale = blocks.abs().amax(-1, keepdim=True) / 127
            return product((torch.round(blocks / scale.clamp(min=1e-30)) * scale).reshape(x.shape))

        return rounded


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def native_model(
    spec: ModelSpec,
    weights: Weights,
    threads: int = 2,
    dtype: torch.dtype = torch.float32,
    **changes: str,
) -> NativeDecoder:
    try:
        library.load(os.environ)
    except library.Unavailable as reason:
        pytest.skip(f"no native kernels: {reason}")
    model = native_decoder(spec, weights, dtype, {**os.environ, **changes}, threads)
    assert model is not None
    return model


OF_GGUF = [form for form in Format if form not in (Format.INT4, Format.FP8)]
STORED = sorted(NATIVE_FORMATS - {Format.INT4})
"""Formats of GGUF that CPUs keep."""
FORMATS = [*([form] for form in STORED), [Format.Q4_K, Format.Q6_K, Format.Q8_0, Format.Q4_0, Format.Q5_K]]


@pytest.mark.parametrize("form", OF_GGUF, ids=lambda form: form.name)
def test_scales_are_the_bytes_that_make_values_infinite(form: Format) -> None:
    kind = GGMLQuantizationType(form)
    rows = random_blocks(1, 256, form, torch.Generator().manual_seed(1)).parts[0].rows.numpy()
    block = rows.reshape(-1, gguf.GGML_QUANT_SIZES[kind][1])[:1]
    for byte in range(block.shape[1]):
        damaged = block.copy()
        damaged[0, byte] = 255
        if form is Format.MXFP4:  # the library reads the exponent 255 as a number, and the standard does not
            finite = byte > 0
        else:
            finite = bool(numpy.isfinite(gguf.quants.dequantize(damaged, kind)).all())
        assert bool(numpy.isfinite(form.scales(damaged)).all()) == finite, byte


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
@pytest.mark.parametrize("forms", FORMATS, ids=lambda forms: "+".join(form.name for form in forms))
def test_quantized_logits_are_those_of_expanded(forms: list[Format], changes: dict[str, Any]) -> None:
    """With activations rounded alike they are equal; with exact ones they differ by that rounding only."""
    spec = tiny_spec(**changes)
    kept, exact = quantized_weights(spec, forms)
    batch = Batch(rows_of(ROWS, spec.vocab, random.Random(1)), 16, CPU)
    ours, theirs = filled_cache(spec, torch.float32), filled_cache(spec, torch.float32)
    logits = native_model(spec, kept).forward(batch, ours)
    expected = Decoder(spec, exact, RoundingOps(spec), CPU).forward(batch, theirs)
    assert distance(logits, expected) < ROUNDING
    unrounded = Decoder(spec, exact, PlainOps(spec), CPU).forward(batch, filled_cache(spec, torch.float32))
    assert distance(logits, unrounded) < 0.05


EXPERT_MIXES: dict[str, tuple[str, ...]] = {
    "gate and up are expanded": ("expert_gate_up",),
    "down is expanded": ("expert_down",),
    "experts of the second layer are expanded": ("expert_gate_up", "expert_down"),
    "only experts are quantized": ("qkv", "output"),
}


@pytest.mark.parametrize("name", EXPERT_MIXES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_experts_are_computed_beside_expanded_matrices(name: str, dtype: torch.dtype) -> None:
    """Inputs of quantized matrices are 8 bits, and those of others have the dtype; rows keep their bits."""
    spec = tiny_spec(**SHAPES["three of five experts"])
    kept, exact = quantized_weights(spec, [Format.Q8_0])
    layers = [
        replace(layer, **{part: getattr(theirs, part) for part in EXPERT_MIXES[name]})
        if number or not name.startswith("experts of")
        else layer
        for number, (layer, theirs) in enumerate(zip(kept.layers, exact.layers, strict=True))
    ]
    mixed = replace(kept, layers=tuple(layers))
    rows = rows_of(ROWS, spec.vocab, random.Random(1))
    batch, cache = Batch(rows, 16, CPU), filled_cache(spec, dtype)
    logits = native_model(spec, mixed, dtype=dtype, BATON_PRODUCTS="pairs").forward(batch, cache)
    theirs = filled_cache(spec, torch.float32)
    expected = Decoder(spec, exact, PlainOps(spec), CPU).forward(batch, theirs)
    assert distance(logits, expected) < (0.05 if dtype == torch.float32 else 0.1)
    single, alone = native_model(spec, mixed, 1, dtype, BATON_PRODUCTS="pairs"), filled_cache(spec, dtype)
    for number, row in enumerate(rows):
        assert torch.equal(single.forward(Batch([row], 16, CPU), alone)[0], logits[number])


@pytest.mark.parametrize("shape", ["heads of 64, tied", "three of five experts"])
@pytest.mark.parametrize("forms", FORMATS, ids=lambda forms: "+".join(form.name for form in forms))
def test_quantized_row_is_bit_identical_in_any_batch(forms: list[Format], shape: str) -> None:
    spec = tiny_spec(**SHAPES[shape])
    kept, _ = quantized_weights(spec, forms)
    rows = rows_of(ROWS, spec.vocab, random.Random(6))
    batched, single = native_model(spec, kept, threads=3), native_model(spec, kept, threads=1)
    whole, pieces = filled_cache(spec, torch.float32), filled_cache(spec, torch.float32)
    logits = batched.forward(Batch(rows, 16, CPU), whole)
    generator = random.Random(9)
    for number, row in enumerate(rows):
        done = 0
        while done < len(row.tokens):
            count = generator.randrange(1, min(40, len(row.tokens) - done) + 1)
            piece = BatchRow(row.tokens[done : done + count], row.start + done, row.blocks, True)
            result = single.forward(Batch([piece], 16, CPU), pieces)
            done += count
        assert torch.equal(result[0], logits[number])
    assert torch.equal(whole.kv, pieces.kv)
    batch = Batch(rows, 16, CPU)
    states = batched.hidden_states(batch, filled_cache(spec, torch.float32))
    assert torch.equal(batched.project(states), logits)


def compiler_with(header: str) -> str:
    """The C compiler, which reads a header of this folder before the kernels."""
    try:
        compiler = library.find_compiler(os.environ)
    except library.Unavailable as reason:
        pytest.skip(str(reason))
    return shlex.join([*compiler, "-include", str(Path(__file__).with_name(header))])


@pytest.mark.slow
def test_quantized_kernels_for_vnni_give_the_same(tmp_path: Path) -> None:
    """The sums are integers, so only the order of the instructions may differ. VNNI is emulated."""
    if "avx2" not in library.instructions():
        pytest.skip("the emulated instructions are beside AVX2's")
    compiler = compiler_with("emulated_vnni.h")
    for shape in ("heads of 64, tied", "three of five experts"):
        spec = tiny_spec(**SHAPES[shape])
        kept, _ = quantized_weights(spec, STORED)
        batch = Batch(rows_of(ROWS, spec.vocab, random.Random(1)), 16, CPU)
        ours, theirs = (
            model.forward(batch, filled_cache(spec, torch.float32))
            for model in (
                native_model(spec, kept),
                native_model(spec, kept, CC=compiler, BATON_CACHE=str(tmp_path)),
            )
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


@pytest.fixture(scope="module", params=["emulated", pytest.param("", id="here")])
def tiled(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which products of many rows use AMX, played by plain C or this processor's."""
    if "avx512f" not in library.instructions():
        pytest.skip("tiles have the width of vectors of AVX-512")
    changes = {"BATON_PRODUCTS": "octets-amx"}
    if request.param:
        cache = tmp_path_factory.mktemp("kernels")
        changes |= {"CC": compiler_with("emulated_tiles.h"), "BATON_CACHE": str(cache)}
    elif "octets-amx" not in usable():
        pytest.skip("this processor has no AMX for numbers of 8 bits")
    return changes


def usable() -> list[str]:
    """The ways of products that this processor has."""
    try:
        rates = products_of(library.load(os.environ), {**os.environ, "BATON_PRODUCTS": ""}).rates
    except library.Unavailable as reason:
        pytest.skip(f"no native kernels: {reason}")
    return [way for way, each in rates.items() if any(each)]


@pytest.mark.slow  # it compiles the kernels with emulated tiles
@pytest.mark.parametrize("shape", ["heads of 64, tied", "three of five experts"])
def test_quantized_products_in_tiles_have_the_same_bits(tiled: dict[str, str], shape: str) -> None:
    """The sums are integers. Q6_K has no tiles, and stays as it is beside the others."""
    spec = tiny_spec(**SHAPES[shape])
    kept, _ = quantized_weights(spec, STORED)
    batch = Batch(rows_of([(0, 75), (5, 1), (40, 3)], spec.vocab, random.Random(4)), 16, CPU)
    ours, theirs = filled_cache(spec, torch.float32), filled_cache(spec, torch.float32)
    logits = native_model(spec, kept, 2, torch.float32, **tiled).forward(batch, ours)
    expected = native_model(spec, kept, BATON_PRODUCTS="octets").forward(batch, theirs)
    assert torch.equal(logits, expected)
    assert torch.equal(ours.kv, theirs.kv)


def test_quantized_invalid_activations_give_nan_in_one_row() -> None:
    spec = tiny_spec(**SHAPES["own head, biases and a vocabulary of no multiple"])
    kept, _ = quantized_weights(spec, [Format.Q8_0])
    model, cache = native_model(spec, kept), filled_cache(spec, torch.float32)
    broken, sound = rows_of([(20, 1), (20, 1)], spec.vocab, random.Random(2))
    cache.kv[broken.blocks[0], 0, 1, :, 3] = float("inf")
    logits = model.forward(Batch([broken, sound], 16, CPU), cache)
    assert logits[0].isnan().all()
    assert logits[1].isfinite().all()


CONVERTED = [Format.Q8_0, Format.Q4_0]
"""Formats that `--quantize` converts to."""


def hard_values() -> Tensor:
    """Return blocks [16, 96] fp32 in which conversions may differ: ties, signs and tiny scales."""
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(16, 96, generator=generator)
    values[1], values[2] = 0.0, -0.0
    halves = torch.arange(96) - 47.5
    values[3] = halves.where(halves.abs() != 0.5, 127.0)  # scale 1 in Q8_0
    values[4] = halves / 6  # ties of Q4_0 too
    values[5] = 3.0 * (-1.0) ** torch.arange(96)  # the first of equal magnitudes has the sign of Q4_0's scale
    for row, exponent in zip(range(6, 13), (-133, -127, -121, -100, -20, -14, 15), strict=True):
        values[row] = values[0] * 2.0**exponent  # below, around and above the smallest inverse, float16, fp32
    values[13] = values[0].bfloat16().float()
    values[14, :32], values[14, 32:] = 2.0**-149, values[0, 32:] * 2.0**-140
    values[15, ::7] = 65504.0
    return values


@pytest.mark.parametrize("form", CONVERTED)
def test_quantize_equals_llama_cpps_blocks(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices too. Where llama.cpp divides by a scale whose inverse is infinite, numbers are of zero."""
    values = hard_values()
    blocks = values.view(-1, BLOCK)
    largest = blocks.gather(1, blocks.abs().argmax(1, keepdim=True))[:, 0]
    tiny = (largest / (127 if form is Format.Q8_0 else 8)).reciprocal().isinf() & (largest != 0)
    assert 6 <= tiny.sum() <= 12
    (whole,) = quantize(values, form).parts
    with monkeypatch.context() as patch:
        patch.setattr("baton_engine.quantized.SLICE", 3 * 96)
        (sliced,) = quantize(values, form).parts
    assert torch.equal(sliced.rows, whole.rows)
    got = whole.rows.numpy().reshape(len(blocks), -1)
    with numpy.errstate(all="ignore"):
        expected = gguf.quants.quantize(values.numpy(), GGMLQuantizationType(form)).reshape(got.shape)
    assert numpy.array_equal(got[~tiny], expected[~tiny])
    assert numpy.array_equal(got[tiny][:, :2], expected[tiny][:, :2])
    assert (got[tiny][:, 2:] == (0 if form is Format.Q8_0 else 0x88)).all()


@pytest.mark.parametrize("form", CONVERTED)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 1e30])
def test_quantize_refuses_values_without_a_finite_scale(form: Format, value: float) -> None:
    values = torch.ones(40, 96)
    values[39, 95] = value
    with pytest.raises(ValueError, match=f"too large for a float16 scale of {form.name}"):
        quantize(values, form)


class Divisors(TorchFunctionMode):
    """Checks that no operation divides by a number: GPUs multiply by its inverse, CPUs do not."""

    divisions = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "div" in func.__name__:
            self.divisions += 1
            assert isinstance(args[1], Tensor) and args[1].dim() > 0, func
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("form", CONVERTED)
def test_quantize_divides_alike_on_all_devices(form: Format) -> None:
    values = hard_values()
    with Divisors() as mode:
        quantize(values, form)
    assert mode.divisions == (1 if form is Format.Q8_0 else 0)


def load(path: Path, choice: Any) -> tuple[ModelSpec, Weights]:
    checkpoint = Checkpoint(path, path.name)
    spec = load_spec(checkpoint)
    return spec, load_weights(checkpoint, spec, torch.float32, quantize=choice)


def test_gguf_quantized_matrices_are_kept(tmp_path: Path) -> None:
    """Also those of query and key, whose rows llama.cpp reorders."""
    path = write_gguf(make_model(tmp_path / "model"), tmp_path / "tiny.gguf", quantised=True)
    spec, kept = load(path, "keep")
    _, exact = load(path, "off")
    assert set(kept.formats) == {"Q8_0", "float32"}
    for ours, theirs in zip(kept.layers, exact.layers, strict=True):
        for name in ("qkv", "output", "gate_up", "down"):
            assert isinstance(getattr(ours, name), Quantized)
            torch.testing.assert_close(expanded(getattr(ours, name)), getattr(theirs, name), rtol=0, atol=0)
    assert kept.bytes < 0.4 * exact.bytes
    assert weights_digest(kept).endswith(" with Q8_0")
    assert weights_digest(kept) != weights_digest(exact)
    assert native_model(spec, kept).bytes == pytest.approx(kept.bytes, rel=0.15)


def test_experts_that_the_kernels_compute_are_kept(caplog: pytest.LogCaptureFixture) -> None:
    """Those of gpt-oss have biases, with which torch computes."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    native_model(tiny_spec(), random_weights(tiny_spec(), torch.float32))  # skips without kernels
    experts = ExpertSpec(count=4, chosen=2, intermediate=32)
    choices: dict[bool, Any] = {}
    with caplog.at_level(logging.INFO):
        for biased in (False, True):
            spec = tiny_spec(experts=replace(experts, biased=biased))
            choices[biased] = kept_formats("keep", spec, CPU, torch.bfloat16, environment)
    assert choices == {False: ("keep", NATIVE_FORMATS), True: ("off", NATIVE_FORMATS)}
    (line,) = caplog.messages
    assert "are expanded on cpu" in line and "do not support the model" in line


@pytest.mark.parametrize(
    ("variant", "size", "choice"),
    [
        ("mixtral", {"intermediate_size": 96}, "keep"),
        ("qwen3 with experts", {"moe_intermediate_size": 64}, "keep"),
        ("qwen3 with experts in some layers", {"moe_intermediate_size": 64}, "q4_0"),
    ],
)
def test_matrices_of_experts_are_kept(
    variant: str, size: dict[str, int], choice: Quantize, tmp_path: Path
) -> None:
    """Those of a GGUF file as they are stored, and those of a folder are converted."""
    source = make_model(tmp_path / "model", variant, **size)
    if choice == "keep":
        source = write_gguf(source, tmp_path / "tiny.gguf", quantised=True)
    spec, kept = load(source, choice)
    _, exact = load(source, "off")
    for number, (ours, theirs) in enumerate(zip(kept.layers, exact.layers, strict=True)):
        for name in ("expert_gate_up", "expert_down"):
            matrix, values = getattr(ours, name), getattr(theirs, name)
            if spec.experts_of(number) is None:
                assert matrix is None
                continue
            assert isinstance(matrix, Quantized)
            within = 0 if choice == "keep" else 0.2
            torch.testing.assert_close(expanded(matrix).view_as(values), values, rtol=0, atol=within)
    model = native_model(spec, kept)
    assert model.bytes == pytest.approx(kept.bytes, rel=0.2)
    assert 0.97 * kept.bytes < kept.least_bytes <= kept.bytes  # without knowing which matrices are routers
    batch = Batch(rows_of(ROWS, spec.vocab, random.Random(1)), 16, CPU)
    logits = model.forward(batch, filled_cache(spec, torch.float32))
    rounding = Decoder(spec, dequantized(kept), RoundingOps(spec), CPU)
    expected = rounding.forward(batch, filled_cache(spec, torch.float32))
    assert distance(logits, expected) < ROUNDING


def test_gguf_other_formats_are_expanded_and_logged(tmp_path: Path, caplog: Any) -> None:
    """A format without kernels, and gate and up in two formats: the kernels read them side by side."""
    forms = {"attn_output": GGMLQuantizationType.MXFP4, "ffn_gate": GGMLQuantizationType.Q4_0}
    path = write_gguf(make_model(tmp_path / "model"), tmp_path / "tiny.gguf", quantised=True, forms=forms)
    with caplog.at_level(logging.WARNING):
        _, kept = load(path, "keep")
    first = next(iter(kept.layers))
    assert isinstance(first.output, Tensor)
    assert isinstance(first.gate_up, Tensor)
    assert isinstance(first.down, Quantized)
    assert "2 matrices in MXFP4 were expanded" in caplog.text
    assert "2 matrices in Q4_0 were expanded" in caplog.text


def test_gguf_experts_in_two_formats_are_expanded_and_logged(tmp_path: Path, caplog: Any) -> None:
    folder = make_model(tmp_path / "model", "mixtral", intermediate_size=96)
    forms = {"ffn_gate_exps": GGMLQuantizationType.Q4_0, "ffn_down_exps": GGMLQuantizationType.MXFP4}
    path = write_gguf(folder, tmp_path / "tiny.gguf", quantised=True, forms=forms)
    with caplog.at_level(logging.WARNING):
        spec, kept = load(path, "keep")
    first = next(iter(kept.layers))
    assert isinstance(first.qkv, Quantized)
    assert isinstance(first.expert_gate_up, Tensor) and isinstance(first.expert_down, Tensor)
    assert "10 matrices in MXFP4 were expanded" in caplog.text  # of five experts in two layers
    assert native_model(spec, kept).bytes == pytest.approx(kept.bytes, rel=0.2)


@pytest.mark.parametrize(("variant", "tensor"), [("llama", "ffn_down"), ("mixtral", "ffn_down_exps")])
def test_gguf_scale_that_is_no_number_is_refused(variant: str, tensor: str, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", variant, intermediate_size=96)
    path = write_gguf(folder, tmp_path / "tiny.gguf", quantised=True)
    data = bytearray(path.read_bytes())
    at = GGUFFile(path).tensors[f"blk.1.{tensor}.weight"].offset + 34 * 5
    data[at : at + 2] = struct.pack("<e", float("inf"))
    path.write_bytes(data)
    with pytest.raises(SetupError, match=rf"blk\.1\.{tensor}\.weight in Q8_0 has a scale that is inf"):
        load(path, "keep")


def test_gguf_experts_that_are_cut_off_are_refused(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "mixtral", intermediate_size=96)
    path = write_gguf(folder, tmp_path / "tiny.gguf", quantised=True)
    os.truncate(path, GGUFFile(path).tensors["blk.1.ffn_down_exps.weight"].offset + 34)
    with pytest.raises(SetupError, match=r"truncated or damaged.*Download it again"):
        load(path, "keep")


@pytest.mark.parametrize(
    ("choice", "size"), [("off", 4), ("keep", 34 / 32), ("q8_0", 34 / 32), ("q4_0", 34 / 32)]
)
def test_weights_that_exceed_the_machine_are_refused(choice: Quantize, size: float, tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "mixtral", intermediate_size=96)
    path = write_gguf(folder, tmp_path / "tiny.gguf", quantised=True)
    _, weights = load(path, choice)
    matrices = sum(value.numel() for name, value in load_file(folder / "model.safetensors").items())
    assert weights.least_bytes == pytest.approx(matrices * size, rel=0.03)
    check_memory(weights.least_bytes, weights.least_bytes)
    check_memory(weights.least_bytes, None)
    with pytest.raises(SetupError, match=r"need .*B, but the machine has .*B of memory and swap"):
        check_memory(weights.least_bytes, weights.least_bytes - 1)


def test_memory_of_expanded_weights_is_not_needed_for_quantized_ones() -> None:
    """The kernels reserve addresses for expanded weights, here four times the machine's memory."""
    total = machine.total_memory()
    if total is None or Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2":
        pytest.skip("the system does not reserve addresses without memory")
    small = tiny_spec()
    of_each = small.layers * 3 * small.hidden * torch.float32.itemsize
    large = replace(small, intermediate=4 * total // of_each)
    model = native_model(large, random_weights(small, torch.float32))
    assert model.bytes < total / 1000


def test_safetensors_matrices_are_quantized_while_loading(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama with tied embeddings")
    spec, exact = load(folder, "off")
    _, kept = load(folder, "q8_0")
    assert set(kept.formats) == {"Q8_0", "float32"}
    assert kept.head is kept.embedding
    batch = Batch(rows_of(ROWS, spec.vocab, random.Random(1)), 16, CPU)
    logits = native_model(spec, kept).forward(batch, filled_cache(spec, torch.float32))
    expected = Decoder(spec, exact, PlainOps(spec), CPU).forward(batch, filled_cache(spec, torch.float32))
    assert distance(logits, expected) < 0.1


def test_value_that_cannot_be_converted_is_refused_with_its_tensor(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model", "llama")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = math.inf
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(SetupError, match=r"layers\.1\.mlp\.down_proj\.weight.*Q4_0.*--quantize off"):
        load(folder, "q4_0")
