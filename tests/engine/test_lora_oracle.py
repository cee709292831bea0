"""The decoders compute what PEFT with transformers computes, with several adapters beside base rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.batch import Batch, BatchRow
from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Decoder, Model
from baton_engine.model.lora import read_lora
from baton_engine.model.native_decoder import NativeDecoder, native_decoder
from baton_engine.ops.plain import PlainOps
from baton_engine.spec import Quantize
from tests.engine.expert_models import EXPERT_ARCHITECTURES
from tests.engine.greedy import CPU, by_baton, by_transformers
from tests.engine.lora_adapters import ATTENTION, make_adapter
from tests.engine.models import ARCHITECTURES, VOCAB, make_model
from tests.engine.test_quantized import RoundingOps, dequantized, distance

TOKENS = 32
TOLERANCE = 1e-4
FLIPPED = 0.02
"""Sums in another order can move an input across a step of its 8 bits. Logits change by up to 1.2 %."""
MODELS = (
    "llama",
    "llama with biases",
    "llama with its own head size",
    "llama with one key head",
    "mistral with a sliding window",
    "qwen2",
    "qwen3",
)
_FIRST_VARIANTS = {
    family: variant
    for variant, (family, _) in reversed(ARCHITECTURES.items())
    if variant not in EXPERT_ARCHITECTURES and not family.endswith("ForConditionalGeneration")
}
FAMILIES = sorted(set(_FIRST_VARIANTS.values()) - set(MODELS))
"""A variant of each other family without experts."""
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "all": {"r": 8, "lora_alpha": 16},
    "attention": {"r": 3, "targets": ATTENTION, "lora_alpha": 5, "use_rslora": True},
    "values": {"r": 16, "targets": ["v_proj", "down_proj"], "layers_to_transform": [1]},
    "up": {"r": 2, "targets": r".*\.(q|up)_proj"},
    "patterns": {
        "r": 4,
        "rank_pattern": {"gate_proj": 7, "layers.0.self_attn.q_proj": 1},
        "alpha_pattern": {"up_proj": 3},
        "exclude_modules": ["o_proj"],
    },
}
"""Adapters of one batch by name."""


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    base = make_model(root / "base", request.param)
    for seed, (name, options) in enumerate(OPTIONS.items()):
        make_adapter(root / name, base, seed=seed, **options)
    return root


def plain_model(base: Path, dtype: torch.dtype = torch.float32) -> Model:
    checkpoint = Checkpoint(base, "base")
    spec = load_spec(checkpoint)
    return Decoder(spec, load_weights(checkpoint, spec, dtype), PlainOps(spec), CPU)


def native_model(base: Path, dtype: torch.dtype = torch.float32, quantize: Quantize = "off") -> Model:
    checkpoint = Checkpoint(base, "base")
    spec = load_spec(checkpoint)
    weights = load_weights(checkpoint, spec, dtype, quantize=quantize)
    model = native_decoder(spec, weights, dtype, threads=2)
    if model is None:
        pytest.skip("the native kernels are unavailable")
    return model


def adapters_of(model: Model, root: Path) -> list[Any]:
    """The base model's None, then all adapters."""
    return [None] + [model.prepare_adapter(read_lora(root / name, model.spec, 16)) for name in OPTIONS]


def reference(root: Path, name: str | None) -> Any:
    import peft
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        root / "base", dtype=torch.float32, attn_implementation="eager"
    )
    return model if name is None else peft.PeftModel.from_pretrained(model, root / name).eval()


@pytest.mark.parametrize("make", [plain_model, native_model])
def test_lora_tokens_and_logprobs_are_those_of_peft(folder: Path, make: Callable[[Path], Model]) -> None:
    model = make(folder / "base")
    names = (None, *OPTIONS)
    prompts = [prompt(9 + 8 * number, seed=number) for number in range(len(names))]
    answers = by_baton(model, prompts, TOKENS, 11, adapters=adapters_of(model, folder))
    for name, tokens, got in zip(names, prompts, answers, strict=True):
        wanted = by_transformers(reference(folder, name), tokens, got.tokens)
        assert got.tokens == wanted.tokens, name
        assert got.logprobs == pytest.approx(wanted.logprobs, abs=TOLERANCE), name
    assert len({tuple(answer.tokens[:4]) for answer in answers}) == len(names)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a family with one adapter, as PEFT targets all its linears."""
    root = tmp_path_factory.mktemp("family")
    make_adapter(root / "all", make_model(root / "base", request.param), r=8, lora_alpha=16)
    return root


@pytest.mark.parametrize("make", [plain_model, native_model])
def test_lora_of_every_family_is_that_of_peft(family: Path, make: Callable[[Path], Model]) -> None:
    """Rows of q and k are in another order than in the checkpoint, or stacked there: families differ."""
    model = make(family / "base")
    adapters = [None, model.prepare_adapter(read_lora(family / "all", model.spec, 16))]
    prompts = [prompt(40, seed=number) for number in range(2)]
    answers = by_baton(model, prompts, TOKENS, 11, adapters=adapters)
    for name, tokens, got in zip((None, "all"), prompts, answers, strict=True):
        wanted = by_transformers(reference(family, name), tokens, got.tokens)
        assert got.tokens == wanted.tokens, name
        assert got.logprobs == pytest.approx(wanted.logprobs, abs=TOLERANCE), name


@pytest.mark.parametrize("quantize", ["off", "q8_0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lora_rows_do_not_depend_on_other_rows(folder: Path, dtype: torch.dtype, quantize: Quantize) -> None:
    """Decode rows and prefill rows with and without adapters: the same bits alone as in any batch."""
    model = native_model(folder / "base", dtype, quantize)
    if isinstance(model, NativeDecoder) and not model.exact_rows:
        pytest.skip("AMX sums bfloat16 in another order than AVX-512, which computes passes of few rows")
    adapters = adapters_of(model, folder)
    kinds = [(adapter, length) for adapter in adapters for length in (1, 21)]

    def logits(chosen: list[tuple[Any, int]]) -> torch.Tensor:
        cache = KVCache(model.spec, 1 + 2 * len(chosen), dtype, CPU)
        rows = [
            BatchRow(prompt(length, seed=length), 0, [1 + 2 * row, 2 + 2 * row], 1, adapter=adapter)
            for row, (adapter, length) in enumerate(chosen)
        ]
        return model.forward(Batch(rows, BLOCK_SIZE, CPU), cache)

    single = torch.cat([logits([kind]) for kind in kinds])
    assert torch.equal(logits(kinds), single)
    assert torch.equal(logits(kinds[::-1]), single.flip(0))
    base = [kind for kind in kinds if kind[0] is None]
    assert torch.equal(logits(base), single[: len(base)])
    assert len(set(map(tuple, single.tolist()))) == len(kinds)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantize", ["q8_0", "q4_0"])
def test_lora_on_quantized_weights_is_that_on_expanded(
    folder: Path, quantize: Quantize, dtype: torch.dtype
) -> None:
    """Only products with quantized weights round their inputs to 8 bits, those with adapters do not."""
    model = native_model(folder / "base", dtype, quantize)
    checkpoint = Checkpoint(folder / "base", "base")
    kept = load_weights(checkpoint, model.spec, torch.float32, quantize=quantize)
    expanded = Decoder(model.spec, dequantized(kept), RoundingOps(model.spec), CPU)
    ours, theirs = (logits_of(one, folder, kind) for one, kind in ((model, dtype), (expanded, torch.float32)))
    errors = [distance(got, wanted) for got, wanted in zip(ours, theirs, strict=True)]
    effects = [distance(adapted, theirs[0]) for adapted in theirs[1:]]
    if dtype == torch.float32:
        assert max(errors) < FLIPPED
        assert min(effects) > 2 * FLIPPED
    else:  # queries, keys and values are rounded too
        assert sum(errors[1:]) < sum(effects) / 2


def logits_of(model: Model, folder: Path, dtype: torch.dtype) -> torch.Tensor:
    """Logits of the last tokens of the same prompt, with each adapter in one batch."""
    rows = [
        BatchRow(prompt(30, seed=5), 0, [1 + 2 * row, 2 + 2 * row], 1, adapter=adapter)
        for row, adapter in enumerate(adapters_of(model, folder))
    ]
    return model.forward(Batch(rows, BLOCK_SIZE, CPU), KVCache(model.spec, 1 + 2 * len(rows), dtype, CPU))


def test_lora_bfloat16_is_close_to_fp32(folder: Path) -> None:
    """The kernels round weights and inputs of products to bfloat16, as torch does."""
    exact, rounded = native_model(folder / "base"), native_model(folder / "base", torch.bfloat16)
    torch_too = plain_model(folder / "base", torch.bfloat16)
    results = []
    for model, dtype in ((exact, torch.float32), (rounded, torch.bfloat16), (torch_too, torch.bfloat16)):
        rows = [
            BatchRow(prompt(30, seed=5), 0, [1 + 2 * row, 2 + 2 * row], 30, adapter=adapter)
            for row, adapter in enumerate(adapters_of(model, folder))
        ]
        cache = KVCache(model.spec, 1 + 2 * len(rows), dtype, CPU)
        results.append(model.forward(Batch(rows, BLOCK_SIZE, CPU), cache).log_softmax(-1))
    error, of_torch = (float((one - results[0]).abs().mean()) for one in results[1:])
    assert error <= 1.2 * of_torch
