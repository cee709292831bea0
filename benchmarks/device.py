"""
A GPU beside its limits: bandwidth, matrix products, each kernel's share of the roofline, and vLLM.

    python -m benchmarks.device                         predictions for H100, H200 and MI300X; needs no device
    python -m benchmarks.device --measure               rates and kernels of the device here
    python -m benchmarks.device --measure --model FOLDER   then Baton's server and vLLM's in turn

Predictions are of `benchmarks.roofline`, for a model of 8B parameters in bfloat16. A measured kernel has
random inputs of the same shapes, and its share is its shortest possible time, by the measured rates, over its
own. The comparison with vLLM is `benchmarks.serving`.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks import roofline
from benchmarks.roofline import (
    DEVICES,
    LINKS,
    LLAMA_8B,
    LLAMA_70B,
    Device,
    Kernel,
    Shape,
    chunks_of,
    decode,
    prefill,
    ttft_s,
)

ROWS = (1, 8, 32, 100, 256)
CONTEXT = 500
PROMPTS = (500, 2000, 8192)
LONG_PROMPTS = (2048, 8192, 32_768)
CHUNKS = (4096, 512)
"""Tokens of a chunk: the default on GPUs, and that on CPUs."""
LAST = 256
"""Tokens down to which a last chunk is halved."""
AIM = 0.85
"""Share of the bound that the engine aims at, with 1 and with 100 streams."""

COPY_BYTES = 2 * 1024**3
PRODUCT_SIZE = 8192
REPEATS = 20
CACHE_BYTES = 256 * 1024**2
"""Several times the L2 cache of any device: as much is read between two uses of the same inputs."""
CASES = "1:500:256,100:500:256,1:8192:16"


def predictions(device: Device) -> str:
    """Return the table of one device."""
    lines = [
        f"{device.name}: {device.bandwidth / 1e12:.2f} TB/s, {device.products / 1e12:.0f} TFLOP/s",
        "   decode rows     bound     graph     eager     bound       aim     graph     eager",
    ]
    for rows in ROWS:
        passed = roofline.kernels(LLAMA_8B, decode(rows, CONTEXT))
        bound = roofline.bound_s(passed, device)
        graph, eager = roofline.graph_s(passed, device), roofline.eager_s(passed, device)
        times = "".join(f"{1e3 * one:7.2f} ms" for one in (bound, graph, eager))
        seconds = bound, bound / AIM, graph, eager
        rates = "".join(f"{rows / one:10,.0f}" for one in seconds)
        lines.append(f"  {rows:12}{times}{rates} tok/s")
    for tokens in PROMPTS:
        passed = roofline.kernels(LLAMA_8B, prefill(tokens))
        bound = roofline.bound_s(passed, device)
        hashed = roofline.hash_s(LLAMA_8B, tokens, device)
        lines.append(
            f"  {tokens:6} prompt tokens: bound {1e3 * bound:7.2f} ms, {tokens / bound:8,.0f} tok/s; "
            f"hash of their blocks {1e3 * hashed:.2f} ms"
        )
    return "\n".join(lines)


def shares(shape: Shape, device: Device) -> str:
    """Return the parts of the bound that each kernel takes."""
    passed = roofline.kernels(LLAMA_8B, shape)
    bound = roofline.bound_s(passed, device)
    return ", ".join(f"{kernel.name} {100 * kernel.seconds(device) / bound:.0f} %" for kernel in passed)


def announcements() -> str:
    """Return the part of a transfer that computing does not hide: of blocks, halved chunks and layers."""
    device = DEVICES[1]
    lines = [
        f"{device.name}: time after the computation until the last block is read, its share of TTFT, and how "
        f"much less TTFT is with a last chunk halved down to {LAST} tokens, and with announcements by layer"
    ]
    for name, spec, ranks in (("8B", LLAMA_8B, 1), ("70B", LLAMA_70B, 4)):
        for chunk in CHUNKS:
            for tokens in LONG_PROMPTS:
                whole, halved = chunks_of(tokens, chunk), chunks_of(tokens, chunk, LAST)
                cells = []
                for link in LINKS.values():
                    computed, read = ttft_s(spec, ranks, whole, link, device)
                    total = computed + read
                    cells.append(f"{1e3 * read:7.1f} ms {100 * read / total:4.1f} %")
                    for chunks, by_layer in ((halved, False), (whole, True)):
                        sooner = total - sum(ttft_s(spec, ranks, chunks, link, device, by_layer=by_layer))
                        cells.append(f"{100 * sooner / total:5.1f} %")
                ends = " | ".join(cells)
                lines.append(f"{name:4} chunk {chunk:5} {tokens:6} tokens {1e3 * computed:6.0f} ms | {ends}")
    return "\n".join(lines)


def predict() -> None:
    print("PREDICTIONS by benchmarks.roofline; nothing here was measured. 8B parameters, bfloat16.")
    launches = sum(kernel.launches for kernel in roofline.kernels(LLAMA_8B, decode(1, CONTEXT)))
    print(f"A decode step of {CONTEXT} tokens of context has {launches} launches.\n")
    for device in DEVICES:
        print(predictions(device), end="\n\n")
    for name, shape in (("1 row", decode(1, CONTEXT)), ("100 rows", decode(100, CONTEXT))):
        print(f"{DEVICES[1].name}, {name}: {shares(shape, DEVICES[1])}")
    print(f"\nAnnouncements over {', '.join(LINKS)}. 70B on 4 GPUs.")
    print(announcements())


def measure() -> Device:
    """Measure the device, and the kernels of a layer. Returns its rates."""
    import torch

    name = torch.cuda.get_device_name()
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    copied = 2 * COPY_BYTES / _seconds(partial(torch.empty_like(source).copy_, source))
    square = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device="cuda").bfloat16()
    multiplied = 2 * PRODUCT_SIZE**3 / _seconds(partial(torch.matmul, square, square))
    device = Device(name, copied, multiplied)
    print(f"{name}: {copied / 1e12:.2f} TB/s, {multiplied / 1e12:.0f} TFLOP/s, torch {torch.__version__}\n")
    del source, square
    for shape in (decode(1, CONTEXT), decode(100, CONTEXT), prefill(2000)):
        print(f"{shape.rows} rows of {shape.tokens} tokens, {shape.context} deep")
        limits = {kernel.name: kernel for kernel in roofline.kernels(LLAMA_8B, shape)}
        for kernel, runs in _runs(shape).items():
            print(_line(limits[kernel], device, _replayed_seconds(runs)))
    return device


def _line(kernel: Kernel, device: Device, seconds: float) -> str:
    of_all = kernel.launches if kernel.name != "attention" else LLAMA_8B.layers
    bound = kernel.seconds(device) / of_all
    return f"  {kernel.name:18}{1e6 * seconds:10.1f} us{100 * bound / seconds:8.0f} % of its roofline"


def _runs(shape: Shape) -> Mapping[str, Sequence[Callable[[], Any]]]:
    """Return calls for each kernel of a layer, on random inputs of `shape`. Products have several weights."""
    import torch

    from baton_engine.batch import Batch, BatchRow
    from baton_engine.devices import shared_memory
    from baton_engine.kv.cache import BLOCK_SIZE, KVCache
    from baton_engine.ops.accelerator import AcceleratorOps

    spec, device = LLAMA_8B, torch.device("cuda")
    blocks = -(-shape.context // BLOCK_SIZE)
    rows = [
        BatchRow(
            [0] * shape.tokens,
            shape.context - shape.tokens,
            list(range(1 + row * blocks, 1 + (row + 1) * blocks)),
            1,
        )
        for row in range(shape.rows)
    ]
    cache = KVCache(spec.served_to(shape.context), 1 + shape.rows * blocks, torch.bfloat16, device)
    batch, ops = Batch(rows, BLOCK_SIZE, device), AcceleratorOps(spec, shared_memory(device))
    ops.begin(batch)

    def values(*sizes: int) -> Any:
        return torch.randn(sizes, device=device).bfloat16()

    n, q, size = spec.hidden, spec.heads * spec.head_dim, shape.size
    width = q + 2 * spec.kv_heads * spec.head_dim
    x, residual = values(size, n), values(size, n)
    qkv, gate_up = values(size, width), values(size, 2 * spec.intermediate)
    table = torch.randn(size, spec.head_dim // 2, device=device)
    heads = values(size, spec.heads, spec.head_dim)
    products = {
        "qkv": (width, n),
        "output": (n, q),
        "gate and up": (2 * spec.intermediate, n),
        "down": (n, spec.intermediate),
    }
    runs: dict[str, Sequence[Callable[[], Any]]] = {
        name: [
            partial(ops.prepare(values(outputs, inputs)), values(size, inputs))
            for _ in range(1 + CACHE_BYTES // (2 * outputs * inputs))
        ]
        for name, (outputs, inputs) in products.items()
    }

    def attentions(layer: int) -> Callable[[], Any]:
        return lambda: ops.attention(heads, cache, layer, batch, None)

    return runs | {
        "add and norm": [lambda: ops.add_rms_norm(x, residual, x[0], spec.norm_epsilon)],
        "rotate and store": [lambda: ops.rope_and_store(qkv, (table, table), None, None, cache, 0, batch)],
        "attention": [attentions(layer) for layer in range(spec.layers)],
        "activation": [lambda: ops.gated(gate_up)],
    }


def _seconds(run: Callable[[], Any]) -> float:
    """Return the median seconds of `run` on the device, after three that compile and warm up."""
    import torch

    times = []
    for number in range(3 + REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        run()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(float(begin.elapsed_time(end)) / 1e3)
    return statistics.median(times)


def _replayed_seconds(runs: Sequence[Callable[[], Any]]) -> float:
    """
    Return the seconds of each of `runs` on the device, one after another in a CUDA graph.

    Launched one by one, small kernels wait for the host: the time would be that of a launch.
    """
    import torch

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())  # which may still write the inputs
    with torch.cuda.stream(stream):
        for run in runs:
            run()
    stream.synchronize()
    graph, count = torch.cuda.CUDAGraph(), max(REPEATS, len(runs))
    with torch.cuda.graph(graph, stream=stream):
        for number in range(count):
            runs[number % len(runs)]()
    return _seconds(graph.replay) / count


def main() -> int:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--model", default="")
    arguments = parser.parse_args()
    if not arguments.measure:
        predict()
        return 0
    import torch

    if not torch.cuda.is_available():
        print("There is no GPU here. Without --measure, predictions are printed.", file=sys.stderr)
        return 1
    print("\n" + predictions(measure()))
    if not arguments.model:
        return 0
    servers = ("baton=baton serve {model} --port {port}", "vllm=vllm serve {model} --port {port}")
    command = [sys.executable, "-m", "benchmarks.serving", "--model", arguments.model]
    command += [part for server in servers for part in ("--server", server)]
    return subprocess.run([*command, "--cases", CASES], check=False).returncode


if __name__ == "__main__":
    raise SystemExit(main())
