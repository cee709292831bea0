"""
The native decoder against torch's, and both against what the machine can do.

    python -m benchmarks.cpu_kernels [--threads 1,2] [--models smollm2,qwen2.5-0.5b] [--dtype bfloat16]

Random weights of the models' sizes, without a download. A decode step is compared with the time to read
its weights and KV once. Prefill is compared with the time of its products at the peak of one large product.
Both limits are measured just before. Times are medians. `--realtime` keeps other processes off the cores
meanwhile (Linux, as root), for machines that are not quiet.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from baton_engine.batch import Batch, BatchRow
from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.model.decoder import Decoder, Model
from baton_engine.model.native_decoder import native_decoder
from baton_engine.model.weights import LayerWeights, Weights
from baton_engine.ops.plain import CpuOps, PlainOps
from baton_engine.spec import ModelSpec
from benchmarks.limits import Limits, MemoryProbe, measure, seconds

CPU = torch.device("cpu")
STEPS = ((1, 96), (8, 96), (32, 96), (1, 1024), (8, 1024), (32, 1024))
"""(rows, context)"""
PROMPTS = (1024, 4096)
CHUNK = 512


def spec(name: str, **sizes: int | bool) -> ModelSpec:
    return ModelSpec(
        architecture=name,
        context=8192,
        norm_epsilon=1e-5,
        rope_theta=10_000.0,
        tied_embeddings=True,
        **sizes,  # type: ignore[arg-type]
    )


MODELS = {
    "smollm2": spec(
        "smollm2",
        vocab=49152,
        hidden=576,
        layers=30,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate=1536,
    ),
    "qwen2.5-0.5b": spec(
        "qwen2.5-0.5b",
        vocab=151936,
        hidden=896,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        intermediate=4864,
        qkv_bias=True,
    ),
    "qwen3-0.6b": spec(
        "qwen3-0.6b",
        vocab=151936,
        hidden=1024,
        layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate=3072,
    ),
    "tiny": spec("tiny", vocab=512, hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, intermediate=128),
}


def weights_of(model: ModelSpec, dtype: torch.dtype) -> Weights:
    def matrix(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype).uniform_(-0.05, 0.05)

    def layer() -> LayerWeights:
        qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
        return LayerWeights(
            attention_norm=torch.ones(model.hidden, dtype=dtype),
            qkv=matrix(qkv, model.hidden),
            qkv_bias=matrix(qkv) if model.qkv_bias else None,
            q_norm=None,
            k_norm=None,
            output=matrix(model.hidden, model.heads * model.head_dim),
            output_bias=None,
            mlp_norm=torch.ones(model.hidden, dtype=dtype),
            gate_up=matrix(2 * model.intermediate, model.hidden),
            gate_up_bias=None,
            down=matrix(model.hidden, model.intermediate),
            down_bias=None,
        )

    embedding = matrix(model.vocab, model.hidden)
    return Weights(
        embedding=embedding,
        layers=tuple(layer() for _ in range(model.layers)),
        final_norm=torch.ones(model.hidden, dtype=dtype),
        head=embedding,
    )


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes that a model must read, and operations that it must compute."""

    model: ModelSpec
    dtype: torch.dtype

    @property
    def layer_numbers(self) -> int:
        model = self.model
        attention = model.hidden * model.head_dim * (2 * model.heads + 2 * model.kv_heads)
        return model.layers * (attention + 3 * model.hidden * model.intermediate)

    def step_bytes(self, rows: int, context: int) -> int:
        numbers = self.layer_numbers + self.model.vocab * self.model.hidden
        return (numbers + rows * context * self.model.kv_values_per_token) * self.dtype.itemsize

    def step_operations(self, rows: int) -> int:
        return 2 * rows * (self.layer_numbers + self.model.vocab * self.model.hidden)

    def prompt_operations(self, tokens: int) -> int:
        attention = 2 * self.model.layers * self.model.heads * self.model.head_dim * tokens**2
        return 2 * self.layer_numbers * tokens + attention


def step_batch(rows: int, context: int) -> Batch:
    width = -(-context // BLOCK_SIZE)
    batch = Batch(
        [
            BatchRow([5], context - 1, range(1 + row * width, 1 + (row + 1) * width), True)
            for row in range(rows)
        ],
        BLOCK_SIZE,
        CPU,
    )
    assert batch.slots is not None and batch.block_table is not None  # made once, outside the timing
    return batch


def prefill(model: Model, cache: KVCache, tokens: int) -> None:
    for start in range(0, tokens, CHUNK):
        end = min(start + CHUNK, tokens)
        row = BatchRow([5] * (end - start), start, range(1, 1 + -(-end // BLOCK_SIZE)), end == tokens)
        model.forward(Batch([row], BLOCK_SIZE, CPU), cache)


def report(name: str, dtype: torch.dtype, limits: Limits) -> None:
    model = MODELS[name]
    weights, cost = weights_of(model, dtype), Cost(model, dtype)
    compiled = native_decoder(model, weights, dtype)
    if compiled is None:
        raise SystemExit("there is nothing to compare: the native kernels are not to be had")
    plain = Decoder(model, weights, PlainOps(model), CPU)
    packed = Decoder(model, weights, CpuOps(model, dtype), CPU)
    blocks = 1 + max(
        [rows * -(-context // BLOCK_SIZE) for rows, context in STEPS] + [PROMPTS[-1] // BLOCK_SIZE]
    )
    cache = KVCache(model, blocks, dtype, CPU)
    cache.kv.fill_(0.01)
    print(f"\n{name}, {dtype}, {limits}", flush=True)
    print(f"{'step':>22} {'native':>10} {'of memory':>10} {'of peak':>8} {'plain':>9} {'prepacked':>10}")
    for rows, context in STEPS:
        batch = step_batch(rows, context)
        ours, theirs, prepacked = (
            seconds(partial(each.forward, batch, cache), repeats)
            for each, repeats in ((compiled, 15), (plain, 5), (packed, 5))
        )
        memory = cost.step_bytes(rows, context) / limits.memory / ours
        peak = cost.step_operations(rows) / limits.product(dtype) / ours
        print(
            f"{rows:>6} rows, {context:>5} deep {ours * 1e3:>7.2f} ms {memory:>10.0%} {peak:>8.0%} "
            f"{theirs / ours:>8.2f}x {prepacked / ours:>9.2f}x",
            flush=True,
        )
    for tokens in PROMPTS:
        ours, prepacked = (seconds(partial(prefill, each, cache, tokens), 1) for each in (compiled, packed))
        peak = cost.prompt_operations(tokens) / limits.product(dtype) / ours
        print(
            f"{tokens:>10} prompt tokens {tokens / ours:>6.0f} tok/s {peak:>18.0%} {'':>8} "
            f"{prepacked / ours:>9.2f}x",
            flush=True,
        )


def whole_step(model: Model, rows: int, cache: KVCache) -> None:
    model.forward(step_batch(rows, 64), cache)


def overhead(dtype: torch.dtype) -> None:
    """A tiny model's pass, batch and all: what a step costs besides the arithmetic."""
    model = MODELS["tiny"]
    weights = weights_of(model, dtype)
    cache = KVCache(model, 64, dtype, CPU)
    compiled, plain = native_decoder(model, weights, dtype), Decoder(model, weights, PlainOps(model), CPU)
    assert compiled is not None
    for rows in (1, 8):
        ours, theirs = (seconds(partial(whole_step, each, rows, cache), 200) for each in (compiled, plain))
        print(f"tiny model, {rows} rows: {ours * 1e6:.0f} us a pass, torch {theirs * 1e6:.0f} us", flush=True)


def take_the_cores() -> None:
    """Schedule all threads of this process before other processes, which still get 5 % of a core."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setscheduler(int(thread), os.SCHED_FIFO, os.sched_param(1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", default=f"1,{len(os.sched_getaffinity(0))}")
    parser.add_argument("--models", default="smollm2,qwen2.5-0.5b")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--realtime", action="store_true")
    options = parser.parse_args()
    dtype: torch.dtype = getattr(torch, options.dtype)
    torch.manual_seed(0)
    if options.realtime:
        take_the_cores()  # threads started from here on inherit it
    probe = MemoryProbe()
    print(time.strftime("%Y-%m-%d"), torch.cpu.get_capabilities().get("cpu_name"), "torch", torch.__version__)
    for threads in dict.fromkeys(int(count) for count in options.threads.split(",")):
        limits = measure(threads, probe)
        for name in options.models.split(","):
            report(name, dtype, limits)
        overhead(dtype)


if __name__ == "__main__":
    main()
