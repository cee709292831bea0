"""The native decoder, and torch's prepacked weights, against plain operations."""

from __future__ import annotations

import itertools
import os
import random
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_api.errors import SetupError
from baton_engine.batch import Batch, BatchRow
from baton_engine.kv.cache import KVCache
from baton_engine.model.decoder import Decoder
from baton_engine.model.native_decoder import NativeDecoder, native_decoder
from baton_engine.ops.native import library
from baton_engine.ops.plain import CpuOps, PlainOps, preferred_dtype
from baton_engine.quantized import floats
from baton_engine.spec import ExpertSpec, ModelSpec
from tests.engine.random_weights import random_weights, tiny_spec

CPU = torch.device("cpu")
BLOCKS = 160

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {},
    "heads of 64 in groups of 3": {"head_dim": 64, "heads": 9, "kv_heads": 3, "hidden": 576},
    "heads of 80": {"head_dim": 80, "heads": 4, "kv_heads": 1},
    "heads of 128 in groups of 8, with norms and a bias": {
        "head_dim": 128,
        "heads": 8,
        "kv_heads": 1,
        "qk_norm": True,
        "qkv_bias": True,
    },
    "heads of 256": {"head_dim": 256, "heads": 2, "kv_heads": 1, "layers": 1},
    "groups of 1": {"heads": 3, "kv_heads": 3},
    "groups of 5": {"heads": 5, "kv_heads": 1},
    "groups of 7": {"heads": 14, "kv_heads": 2, "hidden": 896, "head_dim": 64, "layers": 1},
    "nothing is a multiple of anything": {
        "head_dim": 10,
        "heads": 6,
        "kv_heads": 2,
        "hidden": 51,
        "intermediate": 77,
        "vocab": 33,
        "mlp_bias": True,
        "output_bias": True,
        "tied_embeddings": False,
    },
    # bfloat16 rounds the states of earlier layers, so that another expert could win a near tie.
    "all of three experts": {
        "experts": ExpertSpec(count=3, chosen=3, intermediate=40, scale=1.5),
        "hidden": 51,
    },
    "all of three experts in one layer of two": {
        "experts": ExpertSpec(
            count=3, chosen=3, intermediate=77, scoring="sigmoid", normalized=True, layers=(False, True)
        ),
    },
    "a window": {"sliding_window": 20, "head_dim": 32},
    "a window of 1 on one layer": {"sliding_window": 1, "sliding_layers": (True, False)},
    "a window of 64": {"sliding_window": 64},
    "norms around attention and MLP, GELU, caps": {
        "post_norm": True,
        "activation": "gelu_tanh",
        "attention_cap": 2.0,
        "logit_cap": 1.5,
        "embedding_scale": 3.0,
        "attention_scale": 0.4,
        "hidden": 51,
        "head_dim": 10,
    },
    "norms after attention and MLP, and one of all heads": {
        "pre_norm": False,
        "post_norm": True,
        "qk_norm": True,
        "qk_norm_joint": True,
        "residual_scale": 0.5,
        "layers": 3,
    },
    "factors, and a part of each head rotated": {
        "embedding_scale": 2.5,
        "residual_scale": 0.3,
        "logit_scale": 0.4,
        "rotary_dim": 12,
        "mlp_bias": True,
        "output_bias": True,
    },
    "a rotation for each kind of layer": {
        "layers": 3,
        "sliding_window": 20,
        "sliding_layers": (True, False, True),
        "sliding_rope_theta": 100.0,
        "unrotated_layers": (False, False, True),
    },
}

EXACT = ((torch.float32, ""), (torch.bfloat16, "pairs"), (torch.bfloat16, "widened"))
"""Types and ways of products whose rows have the same bits in any pass."""

EXACT_IDS = ("fp32", "pairs", "widened")

exact_rows = pytest.mark.parametrize(("dtype", "products"), EXACT, ids=EXACT_IDS)

ROWS = ((0, 1), (14, 1), (15, 1), (16, 1), (62, 1), (299, 1), (0, 17), (5, 100), (130, 70), (64, 64), (3, 2))
"""(start, new tokens): tails, block and tile boundaries, decode and prefill in one batch."""

TOLERANCE = {torch.float32: 5e-5, torch.bfloat16: 0.12}
"""Of logits and cached values that are a few units large."""


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    kind = request.param
    assert isinstance(kind, torch.dtype)
    return kind


def native_model(spec: ModelSpec, dtype: torch.dtype, threads: int = 2, products: str = "") -> NativeDecoder:
    try:
        library.load(os.environ)
    except library.Unavailable as reason:
        pytest.skip(f"no native kernels: {reason}")
    environment = {**os.environ, "BATON_PRODUCTS": products}
    model = native_decoder(spec, random_weights(spec, dtype), dtype, environment, threads=threads)
    assert model is not None
    return model


def native_model_by(products: str, spec: ModelSpec, dtype: torch.dtype, threads: int = 2) -> NativeDecoder:
    """The model with BATON_PRODUCTS; skips the test if the processor does not have it."""
    try:
        return native_model(spec, dtype, threads, products)
    except SetupError as error:
        pytest.skip(error.message)


def plain(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    return Decoder(spec, random_weights(spec, dtype), PlainOps(spec), CPU)


def rows_of(
    shapes: Sequence[tuple[int, int]], vocab: int, generator: random.Random, block_size: int = 16
) -> list[BatchRow]:
    free = generator.sample(range(1, BLOCKS), BLOCKS - 1)
    return [
        BatchRow(
            [generator.randrange(vocab) for _ in range(count)],
            start,
            [free.pop() for _ in range(-(-(start + count) // block_size))],
            True,
        )
        for start, count in shapes
    ]


def filled_cache(spec: ModelSpec, dtype: torch.dtype, block_size: int = 16) -> KVCache:
    cache = KVCache(spec, BLOCKS, dtype, CPU, block_size)
    cache.kv.copy_(torch.randn(cache.kv.shape, generator=torch.Generator().manual_seed(7)))
    return cache


@pytest.mark.parametrize(("dtype", "products"), (*EXACT, (torch.bfloat16, "amx")), ids=(*EXACT_IDS, "amx"))
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_logits_and_cache_are_those_of_the_plain_decoder(
    changes: dict[str, Any], dtype: torch.dtype, products: str
) -> None:
    spec = tiny_spec(**changes)
    batch = Batch(rows_of(ROWS, spec.vocab, random.Random(1)), 16, CPU)
    ours, theirs = filled_cache(spec, dtype), filled_cache(spec, dtype)
    before = ours.kv.clone()
    logits = native_model_by(products, spec, dtype).forward(batch, ours)
    # The oracle computes in fp32 with the same rounded weights and cache.
    theirs.kv = theirs.kv.float()
    expected = plain_in_float(spec, dtype).forward(batch, theirs)
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(ours.kv.float(), theirs.kv, rtol=0, atol=TOLERANCE[dtype])
    written = (ours.kv != before).any(dim=(1, 2, 3, 5))  # [block, slot]
    assert set(written.flatten().nonzero().flatten().tolist()) <= set(batch.slots.tolist())


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_widened_products_give_the_bits_of_pairs(changes: dict[str, Any], threads: int) -> None:
    """Whichever is faster may be chosen on each side of a pair. The long row has several slices of inputs."""
    spec, dtype = tiny_spec(**changes), torch.bfloat16
    rows = rows_of((*ROWS, (40, 300)), spec.vocab, random.Random(9))
    batch = Batch(rows, 16, CPU)
    ours, theirs = filled_cache(spec, dtype), filled_cache(spec, dtype)
    widened = native_model_by("widened", spec, dtype, threads).forward(batch, ours)
    assert torch.equal(widened, native_model_by("pairs", spec, dtype).forward(batch, theirs))
    assert torch.equal(ours.kv, theirs.kv)


def test_widened_products_give_the_bits_of_pairs_for_numbers_near_zero() -> None:
    """`vdpbf16ps` takes numbers below 2 ** -126 as zeros. The values of these weights are such."""
    spec, dtype = tiny_spec(), torch.bfloat16
    weights = random_weights(spec, dtype)
    for layer in weights.layers:
        matrix = floats(layer.qkv)
        matrix[-spec.kv_heads * spec.head_dim :] *= 2.0**-125
    batch = Batch(rows_of(ROWS, spec.vocab, random.Random(9)), 16, CPU)
    caches = {}
    for products in ("widened", "pairs"):
        native_model_by(products, spec, dtype)  # skips if it is not there
        environment = {**os.environ, "BATON_PRODUCTS": products}
        model = native_decoder(spec, weights, dtype, environment, threads=1)
        assert model is not None
        caches[products] = KVCache(spec, BLOCKS, dtype, CPU, 16)
        model.forward(batch, caches[products])
    values = caches["pairs"].kv[:, :, 1].float().abs()
    assert values.max() < 2.0**-120
    assert torch.equal(caches["widened"].kv.view(torch.int16), caches["pairs"].kv.view(torch.int16))


CHOICES: dict[str, dict[str, Any]] = {
    "one of two": {"count": 2, "chosen": 1, "intermediate": 33},
    "three of seven": {"count": 7, "chosen": 3, "intermediate": 40, "normalized": True},
    "eight of forty": {"count": 40, "chosen": 8, "intermediate": 16},
    "four of nine by sigmoid": {"count": 9, "chosen": 4, "intermediate": 20, "scoring": "sigmoid"},
}


@pytest.mark.parametrize("name", CHOICES)
def test_chosen_experts_are_those_of_the_plain_decoder(name: str) -> None:
    spec = tiny_spec(experts=ExpertSpec(**CHOICES[name]), layers=3)
    batch = Batch(rows_of(ROWS, spec.vocab, random.Random(1)), 16, CPU)
    ours, theirs = filled_cache(spec, torch.float32), filled_cache(spec, torch.float32)
    logits = native_model(spec, torch.float32).forward(batch, ours)
    expected = plain(spec, torch.float32).forward(batch, theirs)
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE[torch.float32])


def plain_in_float(spec: ModelSpec, dtype: torch.dtype) -> Decoder:
    rounded = random_weights(spec, dtype)

    def widened(value: Any) -> Any:
        return value.float() if isinstance(value, torch.Tensor) else value

    layers = tuple(
        type(layer)(**{name: widened(getattr(layer, name)) for name in layer.__dataclass_fields__})
        for layer in rounded.layers
    )
    embedding = floats(rounded.embedding).float()
    head = embedding if rounded.head is rounded.embedding else floats(rounded.head).float()
    weights = type(rounded)(
        embedding=embedding, layers=layers, final_norm=rounded.final_norm.float(), head=head
    )
    return Decoder(spec, weights, PlainOps(spec), CPU)


def test_bfloat16_is_at_least_as_near_to_fp32_as_torchs_is() -> None:
    spec = tiny_spec(hidden=256, layers=4, heads=8, kv_heads=2, head_dim=32, intermediate=512)
    batch = Batch(rows_of(ROWS, spec.vocab, random.Random(2)), 16, CPU)
    exact_cache = filled_cache(spec, torch.bfloat16)
    exact_cache.kv = exact_cache.kv.float()
    exact = plain_in_float(spec, torch.bfloat16).forward(batch, exact_cache)
    ours = native_model(spec, torch.bfloat16).forward(batch, filled_cache(spec, torch.bfloat16))
    theirs = plain(spec, torch.bfloat16).forward(batch, filled_cache(spec, torch.bfloat16))
    assert (ours - exact).pow(2).mean() <= (theirs - exact).pow(2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_tile_registers_give_the_same(changes: dict[str, Any], emulated: dict[str, str]) -> None:
    spec, dtype = tiny_spec(**changes), torch.bfloat16
    batch = Batch(rows_of(ROWS, spec.vocab, random.Random(5)), 16, CPU)
    weights = random_weights(spec, dtype)
    tiled = native_decoder(spec, weights, dtype, emulated, threads=2)
    assert tiled is not None
    ours, theirs = filled_cache(spec, dtype), filled_cache(spec, dtype)
    logits, expected = tiled.forward(batch, ours), native_model(spec, dtype).forward(batch, theirs)
    torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(ours.kv, theirs.kv, rtol=0, atol=TOLERANCE[dtype])


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """An environment in which the kernels are built for AMX, its registers played by plain C."""
    try:
        compiler = library.find_compiler(os.environ)
    except library.Unavailable as reason:
        pytest.skip(f"no native kernels: {reason}")
    if "avx512f" not in library.instructions():
        pytest.skip("tiles have the width of vectors of AVX-512")
    header = Path(__file__).with_name("emulated_tiles.h")
    return {
        **os.environ,
        "CC": shlex.join([*compiler, "-include", str(header)]),
        "BATON_CACHE": str(tmp_path_factory.mktemp("kernels")),
        "BATON_PRODUCTS": "amx",
    }


@pytest.mark.parametrize("block_size", [4, 16, 48])
def test_blocks_may_have_any_size(block_size: int) -> None:
    spec = tiny_spec()
    rows = rows_of([(0, 1), (50, 1), (7, 40), (100, 3)], spec.vocab, random.Random(3), block_size)
    batch = Batch(rows, block_size, CPU)
    ours, theirs = (filled_cache(spec, torch.float32, block_size) for _ in range(2))
    logits = native_model(spec, torch.float32).forward(batch, ours)
    torch.testing.assert_close(logits, plain(spec, torch.float32).forward(batch, theirs), rtol=0, atol=5e-5)


OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {
        "post_norm": True,
        "activation": "gelu_tanh",
        "attention_cap": 2.0,
        "logit_cap": 1.5,
        "embedding_scale": 3.0,
    },
    {"pre_norm": False, "post_norm": True, "qk_norm": True, "qk_norm_joint": True},
    {"residual_scale": 0.3, "logit_scale": 0.4, "rotary_dim": 12, "unrotated_layers": (False, True)},
)


@exact_rows
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("seed", range(len(OPTIONS)))
def test_native_row_is_bit_identical_in_any_batch_and_threads(
    seed: int, threads: int, dtype: torch.dtype, products: str
) -> None:
    generator = random.Random(seed)
    window = generator.choice([None, 30])
    sizes = {"heads": 6, "kv_heads": 2, "head_dim": generator.choice([16, 24, 64])}
    spec = tiny_spec(**sizes, sliding_window=window, **OPTIONS[seed])
    shapes = [
        (generator.choice([0, 0, generator.randrange(150)]), generator.randrange(1, 90)) for _ in range(9)
    ]
    rows = rows_of(shapes, spec.vocab, generator)
    batched_model = native_model_by(products, spec, dtype, threads)
    single_model = native_model_by(products, spec, dtype, 1)
    batched, single = filled_cache(spec, dtype), filled_cache(spec, dtype)
    logits = batched_model.forward(Batch(rows, 16, CPU), batched)
    for number, row in enumerate(rows):
        done = 0
        while done < len(row.tokens):
            count = generator.randrange(1, len(row.tokens) - done + 1)
            last = done + count == len(row.tokens)
            piece = BatchRow(row.tokens[done : done + count], row.start + done, row.blocks, last)
            result = single_model.forward(Batch([piece], 16, CPU), single)
            assert len(result) == last
            done += count
        assert torch.equal(result[0], logits[number])
    assert torch.equal(batched.kv, single.kv)


@exact_rows
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_native_row_of_a_draft_gives_the_bits_of_single_tokens(
    changes: dict[str, Any], dtype: torch.dtype, products: str
) -> None:
    """Speculation rests on this: every result of a row of several tokens, beside other rows."""
    spec = tiny_spec(**changes)
    model = native_model_by(products, spec, dtype)
    assert model.exact_rows
    shapes = [
        (start, 1 + number % 9) for number, start in enumerate((0, 5, 14, 15, 60, 62, 63, 64, 120, 250))
    ]
    rows = rows_of(shapes, spec.vocab, random.Random(6))
    drafted, single = filled_cache(spec, dtype), filled_cache(spec, dtype)
    wanted = [BatchRow(row.tokens, row.start, row.blocks, len(row.tokens)) for row in rows]
    logits = iter(model.forward(Batch(wanted, 16, CPU), drafted))
    for row in rows:
        for ahead, token in enumerate(row.tokens):
            step = BatchRow([token], row.start + ahead, row.blocks, 1)
            assert torch.equal(model.forward(Batch([step], 16, CPU), single)[0], next(logits))
    assert torch.equal(drafted.kv, single.kv)


@exact_rows
@pytest.mark.parametrize("name", ["heads of 64 in groups of 3", "heads of 80", "groups of 7", "a window"])
def test_native_decode_step_gives_the_bits_of_single_rows(
    name: str, dtype: torch.dtype, products: str
) -> None:
    """With enough rows, one thread computes all heads of a row, one after the other."""
    spec = tiny_spec(**SHAPES[name])
    model = native_model_by(products, spec, dtype)
    assert model.exact_rows
    starts = (0, 14, 15, 16, 62, 63, 64, 65, 127, 128, 200, 299)
    rows = rows_of([(start, 1) for start in starts], spec.vocab, random.Random(8))
    batched, single = filled_cache(spec, dtype), filled_cache(spec, dtype)
    logits = model.forward(Batch(rows, 16, CPU), batched)
    for row, expected in zip(rows, logits, strict=True):
        assert torch.equal(model.forward(Batch([row], 16, CPU), single)[0], expected)
    assert torch.equal(batched.kv, single.kv)


def test_native_wanted_logits_come_in_row_order() -> None:
    spec, dtype = tiny_spec(), torch.float32
    model = native_model(spec, dtype)
    rows = rows_of(ROWS, spec.vocab, random.Random(4))
    everything = model.forward(Batch(rows, 16, CPU), filled_cache(spec, dtype))
    wanted = [number % 3 == 1 for number in range(len(rows))]
    chosen = [
        BatchRow(row.tokens, row.start, row.blocks, want) for row, want in zip(rows, wanted, strict=True)
    ]
    some = model.forward(Batch(chosen, 16, CPU), filled_cache(spec, dtype))
    assert torch.equal(some, everything[torch.tensor(wanted)])
    none = [BatchRow(row.tokens, row.start, row.blocks, False) for row in rows]
    assert model.forward(Batch(none, 16, CPU), filled_cache(spec, dtype)).shape == (0, spec.vocab)


def test_native_token_or_slot_out_of_range_is_rejected() -> None:
    spec = tiny_spec()
    model, cache = native_model(spec, torch.float32), filled_cache(spec, torch.float32)
    for row in (
        BatchRow([spec.vocab], 0, [1], True),
        BatchRow([-1], 0, [1], True),
        BatchRow([1], 0, [BLOCKS], True),
    ):
        with pytest.raises(IndexError, match="97"):
            model.forward(Batch([row], 16, CPU), cache)
    assert len(model.forward(Batch([BatchRow([1], 0, [1], True)], 16, CPU), cache)) == 1


def test_native_cache_of_another_dtype_is_rejected() -> None:
    spec = tiny_spec()
    batch = Batch([BatchRow([1], 0, [1], True)], 16, CPU)
    with pytest.raises(TypeError, match="bfloat16"):
        native_model(spec, torch.float32).forward(batch, filled_cache(spec, torch.bfloat16))


def test_weights_are_held_once_in_16_bits() -> None:
    spec = tiny_spec(vocab=4096, hidden=128, intermediate=256)
    weights = random_weights(spec, torch.bfloat16)
    numbers = floats(weights.embedding).numel() + sum(
        floats(tensor).numel()
        for layer in weights.layers
        for tensor in (layer.qkv, layer.output, layer.gate_up, layer.down)
        if tensor is not None
    )
    assert native_model(spec, torch.bfloat16).bytes < 2.1 * numbers


def test_native_unsupported_sizes_are_left_to_torch() -> None:
    spec = tiny_spec(head_dim=258)
    assert native_decoder(spec, random_weights(spec, torch.float32), torch.float32) is None
    assert native_decoder(tiny_spec(), random_weights(tiny_spec(), torch.float16), torch.float16) is None


def test_prepacked_weights_give_what_plain_ones_give(dtype: torch.dtype) -> None:
    spec = tiny_spec()
    weight, bias = torch.randn(48, 40).to(dtype), torch.randn(48).to(dtype)
    packed = CpuOps(spec, dtype).prepare(weight, bias)
    for count in (1, 7, 40):
        rows = torch.randn(count, 40).to(dtype)
        expected = PlainOps(spec).prepare(weight, bias)(rows)
        torch.testing.assert_close(packed(rows), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("capabilities", "has_kernels", "expected"),
    [
        pytest.param({"avx512_bf16": True, "avx2": True}, False, torch.bfloat16, id="native products"),
        pytest.param({"bf16": True}, False, torch.bfloat16, id="native products of Arm"),
        pytest.param({"avx2": True}, True, torch.bfloat16, id="AVX2, widened by the kernels"),
        pytest.param({"avx512_f": True, "avx2": True}, True, torch.bfloat16, id="AVX-512, widened"),
        pytest.param({"avx2": True, "avx512_bf16": False}, False, torch.float32, id="AVX2 with torch"),
        pytest.param({"avx2": False}, True, torch.float32, id="neither"),
    ],
)
def test_preferred_dtype_by_capabilities(
    capabilities: dict[str, bool], has_kernels: bool, expected: torch.dtype
) -> None:
    """A step waits for memory: half the bytes win wherever the kernels can widen them in registers."""
    assert preferred_dtype(capabilities, has_kernels) == expected


@pytest.mark.slow
@pytest.mark.parametrize("target", library.TARGETS, ids=lambda target: target.name)
def test_kernels_of_every_target_agree_with_plain(tmp_path: Path, target: library.Target) -> None:
    """Vectors are 8 lanes wide with AVX2 and 16 with AVX-512; the shapes that fit neither come out alike."""
    if not target.instructions <= library.instructions():
        pytest.skip(f"the processor has not all of {target.name}'s instructions")
    library.build(tmp_path, [target])
    environment = {"PATH": "", "BATON_BUNDLED": str(tmp_path), "BATON_CACHE": str(tmp_path / "cache")}
    ways = [(torch.float32, "pairs"), (torch.bfloat16, "pairs"), (torch.bfloat16, "widened")]
    if target.name == "amx":
        ways.append((torch.bfloat16, "amx"))
    for changes, (dtype, products) in itertools.product(SHAPES.values(), ways):
        environment["BATON_PRODUCTS"] = products
        spec = tiny_spec(**changes)
        batch = Batch(rows_of(ROWS, spec.vocab, random.Random(1)), 16, CPU)
        ours, theirs = filled_cache(spec, dtype), filled_cache(spec, dtype)
        model = native_decoder(spec, random_weights(spec, dtype), dtype, environment, threads=2)
        assert model is not None
        logits = model.forward(batch, ours)
        theirs.kv = theirs.kv.float()
        expected = plain_in_float(spec, dtype).forward(batch, theirs)
        torch.testing.assert_close(logits, expected, rtol=0, atol=TOLERANCE[dtype])
        torch.testing.assert_close(ours.kv.float(), theirs.kv, rtol=0, atol=TOLERANCE[dtype])
