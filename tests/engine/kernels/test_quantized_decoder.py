"""Quantized models with accelerators' kernels, and the formats that a device keeps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from safetensors.torch import load_file
from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.batch import Batch, BatchRow
from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Decoder
from baton_engine.model.head_loading import mtp_head
from baton_engine.model.weights import Weights, weights_digest
from baton_engine.ops import Linear
from baton_engine.ops.accelerator import AcceleratorOps
from baton_engine.ops.choice import kept_formats
from baton_engine.ops.kernels.experts import QuantizedExperts
from baton_engine.ops.kernels.quantized import QuantizedLinear
from baton_engine.ops.plain import PlainOps
from baton_engine.quantized import NATIVE_FORMATS, Format, Matrix, Quantized
from baton_engine.spec import ExpertSpec, LatentSpec, ModelSpec, Quantize
from tests.engine.draft_heads import make_mtp
from tests.engine.expert_models import LATENT_BLOCKS
from tests.engine.gguf_files import write_gguf
from tests.engine.greedy import CPU, by_baton
from tests.engine.kernels.cases import DEVICE
from tests.engine.kernels.test_accelerated_decoder import PROMPTS
from tests.engine.models import make_model
from tests.engine.random_weights import tiny_spec
from tests.engine.test_expert_tensors import as_mxfp4
from tests.engine.test_quantized import distance
from tests.engine.test_quantized_folder import SCHEMES, fp8, quantize_folder, quantized_folder

pytestmark = [
    pytest.mark.skipif(DEVICE.type != "cpu", reason="these models are on a CPU"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),  # of numpy
    pytest.mark.usefixtures("few_programs"),
]

KEPT = {
    "gptq": {"INT4"},
    "gptq in another order": set(),
    "awq": {"INT4"},
    "int8": {"Q8_0"},
    "int4 with zeros": {"INT4"},
    "fp8": {"FP8"},
    "fp8 of compressed-tensors": {"FP8"},
    "fp8 in blocks": {"FP8"},
}
"""Checkpoints of `SCHEMES`, and the formats that a device keeps."""


def both(path: Path) -> tuple[Decoder, Decoder, Weights]:
    """The model with kept weights and kernels, and expanded with plain operations."""
    checkpoint = Checkpoint(path, "quantized")
    spec = load_spec(checkpoint)
    kept = load_weights(checkpoint, spec, torch.float32, quantize="keep", formats=frozenset(Format))
    exact = load_weights(checkpoint, spec, torch.float32)
    ours = Decoder(spec, kept, AcceleratorOps(spec), CPU, dtype=torch.float32)
    return ours, Decoder(spec, exact, PlainOps(spec), CPU), kept


def assert_same_tokens(ours: Decoder, plain: Decoder, prompts: list[list[int]], count: int) -> None:
    results, expected = by_baton(ours, prompts, count, 5), by_baton(plain, prompts, count, 64)
    for result, other in zip(results, expected, strict=True):
        assert result.tokens == other.tokens
        assert result.logprobs == pytest.approx(other.logprobs, abs=5e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_kept_checkpoint_gives_the_expanded_tokens(name: str, tmp_path: Path) -> None:
    config, matrix, _ = SCHEMES[name]
    quantized_folder(tmp_path, config, matrix)
    ours, plain, kept = both(tmp_path)
    assert set(kept.formats) == {"float32", *KEPT[name]}
    assert weights_digest(kept).endswith(f" with {', '.join(KEPT[name])}" if KEPT[name] else "")
    assert_same_tokens(ours, plain, [prompt[:9] for prompt in PROMPTS[:2]], 2)


@pytest.mark.slow
def test_kept_gguf_file_gives_the_expanded_tokens(tmp_path: Path) -> None:
    """Its embedding is quantized as well, and is the head: they share memory."""
    folder = make_model(tmp_path / "model", "llama with tied embeddings")
    ours, plain, kept = both(write_gguf(folder, tmp_path / "tiny.gguf", quantised=True))
    assert isinstance(kept.embedding, Quantized)
    head: object = ours.head
    assert head is ours.embedding
    assert_same_tokens(ours, plain, [prompt[:9] for prompt in PROMPTS[:2]], 2)


EXPERTS = {"moe_intermediate_size": 96, "num_hidden_layers": 1}
"""Inputs of experts in whole blocks of 32 and of 48."""


@pytest.mark.parametrize("name", ["fp8 in blocks", pytest.param("awq", marks=pytest.mark.slow)])
def test_kept_experts_give_the_expanded_tokens(name: str, tmp_path: Path) -> None:
    config, matrix, _ = SCHEMES[name]
    quantized_folder(tmp_path, config, matrix, "qwen3 with experts", **EXPERTS)
    ours, plain, kept = both(tmp_path)
    assert isinstance(next(iter(kept.layers)).expert_down, Quantized)
    assert set(kept.formats) == {"float32", *KEPT[name]}
    assert_same_tokens(ours, plain, [prompt[:9] for prompt in PROMPTS[:2]], 2)


@pytest.mark.slow
def test_kept_mxfp4_experts_give_the_expanded_tokens(tmp_path: Path) -> None:
    for name in ("expanded", "packed"):
        (tmp_path / name).mkdir()
    make_model(tmp_path / "expanded", "gpt-oss", intermediate_size=96, num_hidden_layers=1)
    as_mxfp4(tmp_path / "expanded", tmp_path / "packed")
    ours, plain, kept = both(tmp_path / "packed")
    assert set(kept.formats) == {"float32", "MXFP4"}
    assert_same_tokens(ours, plain, [prompt[:9] for prompt in PROMPTS[:2]], 2)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["qwen3 with experts", "mixtral"])
def test_kept_experts_of_a_gguf_file_give_the_expanded_tokens(variant: str, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 96} if variant.startswith("qwen3") else {"intermediate_size": 96}
    folder = make_model(tmp_path / "model", variant, hidden_size=128, **sizes)
    ours, plain, kept = both(write_gguf(folder, tmp_path / "tiny.gguf", quantised=True))
    assert isinstance(next(iter(kept.layers)).expert_gate_up, Quantized)
    assert_same_tokens(ours, plain, [prompt[:9] for prompt in PROMPTS[:2]], 2)


EXPANDED = {"latent_kv", "router"}
"""Matrices of a layer that no model keeps."""


def tensors_of(value: object) -> Iterator[Tensor]:
    """The tensors of a layer on its device."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list):
        for each in value:
            yield from tensors_of(each)
    elif isinstance(value, QuantizedLinear | QuantizedExperts):
        for each in vars(value).values():
            yield from tensors_of(each)
    elif is_dataclass(value):
        for part in fields(value):
            yield from tensors_of(getattr(value, part.name))


def assert_matrices_are_kept(ours: Decoder, kept: Weights) -> None:
    """Nothing else is in memory: no expanded copies, and nothing that the rows of the checkpoint lack."""
    layers = tuple(kept.layers)
    for layer in layers:
        values = {part.name: getattr(layer, part.name) for part in fields(layer)}
        assert {
            name for name, each in values.items() if isinstance(each, Tensor) and each.dim() > 1
        } <= EXPANDED
    held = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in tensors_of([*ours.layers])
    }
    assert sum(held.values()) == sum(layer.formats.total() for layer in layers)


LATENTS = {
    "fp8 in blocks": ("fp8 in blocks", "deepseek-v3", {}),
    "fp8 in blocks, no latent of queries": (
        "fp8 in blocks",
        "deepseek-v2 with groups",
        {"q_lora_rank": None},
    ),
    "awq": ("awq", "deepseek-v3", {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LATENTS)
def test_kept_latent_attention_gives_the_expanded_tokens(name: str, tmp_path: Path) -> None:
    """Blocks of 48 outputs: the latents, whose projections are joined, have 64 each."""
    form, variant, sizes = LATENTS[name]
    config, matrix, _ = SCHEMES[form]
    quantized_folder(tmp_path, config, matrix, variant, **{**LATENT_BLOCKS, **sizes})
    ours, plain, kept = both(tmp_path)
    assert set(kept.formats) == {"float32", *KEPT[form]}
    if form.startswith("fp8"):
        assert_matrices_are_kept(ours, kept)
    assert_same_tokens(ours, plain, [PROMPTS[1][:5]], 2)


@pytest.mark.slow
def test_kept_latent_attention_of_a_gguf_file_gives_the_expanded_tokens(tmp_path: Path) -> None:
    """The joined projections of the latents have two formats."""
    folder = make_model(tmp_path / "model", "deepseek-v3", **LATENT_BLOCKS)
    forms = {"attn_kv_a_mqa": GGMLQuantizationType.Q5_1, "attn_output": GGMLQuantizationType.Q4_0}
    ours, plain, kept = both(write_gguf(folder, tmp_path / "tiny.gguf", quantised=True, forms=forms))
    assert set(kept.formats) == {"float32", "Q8_0", "Q5_1", "Q4_0"}
    qkv = next(iter(kept.layers)).qkv
    assert isinstance(qkv, Quantized) and [part.format.name for part in qkv.parts] == ["Q8_0", "Q5_1"]
    assert_same_tokens(ours, plain, [PROMPTS[1][:5]], 2)


@pytest.mark.slow
def test_kept_mtp_layer_gives_the_expanded_drafts(tmp_path: Path) -> None:
    folder = make_mtp(tmp_path / "model", **LATENT_BLOCKS)
    config, matrix, _ = SCHEMES["fp8 in blocks"]
    quantize_folder(folder, config, matrix)
    checkpoint = Checkpoint(folder, "mtp")
    spec = load_spec(checkpoint)
    spec = replace(spec, draft_head=mtp_head(spec, checkpoint))
    prompt, results = PROMPTS[1][:9], []
    ways: tuple[tuple[Quantize, type[PlainOps]], ...] = (("keep", AcceleratorOps), ("off", PlainOps))
    for choice, ops in ways:
        weights = load_weights(checkpoint, spec, torch.float32, quantize=choice, formats=frozenset(Format))
        assert weights.draft_head is not None
        matrices = (weights.draft_head.joint, weights.draft_head.layer.latent_q)
        assert {isinstance(each, Quantized) for each in matrices} == {choice == "keep"}
        model, cache = (
            Decoder(spec, weights, ops(spec), CPU, ops_of=ops),
            KVCache(spec, 3, torch.float32, CPU),
        )
        assert model.drafts is not None
        model.drafts.reserve(2)
        model.forward(Batch([BatchRow(prompt, 0, [1], 1)], BLOCK_SIZE, CPU), cache)
        row = BatchRow([50], len(prompt), [1], 1)
        results.append(model.drafts.forward(Batch([row], BLOCK_SIZE, CPU), cache).log_softmax(-1))
    torch.testing.assert_close(*results, atol=5e-4, rtol=0)


class KeptOps(PlainOps):
    """Plain operations but for products, because the interpreter is slow."""

    def prepare(self, weight: Matrix, bias: torch.Tensor | None = None) -> Linear:
        if isinstance(weight, Quantized):
            return QuantizedLinear(weight, bias)
        return super().prepare(weight, bias)


@pytest.mark.slow
def test_declared_rounding_of_inputs_gives_the_logits_of_transformers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """
    Hooks round the inputs there. Inputs at the edge of two numbers of float8 fall apart in another type: the
    engine in float16 may be as far from float32 as transformers in float16.
    """
    monkeypatch.setattr("baton_engine.ops.kernels.quantized.EXPANDED_ROWS", 8)
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    exact = quantized_folder(tmp_path, config, fp8, "qwen2", num_hidden_layers=1)
    stored = load_file(tmp_path / "model.safetensors")

    def rounded(module: Any, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        scale = inputs[0].float().abs().amax(-1, keepdim=True) / 448
        return ((inputs[0] / scale).to(torch.float8_e4m3fn).float() * scale).to(inputs[0].dtype)

    @torch.inference_mode()
    def by_transformers(dtype: torch.dtype, *, rounds: bool) -> torch.Tensor:
        settings = transformers.AutoConfig.from_pretrained(tmp_path, quantization_config=None)
        model = transformers.AutoModelForCausalLM.from_config(settings)
        model.load_state_dict({name: exact.get(name, stored.get(name)) for name in model.state_dict()})
        for name, module in model.to(dtype).named_modules():
            if rounds and name.endswith("_proj"):
                module.register_forward_pre_hook(rounded)
        logits: torch.Tensor = model(torch.tensor([prompt])).logits[0].float()
        return logits

    prompt = PROMPTS[1][:9]
    checkpoint = Checkpoint(tmp_path, "declared")
    spec = load_spec(checkpoint)
    kept = load_weights(checkpoint, spec, torch.float16, quantize="keep", formats=frozenset(Format))
    ours = Decoder(spec, kept, KeptOps(spec), CPU, dtype=torch.float16)
    cache = KVCache(spec, 4, torch.float16, CPU)
    got = ours.forward(Batch([BatchRow(prompt, 0, [1], len(prompt))], 16, CPU), cache)
    expected, plain = (by_transformers(torch.float32, rounds=rounds) for rounds in (True, False))
    noise = distance(by_transformers(torch.float16, rounds=True), expected)
    assert distance(got, expected) < 1.25 * noise < distance(plain, expected)
    assert distance(got, plain) == pytest.approx(distance(expected, plain), rel=0.25)


LATENT = LatentSpec(q_rank=0, kv_rank=32, plain=16, value=16)
CUDA = torch.device("cuda")
DENSE = tiny_spec()
MIXTURE = tiny_spec(experts=ExpertSpec(count=4, chosen=2, intermediate=32))
OFF = {"BATON_KERNELS": "0"}
CHOICES: dict[str, tuple[Any, ModelSpec, torch.device, dict[str, str], Any]] = {
    "kept by a device": ("keep", DENSE, CUDA, {}, ("keep", frozenset(Format))),
    "converted for a device": ("q8_0", DENSE, CUDA, {}, ("q8_0", frozenset(Format))),
    "expanded for a device": ("off", DENSE, CUDA, {}, ("off", frozenset(Format))),
    "a device without kernels": ("keep", DENSE, CUDA, OFF, ("off", frozenset(Format))),
    "a CPU without kernels": ("keep", DENSE, CPU, OFF, ("off", NATIVE_FORMATS)),
    "experts on a device": ("keep", MIXTURE, CUDA, {}, ("keep", frozenset(Format))),
    "latents on a device": ("keep", replace(MIXTURE, latent=LATENT), CUDA, {}, ("keep", frozenset(Format))),
    "latents on a CPU": ("keep", replace(DENSE, latent=LATENT), CPU, {}, ("off", NATIVE_FORMATS)),
}


@pytest.mark.parametrize("name", CHOICES)
def test_formats_that_are_kept(name: str) -> None:
    choice, spec, device, environment, expected = CHOICES[name]
    assert kept_formats(choice, spec, device, torch.bfloat16, environment) == expected


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_conversion_without_kernels_names_the_way_out(device: torch.device) -> None:
    with pytest.raises(SetupError, match=r"--quantize q4_0 requires kernels.*Use --quantize off"):
        kept_formats("q4_0", tiny_spec(), device, torch.bfloat16, {"BATON_KERNELS": "0"})
