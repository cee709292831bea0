"""Keys and values in float8: stored and read by the kernels, and refused elsewhere."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.kv.cache import FLOAT8_CACHE, KVCache
from baton_engine.ops.accelerator import AcceleratorOps
from baton_engine.ops.choice import kv_dtype
from baton_engine.ops.plain import PlainOps
from baton_engine.transfer.handshake import Compatibility
from benchmarks.launches import LATENT
from tests.engine.greedy import CPU, by_baton
from tests.engine.kernels.cases import DEVICE, batch_of
from tests.engine.kernels.test_accelerated_decoder import PROMPTS, decoders
from tests.engine.kernels.test_attention_kernels import MODELS, SHAPES, both
from tests.engine.random_weights import tiny_spec

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # of numpy

NAN = 0x7F
NUMBERS = torch.arange(NAN, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
"""All numbers from 0 to 448."""


def stored(values: Tensor) -> Tensor:
    """The bytes that the kernel stores for `values`, as those of a token's value heads."""
    spec = tiny_spec(unrotated_layers=(True, True))
    size = spec.kv_heads * spec.head_dim
    padded = torch.zeros(-(-len(values) // size), size)
    padded.view(-1)[: len(values)] = values
    batch = batch_of([(0, len(padded))], random.Random(1))
    cache = KVCache(spec, 1 + max(batch.rows[0].blocks), FLOAT8_CACHE, DEVICE)
    rest = torch.zeros(len(padded), (spec.heads + spec.kv_heads) * spec.head_dim)
    ops = AcceleratorOps(spec)
    ops.begin(batch)
    ops.rope_and_store(torch.cat((rest, padded), dim=1).to(DEVICE), None, None, None, cache, 1, batch)
    slots = batch.slots
    held = cache.kv[:, 1][slots // cache.block_size, 1, :, slots % cache.block_size]  # [T, K, D]
    return held.flatten().cpu()[: len(values)]


def test_float8_numbers_are_rounded_as_by_torch() -> None:
    """All numbers, all ties between two of them, and what is just beside."""
    ties = (NUMBERS[1:] + NUMBERS[:-1]) / 2
    beside = [torch.nextafter(ties, torch.tensor(bound)) for bound in (0.0, 500.0)]
    values = torch.cat((NUMBERS, ties, *beside, torch.rand(500) * 448, torch.rand(500) / 50))
    values = torch.cat((values, -values))
    assert torch.equal(stored(values), values.to(torch.float8_e4m3fn).view(torch.uint8))


def test_float8_has_an_end_and_keeps_nan() -> None:
    values = torch.tensor([449.0, -1e30, torch.inf, -torch.inf, torch.nan])
    assert (stored(values) & NAN).tolist() == [NAN - 1, NAN - 1, NAN, NAN, NAN]


CASES = {
    "a whole prompt": "two heads per key head",
    "one token of many splits": "two heads per key head",
    "prefill and decode mixed": "sinks and a window",
    "a chunk over the border of splits": "heads of 80 dimensions",
    "rows of one token with other lengths": "a scale and a cap of scores",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shapes", CASES)
def test_attention_over_float8_is_that_over_its_numbers(shapes: str, dtype: torch.dtype) -> None:
    """Behind the rows there is NaN, as in `test_attention_kernels`."""
    torch.manual_seed(3)
    spec = tiny_spec(**MODELS[CASES[shapes]])
    batch = batch_of(SHAPES[shapes], random.Random(5))
    tolerance = 2e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(*both(spec, batch, dtype, float8=True), atol=tolerance, rtol=tolerance)


class RoundedOps(PlainOps):
    """Plain operations that round what they store."""

    def rope_and_store(self, *args: Any) -> Tensor:
        q, cache = super().rope_and_store(*args), args[4]
        cache.kv.copy_(cache.kv.to(torch.float8_e4m3fn))
        return q


@pytest.mark.skipif(DEVICE.type != "cpu", reason="the model is on a CPU")
def test_float8_cache_gives_the_tokens_of_rounded_keys(tmp_path: Path) -> None:
    ours, plain = decoders(tmp_path, "qwen3")
    plain.ops = RoundedOps(plain.spec)
    prompts = [prompt[:9] for prompt in PROMPTS[:2]]
    results = by_baton(ours, prompts, 3, 5, FLOAT8_CACHE)
    for result, expected in zip(results, by_baton(plain, prompts, 3, 5), strict=True):
        assert result.tokens == expected.tokens
        assert result.logprobs == pytest.approx(expected.logprobs, abs=2e-4)


CUDA = torch.device("cuda")
PATH = {"PATH": os.environ["PATH"]}
"""Where a C compiler is found, which Triton needs on a GPU."""


def test_float8_cache_is_for_devices_with_kernels() -> None:
    spec = tiny_spec()
    assert kv_dtype("auto", spec, CPU, torch.float32) == torch.float32
    assert kv_dtype("fp8", spec, CUDA, torch.bfloat16, PATH) == FLOAT8_CACHE
    assert kv_dtype("fp8", tiny_spec(**LATENT), CUDA, torch.bfloat16, PATH) == FLOAT8_CACHE
    wide = tiny_spec(head_dim=320)
    for device, other, environment, reason in (
        (CPU, spec, {}, "the kernels of CPUs do not read it"),
        (CUDA, spec, {"BATON_KERNELS": "0"}, "BATON_KERNELS disables the kernels"),
        (CUDA, wide, PATH, "heads of 320 dimensions, above 256"),
    ):
        with pytest.raises(SetupError, match=rf"{reason}\. Use --kv-cache-dtype auto"):
            kv_dtype("fp8", other, device, torch.bfloat16, environment)


def test_float8_cache_pairs_only_with_float8() -> None:
    of = [
        Compatibility.of(tiny_spec(), torch.bfloat16, "", kv_dtype=each)
        for each in (torch.bfloat16, FLOAT8_CACHE)
    ]
    assert of[0] == Compatibility.of(tiny_spec(), torch.bfloat16, "")
    assert of[0].digest != of[1].digest
    assert of[0].differences(of[1].labels) == "kv dtype is bfloat16 here and fp8 there"
