"""Plain operations against their definitions, written out token by token."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton_engine.batch import Batch, BatchRow
from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.model.checkpoint import Checkpoint, load_spec, load_weights
from baton_engine.model.decoder import Decoder
from baton_engine.ops.plain import PlainOps
from baton_engine.spec import ModelSpec
from tests.engine.greedy import CPU
from tests.engine.models import VOCAB, make_model

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab=8,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=8,
    context=256,
    norm_epsilon=1e-5,
    rope_theta=10_000.0,
)
BLOCKS = 64


def batch_of(shapes: list[tuple[int, int]], generator: random.Random) -> Batch:
    """Rows of (start, new tokens) over blocks in any order."""
    free = generator.sample(range(1, BLOCKS), BLOCKS - 1)
    rows = []
    for start, count in shapes:
        needed = -(-(start + count) // BLOCK_SIZE)
        rows.append(BatchRow([0] * count, start, [free.pop() for _ in range(needed)], True))
    return Batch(rows, BLOCK_SIZE, CPU)


def by_definition(q: Tensor, cache: KVCache, layer: int, batch: Batch, window: int | None) -> Tensor:
    """Attention of one token and one head after the other."""
    result = torch.empty(batch.size, SPEC.heads, SPEC.head_dim)
    token = 0
    for row in batch.rows:
        for position in range(row.start, row.context):
            first = 0 if window is None else max(0, position - window + 1)
            slots = [(row.blocks[p // BLOCK_SIZE], p % BLOCK_SIZE) for p in range(first, position + 1)]
            for head in range(SPEC.heads):
                seen = [cache.kv[block, layer, :, head // SPEC.group, slot].float() for block, slot in slots]
                keys, values = torch.stack(seen, dim=1)
                scores = keys @ q[token, head].float() * SPEC.head_dim**-0.5
                result[token, head] = scores.softmax(0) @ values
            token += 1
    return result.flatten(1)


CASES: dict[str, list[tuple[int, int]]] = {
    "one token alone": [(0, 1)],
    "one token on a full block": [(15, 1)],
    "one token that opens a block": [(16, 1)],
    "a whole prompt": [(0, 37)],
    "a later chunk": [(21, 13)],
    "equal rows of one token": [(9, 1), (9, 1), (9, 1)],
    "rows of one token with other lengths": [(30, 1), (25, 1), (33, 1)],
    "a long row beside short ones": [(90, 1), (1, 1), (2, 1), (3, 1)],
    "prefill and decode mixed": [(40, 1), (0, 20), (17, 5), (39, 1)],
}


@pytest.mark.parametrize("window", [None, 1, 8, 24])
@pytest.mark.parametrize("name", CASES)
def test_attention_sees_its_own_row_up_to_itself(name: str, window: int | None) -> None:
    torch.manual_seed(3)
    cache = KVCache(SPEC, BLOCKS, torch.float32, CPU)
    cache.kv.normal_()
    batch = batch_of(CASES[name], random.Random(5))
    q = torch.randn(batch.size, SPEC.heads, SPEC.head_dim)
    got = PlainOps(SPEC).attention(q, cache, 1, batch, window)
    torch.testing.assert_close(got, by_definition(q, cache, 1, batch, window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("name", CASES)
def test_attention_ignores_nan_left_by_other_requests(
    name: str, window: int | None, dtype: torch.dtype
) -> None:
    """Rows are padded to the longest; values beyond a row's context have no effect, not even NaN."""
    torch.manual_seed(6)
    batch = batch_of(CASES[name], random.Random(8))
    clean = KVCache(SPEC, BLOCKS, dtype, CPU)
    for row in batch.rows:
        for position in range(row.context):
            slot = clean.kv[row.blocks[position // BLOCK_SIZE], ..., position % BLOCK_SIZE, :]
            slot.normal_()
    written = clean.kv != 0
    written[0] = True
    stale = KVCache(SPEC, BLOCKS, dtype, CPU)
    stale.kv.copy_(clean.kv.masked_fill(~written, torch.nan))
    q = torch.randn(batch.size, SPEC.heads, SPEC.head_dim, dtype=dtype)
    wanted = PlainOps(SPEC).attention(q, clean, 1, batch, window)
    before = stale.kv.clone()
    got = PlainOps(SPEC).attention(q, stale, 1, batch, window)
    assert got.isfinite().all()
    torch.testing.assert_close(got, wanted, atol=0, rtol=0)
    torch.testing.assert_close(stale.kv, before, atol=0, rtol=0, equal_nan=True)


def test_attention_in_bfloat16_is_near_the_exact_one() -> None:
    torch.manual_seed(4)
    cache = KVCache(SPEC, BLOCKS, torch.bfloat16, CPU)
    cache.kv.normal_()
    batch = batch_of(CASES["prefill and decode mixed"], random.Random(6))
    q = torch.randn(batch.size, SPEC.heads, SPEC.head_dim, dtype=torch.bfloat16)
    got = PlainOps(SPEC).attention(q, cache, 0, batch, None)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.float(), by_definition(q, cache, 0, batch, None), atol=0.02, rtol=0.02)


def test_keys_and_values_go_to_their_slots_and_nowhere_else() -> None:
    torch.manual_seed(5)
    cache = KVCache(SPEC, BLOCKS, torch.float32, CPU)
    batch = batch_of([(3, 1), (12, 9)], random.Random(7))
    qkv = torch.randn(batch.size, (SPEC.heads + 2 * SPEC.kv_heads) * SPEC.head_dim)
    still = torch.ones(batch.size, SPEC.head_dim // 2), torch.zeros(batch.size, SPEC.head_dim // 2)
    q = PlainOps(SPEC).rope_and_store(qkv, still, None, None, cache, 1, batch)
    heads = qkv.view(batch.size, -1, SPEC.head_dim)
    torch.testing.assert_close(q, heads[:, : SPEC.heads])
    expected = torch.zeros_like(cache.kv)
    slots = [(row, position) for row in batch.rows for position in range(row.start, row.context)]
    for token, (row, position) in enumerate(slots):
        block, slot = row.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE
        expected[block, 1, 0, :, slot] = heads[token, 4:6]
        expected[block, 1, 1, :, slot] = heads[token, 6:8]
    torch.testing.assert_close(cache.kv, expected, atol=0, rtol=0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = make_model(tmp_path_factory.mktemp("model"), "mistral with a sliding window")
    checkpoint = Checkpoint(folder, "tiny")
    spec = load_spec(checkpoint)
    return Decoder(spec, load_weights(checkpoint, spec, torch.float32), PlainOps(spec), CPU)


@pytest.mark.parametrize("seed", range(8))
def test_plain_ops_logits_are_independent_of_chunks_and_batch(model: Decoder, seed: int) -> None:
    chance = random.Random(seed)
    prompts = [[chance.randrange(VOCAB) for _ in range(chance.randint(1, 80))] for _ in range(4)]
    blocks = [list(range(1 + 5 * r, 6 + 5 * r)) for r in range(4)]

    def passes(chunks: bool) -> list[Tensor]:
        cache = KVCache(model.spec, 21, torch.float32, CPU)
        done, logits = [0] * 4, [torch.empty(0)] * 4
        while live := [r for r in range(4) if done[r] < len(prompts[r])]:
            chosen = chance.sample(live, chance.randint(1, len(live))) if chunks else live[:1]
            rows = []
            for r in chosen:
                left = len(prompts[r]) - done[r]
                count = chance.choice([1, left, chance.randint(1, left)]) if chunks else left
                rows.append(
                    BatchRow(prompts[r][done[r] : done[r] + count], done[r], blocks[r], count == left)
                )
                done[r] += count
            result = iter(model.forward(Batch(rows, BLOCK_SIZE, CPU), cache))
            for r, row in zip(chosen, rows, strict=True):
                if row.wanted:
                    logits[r] = next(result)
        return logits

    for whole, mixed in zip(passes(chunks=False), passes(chunks=True), strict=True):
        torch.testing.assert_close(whole, mixed, atol=1e-4, rtol=1e-4)


def test_plain_ops_pass_without_wanted_logits_fills_the_cache(model: Decoder) -> None:
    kept = []
    for wanted in (False, True):
        cache = KVCache(model.spec, 4, torch.float32, CPU)
        logits = model.forward(
            Batch([BatchRow(list(range(5, 25)), 0, [1, 3], wanted)], BLOCK_SIZE, CPU), cache
        )
        assert logits.shape == (int(wanted), VOCAB) and logits.dtype == torch.float32
        kept.append(cache.kv)
    torch.testing.assert_close(*kept, atol=0, rtol=0)


def test_bfloat16_answers_nearly_as_fp32(tmp_path: Path, model: Decoder) -> None:
    checkpoint = Checkpoint(make_model(tmp_path, "mistral with a sliding window"), "tiny")
    weights = load_weights(checkpoint, model.spec, torch.bfloat16)
    half = Decoder(model.spec, weights, PlainOps(model.spec), CPU)
    batch = Batch([BatchRow(list(range(5, 45)), 0, [1, 2, 3], True)], BLOCK_SIZE, CPU)
    rough = half.forward(batch, KVCache(model.spec, 4, torch.bfloat16, CPU))
    exact = model.forward(batch, KVCache(model.spec, 4, torch.float32, CPU))
    assert rough.dtype == torch.float32
    assert torch.cosine_similarity(rough, exact).item() > 0.995
