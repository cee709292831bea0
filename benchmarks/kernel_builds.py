"""
Several builds of the native kernels in one process, in turn, so that a busy machine slows down all of them.

    python -m benchmarks.kernel_builds LIBRARY LIBRARY... [--threads 2] [--model smollm2] [--dtype bfloat16]
    python -m benchmarks.kernel_builds LIBRARY --products pairs,widened,amx
    python -m benchmarks.kernel_builds LIBRARY --model qwen3-0.6b --format Q4_K --products octets,octets-amx

A library is a file that `python -m baton_engine.ops.native.library FOLDER` wrote, for example in two working
trees. With `--products`, values of BATON_PRODUCTS take turns too. Weights are random, with `--format` random
bytes of that format; they and the KV cache are the same for all. Prints the median of each case in
milliseconds, its ratio to the first one, and whether the logits have the same bits.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time
from dataclasses import replace

import gguf
import torch

from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.lending import Cores
from baton_engine.model.native_decoder import NativeDecoder
from baton_engine.model.weights import LayerWeights, Weights
from baton_engine.ops.native.products import products_of
from baton_engine.quantized import NATIVE_FORMATS, Format, Matrix, Quantized, QuantizedPart
from benchmarks.cpu_kernels import CPU, MODELS, STEPS, prefill, step_batch, weights_of

FORMATS = NATIVE_FORMATS - {Format.INT4}
TURN = 5
"""Passes of one library before it is the next one's turn."""


def opened(path: str) -> ctypes.CDLL:
    library = ctypes.CDLL(path)
    library.baton_create.restype = ctypes.c_void_p
    library.baton_adapter_create.restype = ctypes.c_void_p
    library.baton_bytes.restype = ctypes.c_int64
    return library


def step_times(
    decoders: dict[str, NativeDecoder], rows: int, context: int, seconds: float
) -> tuple[dict[str, float], bool]:
    """Return the median seconds of a decode step for each decoder, and whether all logits are equal."""
    spec, dtype = next((decoder.spec, decoder.dtype) for decoder in decoders.values())
    cache = KVCache(spec, 1 + rows * -(-context // BLOCK_SIZE), dtype, CPU)
    cache.kv.normal_(0, 0.5)
    batch = step_batch(rows, context)
    logits = [decoder.forward(batch, cache) for decoder in decoders.values()]
    times: dict[str, list[float]] = {name: [] for name in decoders}
    end = time.perf_counter() + seconds * len(decoders)
    while time.perf_counter() < end:
        for name, decoder in decoders.items():
            for _ in range(TURN):
                started = time.perf_counter()
                decoder.forward(batch, cache)
                times[name].append(time.perf_counter() - started)
    equal = all(torch.equal(other, logits[0]) for other in logits)
    return {name: statistics.median(each) for name, each in times.items()}, equal


def prompt_times(decoders: dict[str, NativeDecoder], tokens: int, repeats: int) -> dict[str, float]:
    """Return the median seconds of a prompt of `tokens` for each decoder."""
    spec, dtype = next((decoder.spec, decoder.dtype) for decoder in decoders.values())
    cache = KVCache(spec, 1 + tokens // BLOCK_SIZE, dtype, CPU)
    times: dict[str, list[float]] = {name: [] for name in decoders}
    for _ in range(repeats):
        for name, decoder in decoders.items():
            started = time.perf_counter()
            prefill(decoder, cache, tokens)
            times[name].append(time.perf_counter() - started)
    return {name: statistics.median(each) for name, each in times.items()}


def line(case: str, times: dict[str, float], note: str = "") -> str:
    first = next(iter(times.values()))
    cells = (f"{seconds * 1e3:>9.2f} ms {seconds / first:>5.2f}" for seconds in times.values())
    return f"{case:>22} {'  '.join(cells)}  {note}"


def random_blocks(weights: Weights, target: Format) -> Weights:
    """Replace the matrices by random bytes of a format, with scales of about 2 ** -5."""
    sizes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(target)]

    def matrix(values: Matrix) -> Matrix:
        outputs, inputs = values.shape
        blocks = torch.randint(0, 256, (outputs, inputs // sizes[0], sizes[1]), dtype=torch.uint8)
        scale = sizes[1] - 1 if target is Format.Q6_K else 1
        blocks[..., scale] = blocks[..., scale] & 0x81 | 0x28
        if target in (Format.Q4_1, Format.Q5_1, Format.Q4_K, Format.Q5_K):
            blocks[..., 3] = blocks[..., 3] & 0x81 | 0x28
        return Quantized((QuantizedPart(target, blocks.flatten(1)),), inputs)

    def layer(of: LayerWeights) -> LayerWeights:
        assert of.gate_up is not None and of.down is not None
        return replace(
            of,
            qkv=matrix(of.qkv),
            output=matrix(of.output),
            gate_up=matrix(of.gate_up),
            down=matrix(of.down),
        )

    head = matrix(weights.head)
    layers = tuple(layer(each) for each in weights.layers)
    return replace(weights, layers=layers, head=head, embedding=head)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("libraries", nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default="smollm2", choices=list(MODELS))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    steps = ",".join(f"{rows}:{context}" for rows, context in STEPS)
    parser.add_argument("--steps", default=steps, help="decode steps as ROWS:CONTEXT; empty: none")
    parser.add_argument("--seconds", type=float, default=3.0, help="per case and library")
    parser.add_argument("--prompts", default="1024,4096", help="lengths in tokens; empty: none")
    parser.add_argument("--format", default="", choices=["", *sorted(each.name for each in FORMATS)])
    parser.add_argument("--products", default="", help="values of BATON_PRODUCTS")
    options = parser.parse_args()
    torch.manual_seed(0)
    spec, dtype = MODELS[options.model], getattr(torch, options.dtype)
    weights, cores = weights_of(spec, dtype), Cores(options.threads, None)
    if options.format:
        weights = random_blocks(weights, Format[options.format])
    decoders = {
        f"{number} {path} {way}".strip(): NativeDecoder(
            spec, weights, dtype, kernels, cores, products_of(kernels, {**os.environ, "BATON_PRODUCTS": way})
        )
        for number, path in enumerate(options.libraries)
        for kernels in [opened(path)]
        for way in options.products.split(",")
    }
    print(f"{options.model}, {dtype}, {options.threads} threads: {', '.join(decoders)}")
    for rows, context in (map(int, each.split(":")) for each in options.steps.split(",") if each):
        times, equal = step_times(decoders, rows, context, options.seconds)
        note = "the same bits" if equal else "OTHER BITS"
        print(line(f"{rows} rows, {context} deep", times, note), flush=True)
    for tokens in (int(each) for each in options.prompts.split(",") if each):
        print(line(f"{tokens} prompt tokens", prompt_times(decoders, tokens, 3)), flush=True)


if __name__ == "__main__":
    main()
