"""
Several builds of the native kernels in one process, in turn, so that a busy machine slows down all of them.

    python -m benchmarks.kernel_builds LIBRARY LIBRARY... [--threads 2] [--model smollm2] [--dtype bfloat16]
    python -m benchmarks.kernel_builds LIBRARY --products pairs,widened,amx

A library is a file that `python -m baton_engine.ops.native.library FOLDER` wrote, for example in two working
trees. With `--products`, values of BATON_PRODUCTS take turns too. Weights are random; they and the KV cache
are the same for all. Prints the median of each case in milliseconds, its ratio to the first one, and whether
the logits have the same bits.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import time

import torch

from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.lending import Cores
from baton_engine.model.native_decoder import NativeDecoder
from baton_engine.ops.native.products import products_of
from benchmarks.cpu_kernels import CPU, MODELS, STEPS, prefill, step_batch, weights_of

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
    parser.add_argument("--products", default="", help="values of BATON_PRODUCTS")
    options = parser.parse_args()
    torch.manual_seed(0)
    spec, dtype = MODELS[options.model], getattr(torch, options.dtype)
    weights, cores = weights_of(spec, dtype), Cores(options.threads, None)
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
