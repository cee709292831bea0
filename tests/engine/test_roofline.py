"""The model of a pass against arithmetic done by hand, for 8B parameters in bfloat16."""

from __future__ import annotations

import pytest

from benchmarks.roofline import (
    DEVICES,
    LLAMA_8B,
    Shape,
    bound_s,
    chunks_of,
    decode,
    eager_s,
    graph_s,
    hash_s,
    kernels,
    prefill,
    ttft_s,
)

H200 = DEVICES[1]
LAYER_PARAMETERS = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14_336
HEAD_PARAMETERS = 4096 * 128_256


@pytest.mark.parametrize("rows", [1, 8, 100])
def test_decode_bytes_are_weights_once_and_kv_of_each_row(rows: int) -> None:
    """A row adds its KV blocks, 131,072 bytes a token, and activations, which are few."""
    moved = sum(kernel.bytes for kernel in kernels(LLAMA_8B, decode(rows, 500)))
    expected = 2 * (32 * LAYER_PARAMETERS + HEAD_PARAMETERS) + 131_072 * 500 * rows
    assert moved == pytest.approx(expected, rel=0.06)


@pytest.mark.parametrize("tokens", [500, 8192])
def test_prefill_operations_are_products_and_half_a_square(tokens: int) -> None:
    operations = sum(kernel.operations for kernel in kernels(LLAMA_8B, prefill(tokens)))
    products = 2 * (32 * LAYER_PARAMETERS * tokens + HEAD_PARAMETERS)
    assert operations == pytest.approx(products + 32 * 4 * 4096 * tokens * (tokens + 1) / 2)


def test_chunks_of_a_prompt_have_the_operations_of_the_whole() -> None:
    whole = sum(kernel.operations for kernel in kernels(LLAMA_8B, prefill(1024)) if kernel.name != "head")
    chunks = [Shape(1, 256, 256 * number) for number in range(1, 5)]
    parts = (kernel for chunk in chunks for kernel in kernels(LLAMA_8B, chunk) if kernel.name != "head")
    assert sum(kernel.operations for kernel in parts) == pytest.approx(whole)


@pytest.mark.parametrize(("rows", "milliseconds"), [(1, 3.51), (32, 3.98), (100, 5.01)])
def test_bound_on_an_h200_is_that_of_its_memory(rows: int, milliseconds: float) -> None:
    assert 1e3 * bound_s(kernels(LLAMA_8B, decode(rows, 500)), H200) == pytest.approx(milliseconds, rel=0.06)


def test_law_launches_only_add_time() -> None:
    for device in DEVICES:
        for shape in (decode(1, 10), decode(64, 4000), prefill(1), prefill(4096)):
            passed = kernels(LLAMA_8B, shape)
            assert 0 < bound_s(passed, device) < graph_s(passed, device) <= eager_s(passed, device)


def test_hash_of_a_gigabyte_takes_less_than_a_millisecond() -> None:
    assert 1e-4 < hash_s(LLAMA_8B, 8192, H200) < 1e-3


def test_transfer_ends_after_the_last_chunk_or_layer() -> None:
    """Over a fast link. 2,048 tokens of KV blocks are 268 MB: 5.4 ms at 50 GB/s, of which a layer is 1/32."""
    computed, read = ttft_s(LLAMA_8B, 1, chunks_of(8192, 2048), 50e9, H200)
    assert read == pytest.approx(2048 * 131_072 / 50e9)
    same, last = ttft_s(LLAMA_8B, 1, chunks_of(8192, 2048), 50e9, H200, by_layer=True)
    assert same == pytest.approx(computed)
    assert last == pytest.approx(read / 32)


def test_transfer_over_a_slow_link_takes_the_time_of_the_link() -> None:
    computed, read = ttft_s(LLAMA_8B, 1, chunks_of(8192, 2048), 1e9, H200)
    first = ttft_s(LLAMA_8B, 1, [2048], 1e9, H200)[0]
    assert computed + read == pytest.approx(first + 8192 * 131_072 / 1e9)


@pytest.mark.parametrize(
    ("tokens", "last", "expected"),
    [
        (500, 0, [500]),
        (8192, 0, [4096, 4096]),
        (2048, 256, [1024, 512, 256, 256]),
        (5000, 256, [4096, 448, 456]),
        (300, 256, [300]),
    ],
)
def test_last_chunk_is_halved_between_blocks(tokens: int, last: int, expected: list[int]) -> None:
    assert chunks_of(tokens, 4096, last) == expected


@pytest.mark.parametrize("tokens", [2048, 8192, 32_768])
@pytest.mark.parametrize("link", [50e9, 12.5e9])
def test_halved_last_chunk_saves_most_of_what_layers_do(tokens: int, link: float) -> None:
    """By the model: the reason not to announce by layer (ADR 37)."""
    whole = sum(ttft_s(LLAMA_8B, 1, chunks_of(tokens, 4096), link, H200))
    halved = sum(ttft_s(LLAMA_8B, 1, chunks_of(tokens, 4096, 256), link, H200))
    by_layer = sum(ttft_s(LLAMA_8B, 1, chunks_of(tokens, 4096), link, H200, by_layer=True))
    assert whole - halved > 0.7 * (whole - by_layer) > 0
