"""Digests are equal for workers with equal blocks; a difference is reported with both values."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from baton_api.messages import PROTOCOL
from baton_engine.kv.cache import BLOCK_SIZE, FLOAT8_CACHE, KVCache, block_bytes
from baton_engine.model.weights import LayerWeights, Weights, weights_digest
from baton_engine.quantized import floats
from baton_engine.spec import ExpertSpec, HeadSpec, LatentSpec, ModelSpec, RopeScaling
from baton_engine.transfer.handshake import Compatibility

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab=32,
    hidden=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    intermediate=16,
    context=128,
    norm_epsilon=1e-5,
    rope_theta=10_000.0,
)


def weights(seed: int = 1, dtype: torch.dtype = torch.float32) -> Weights:
    generator = torch.Generator().manual_seed(seed)

    def make(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    layers = tuple(
        LayerWeights(
            attention_norm=make(8),
            qkv=make(16, 8),
            qkv_bias=None,
            q_norm=None,
            k_norm=None,
            output=make(8, 8),
            output_bias=None,
            mlp_norm=make(8),
            gate_up=make(32, 8),
            gate_up_bias=None,
            down=make(8, 16),
            down_bias=None,
        )
        for _ in range(2)
    )
    embedding = make(32, 8)
    return Weights(embedding=embedding, layers=layers, final_norm=make(8), head=embedding)


def digest(**changes: Any) -> str:
    spec = dataclasses.replace(SPEC, **changes)
    return Compatibility.of(spec, torch.float32, "w").digest


LATENT = LatentSpec(q_rank=0, kv_rank=4, plain=2, value=2)

CHANGES: dict[str, Any] = {
    "layers": 3,
    "kv_heads": 2,
    "head_dim": 8,
    "rope_theta": 500_000.0,
    "rope": RopeScaling(kind="linear", factor=2.0),
    "sliding_window": 64,
    "qk_norm": True,
    "norm_epsilon": 1e-6,
    "architecture": "MistralForCausalLM",
    "experts": ExpertSpec(count=4, chosen=2, intermediate=8),
    "latent": LATENT,
    "draft_head": HeadSpec(kind="mtp", layer=SPEC),
}


@pytest.mark.parametrize("field", CHANGES)
def test_compatibility_field_of_block_bytes_changes_the_digest(field: str) -> None:
    assert digest(**{field: CHANGES[field]}) != digest()


@pytest.mark.parametrize(
    "field, value",
    [("context", 4096), ("eos_ids", (1, 2)), ("bos_id", 1), ("draft_layers", 1)],
)
def test_compatibility_other_fields_keep_the_digest(field: str, value: object) -> None:
    assert digest(**{field: value}) == digest()


def test_compatibility_names_the_draft_head() -> None:
    head = HeadSpec(kind="mtp", layer=SPEC)
    ours = Compatibility.of(dataclasses.replace(SPEC, draft_head=head), torch.float32, "w")
    theirs = Compatibility.of(SPEC, torch.float32, "w")
    assert ours.differences(theirs.labels) == f"draft head is {head} here and None there"
    assert str(head).startswith(f"mtp of {SPEC.hidden} (")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT8_CACHE])
def test_head_of_other_sizes_has_room_in_each_block(dtype: torch.dtype) -> None:
    """A head's layer need not have the heads of the model's layers."""
    layer = dataclasses.replace(SPEC, layers=1, kv_heads=4, heads=4, head_dim=20, hidden=54)
    spec = dataclasses.replace(SPEC, draft_head=HeadSpec(kind="eagle3", layer=layer))
    cache = KVCache(spec, 3, dtype, torch.device("cpu"))
    head = cache.head
    assert head is not None
    assert block_bytes(spec, dtype) == cache.kv[0].nbytes
    assert head.kv.shape == (3, 1, 2, 4, BLOCK_SIZE, 20)
    assert head.states.shape == (3, 54)
    assert head.states.dtype == (torch.bfloat16 if dtype == FLOAT8_CACHE else dtype)
    head.kv[1].fill_(1)
    head.states[1].fill_(2)
    assert bool((cache.kv[:, : SPEC.layers] == 0).all()) and bool((cache.kv[0] == 0).all())
    assert bool((head.kv[1] == 1).all()) and bool((head.states[1] == 2).all())


def test_latent_blocks_have_a_layout_of_their_own() -> None:
    latent = dataclasses.replace(SPEC, kv_heads=1, head_dim=6, rotary_dim=2, latent=LATENT)
    assert block_bytes(latent, torch.float32) == latent.layers * 6 * BLOCK_SIZE * 4
    cache = KVCache(latent, 3, torch.float32, torch.device("cpu"))
    assert cache.kv.shape == (3, latent.layers, 1, 1, BLOCK_SIZE, 6)
    ours, theirs = (Compatibility.of(spec, torch.float32, "w") for spec in (SPEC, latent))
    assert "layout is block, layer, key/value, kv head, slot, dim here" in ours.differences(theirs.labels)


def test_dtype_block_size_and_weights_count() -> None:
    digests = {
        Compatibility.of(SPEC, torch.float32, "w").digest,
        Compatibility.of(SPEC, torch.bfloat16, "w").digest,
        Compatibility.of(SPEC, torch.float32, "w", 32).digest,
        Compatibility.of(SPEC, torch.float32, "v").digest,
        Compatibility.of(SPEC, torch.bfloat16, "w", products="in tiles of AMX").digest,
    }
    assert len(digests) == 5


def test_compatibility_difference_has_both_values() -> None:
    ours = Compatibility.of(SPEC, torch.float32, "w")
    theirs = Compatibility.of(SPEC, torch.bfloat16, "w", 32)
    assert ours.differences(theirs.labels) == (
        "dtype is float32 here and bfloat16 there, kv dtype is float32 here and bfloat16 there, "
        "block size is 16 here and 32 there"
    )
    assert f"protocol is {PROTOCOL} here and unknown there" in ours.differences({})


def test_digest_separates_names_and_values() -> None:
    assert Compatibility({"ab": "c"}).digest != Compatibility({"a": "bc"}).digest


def test_equal_weights_have_equal_digests_wherever_they_lie() -> None:
    again = weights()
    moved = dataclasses.replace(again, embedding=floats(again.embedding).t().contiguous().t())
    assert weights_digest(weights()) == weights_digest(again) == weights_digest(moved)


def test_other_weights_shapes_or_types_have_other_digests() -> None:
    one = weights()
    other = dataclasses.replace(one, final_norm=one.final_norm + 1)
    misshapen = dataclasses.replace(one, final_norm=one.final_norm.reshape(2, 4))
    digests = {
        weights_digest(one),
        weights_digest(weights(2)),
        weights_digest(other),
        weights_digest(misshapen),
        weights_digest(weights(dtype=torch.bfloat16)),
    }
    assert len(digests) == 5
