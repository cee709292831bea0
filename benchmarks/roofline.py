"""
A model of a forward pass on a GPU: bytes, operations and launches of each kernel. No device is needed.

A kernel takes the longer of two times: its bytes by the bandwidth of the memory, and its operations by the
rate of matrix products. A launch adds a fixed time. The sum without launches is the bound of a pass.

The rates of `DEVICES` are assumptions: shares of the vendors' peaks that dense kernels usually reach. With a
device, `benchmarks.device` measures them instead. Every time that follows from assumptions is a prediction.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from baton_engine.kv.cache import BLOCK_SIZE, block_bytes
from baton_engine.scheduling.scheduler import next_piece
from baton_engine.spec import ModelSpec

BYTES = 2
"""Of a value in bfloat16."""

LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class Device:
    """The rates of a GPU."""

    name: str
    bandwidth: float
    """Bytes per second that kernels reach."""
    products: float
    """Operations per second of bfloat16 matrix products, 2 for a multiplication with addition."""


DEVICES = (
    # Peaks: 3.35 TB/s and 989 TFLOP/s, 4.8 TB/s and 989 TFLOP/s, 5.3 TB/s and 1,307 TFLOP/s (data sheets).
    Device("H100 SXM", 0.9 * 3.35e12, 0.75 * 989e12),
    Device("H200", 0.9 * 4.8e12, 0.8 * 989e12),
    Device("MI300X", 0.8 * 5.3e12, 0.55 * 1307e12),
)

EAGER_LAUNCH_S = 12e-6
"""Time of the host for a launch from Python: an assumption. It hides behind kernels that take longer."""

GRAPH_LAUNCH_S = 2e-6
"""Time between two kernels of a captured graph: an assumption."""

LLAMA_8B = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab=128_256,
    hidden=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14_336,
    context=131_072,
    norm_epsilon=1e-5,
    rope_theta=500_000.0,
)

LLAMA_70B = replace(LLAMA_8B, layers=80, hidden=8192, heads=64, intermediate=28_672)

LINKS = {"400 Gbit/s": 50e9, "100 Gbit/s": 12.5e9, "10 Gbit/s (TCP)": 1.25e9}
"""Bytes per second between a prefill and a decode worker, all of which one prompt gets."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a pass, with all its launches."""

    name: str
    launches: int
    bytes: float
    """Read and written by all launches."""
    operations: float = 0.0
    """Of matrix products."""

    def seconds(self, device: Device) -> float:
        """Return the shortest time of all launches."""
        return max(self.bytes / device.bandwidth, self.operations / device.products)


@dataclass(frozen=True, slots=True)
class Shape:
    """A pass of `rows` sequences: `tokens` new ones each, after which the cache has `context` of each."""

    rows: int
    tokens: int
    context: int

    @property
    def size(self) -> int:
        return self.rows * self.tokens


def decode(rows: int, context: int) -> Shape:
    return Shape(rows, 1, context)


def prefill(tokens: int) -> Shape:
    return Shape(1, tokens, tokens)


def kernels(spec: ModelSpec, shape: Shape) -> list[Kernel]:
    """Return the kernels of a pass of a dense model in bfloat16, as `ops.accelerator` launches them."""
    n, d, layers, size = spec.hidden, spec.head_dim, spec.layers, shape.size
    q, kv = spec.heads * d, spec.kv_heads * d

    def product(name: str, outputs: int, inputs: int, launches: int = layers, tokens: int = size) -> Kernel:
        moved = BYTES * (outputs * inputs + tokens * (inputs + outputs))
        return Kernel(name, launches, launches * moved, launches * 2.0 * outputs * inputs * tokens)

    def pointwise(name: str, values: float, launches: int = layers) -> Kernel:
        return Kernel(name, launches, launches * BYTES * values)

    # A token attends to the tokens before it and to itself, in a prompt to half of it on average.
    pairs = shape.size * (shape.context - (shape.tokens - 1) / 2)
    cached = 2 * kv * shape.rows * shape.context
    attention = Kernel(
        "attention",
        2 * layers if shape.tokens == 1 else layers,  # parts of a context, then their sum
        layers * BYTES * (cached + 2 * q * size),
        layers * 4.0 * q * pairs,
    )
    return [
        pointwise("add and norm", 4 * n * size, 2 * layers),
        product("qkv", q + 2 * kv, n),
        pointwise("rotate and store", 2 * (q + 2 * kv) * size),
        attention,
        product("output", n, q),
        product("gate and up", 2 * spec.intermediate, n),
        pointwise("activation", 3 * spec.intermediate * size),
        product("down", n, spec.intermediate),
        pointwise("embedding", 2 * n * size, 1),
        product("head", spec.vocab, n, 1, shape.rows),
        Kernel("sampling", 1, 2 * LOGIT_BYTES * spec.vocab * shape.rows),
    ]


def bound_s(pass_: Sequence[Kernel], device: Device) -> float:
    """Return the seconds of a pass if each kernel reaches its limit and launches cost nothing."""
    return sum(kernel.seconds(device) for kernel in pass_)


def eager_s(pass_: Sequence[Kernel], device: Device) -> float:
    """Return the seconds of a pass with launches from Python, which run ahead of the device if they can."""
    launches = sum(kernel.launches for kernel in pass_)
    return max(launches * EAGER_LAUNCH_S, graph_s(pass_, device))


def graph_s(pass_: Sequence[Kernel], device: Device) -> float:
    """Return the seconds of a pass as one captured graph."""
    return bound_s(pass_, device) + sum(kernel.launches for kernel in pass_) * GRAPH_LAUNCH_S


def hash_s(spec: ModelSpec, tokens: int, device: Device) -> float:
    """Return the seconds of hashing the KV blocks of a prompt on one side of a transfer (ADR 37)."""
    import torch

    blocks = -(-tokens // BLOCK_SIZE)
    return blocks * block_bytes(spec, torch.bfloat16) / device.bandwidth


def chunks_of(tokens: int, most: int, last: int = 0) -> list[int]:
    """
    Return the chunks of a prompt, of `most` tokens but for the last one.

    With `last`, that one is halved again and again, down to `last` tokens: the blocks of each are read while
    the next one is computed, so few are left at the end.
    """
    *chunks, rest = [min(most, tokens - start) for start in range(0, tokens, most)]
    while rest:
        chunks.append(next_piece(tokens - rest, rest, last, BLOCK_SIZE))
        rest -= chunks[-1]
    return chunks


def ttft_s(
    spec: ModelSpec,
    ranks: int,
    chunks: Sequence[int],
    link: float,
    device: Device,
    *,
    by_layer: bool = False,
) -> tuple[float, float]:
    """
    Return the seconds until a prompt is computed, and from then to the end of the last read of its blocks.

    `ranks` share each kernel equally. Blocks of each of `chunks`, in tokens, are announced when they are
    computed, or each layer of them. Then they pass the link, at `link` bytes per second, one after the other.
    """
    import torch

    parts = spec.layers if by_layer else 1
    steps = []
    for chunk, end in zip(chunks, itertools.accumulate(chunks), strict=True):
        computing = bound_s(kernels(spec, Shape(1, chunk, end)), device) / ranks
        moving = chunk / BLOCK_SIZE * block_bytes(spec, torch.bfloat16) / link
        steps += [(computing / parts, moving / parts)] * parts
    return relayed_s(steps)


def relayed_s(steps: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """
    Return the seconds until the last of `steps` is computed, and from then to the end of the last read.

    A step has its seconds of computing, after which it is announced, and of reading.
    """
    now = free = 0.0
    for computing, reading in steps:
        now += computing
        free = max(free, now) + reading
    return now, free - now
