"""
Launches of a decode step, counted: calls of torch that compute, and kernels under Triton's interpreter.

    python -m benchmarks.launches

A step is the input of a pass, the pass, and the selection of tokens. Copies to the device and waits for it
are counted apart. No device is needed: the same Python code makes the same calls there. A replayed graph is
one launch. Of two ranks, rank 0 is counted. An operation of the group is a launch, and the gather of logits
two. Numbers are in float32. Ranks have no adapters. Products with quantized matrices of more than 1,024
inputs have a second launch where their tiles are few (`ops/kernels/quantized.py`). No matrix here is as wide.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from baton_engine.batch import Batch, BatchRow
from baton_engine.graphs import CaptureLimits, with_graphs
from baton_engine.kv.cache import BLOCK_SIZE, KVCache
from baton_engine.model.decoder import Decoder
from baton_engine.model.group import Group
from baton_engine.model.lora import LoraWeights, LowRank
from baton_engine.model.shards import Shard
from baton_engine.model.weights import Weights
from baton_engine.ops import Ops
from baton_engine.ops.token_weights import GREEDY, TokenRule
from baton_engine.quantized import Format, quantize
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.spec import ExpertSpec, LatentSpec, ModelSpec
from tests.engine.fake_graphs import FakeGraphs
from tests.engine.fake_streams import on_device
from tests.engine.random_weights import random_weights, tiny_spec

CPU = torch.device("cpu")
STARTS = (3, 20, 33, 40)
"""Contexts of the rows: of several lengths, so that plain operations do not compute them as one."""

LAYERS = 32
"""Of the model whose whole step is reported."""

WAITS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "nonzero")
RANK = 16
"""Of adapters."""

EXPERTS = ExpertSpec(count=8, chosen=4, intermediate=32, normalized=True)
LATENT: dict[str, Any] = {
    "kv_heads": 1,
    "head_dim": 40,
    "rotary_dim": 8,
    "latent": LatentSpec(q_rank=32, kv_rank=32, plain=16, value=16),
}
"""Latent attention, whose layers have dense MLPs here."""

MODELS: Mapping[str, dict[str, Any]] = {
    "a Llama": {},
    f"a Llama with {EXPERTS.count} experts, {EXPERTS.chosen} chosen": {"experts": EXPERTS},
    "a DeepSeek with dense MLPs": LATENT,
}
CHANCE = TokenRule(1.0, top_p=0.9, number=0.5)


def select(logits: Tensor, rules: Sequence[TokenRule]) -> list[int]:
    """Select by the kernels, and read the tokens."""
    from baton_engine.ops.kernels.sampling import select_on_device

    tokens: list[int] = select_on_device(logits, rules).tolist()
    return tokens


Select = Callable[[Tensor, Sequence[TokenRule]], Any]


class _Computing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts calls of torch that compute: no views, no allocations. A norm is one call, as on devices."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name() != "aten::rms_norm":
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        if not func.is_view and not func.name().startswith(("aten::empty", "aten::new_empty")):
            self._counts[func.name()] += 1
        return func(*args, **kwargs)


class _Moving(TorchFunctionMode):
    """Counts tensors that are moved to a device, as "copy", and results that the host reads, as "wait"."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        to_device = any(isinstance(each, torch.device) for each in (*args, *kwargs.values()))
        if name == "copy_" or (name in ("to", "tensor") and to_device):
            self._counts["copy"] += 1
        elif name in WAITS:
            self._counts["wait"] += 1
        return func(*args, **kwargs)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count launches by the names of torch's calls and of kernels. Calls of the interpreter do not count."""
    from triton.runtime.interpreter import InterpretedFunction

    counts: Counter[str] = Counter()
    run, without_modes = InterpretedFunction.run, _disable_current_modes

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> None:
        counts[kernel.__name__] += 1
        with without_modes():
            run(kernel, *args, **kwargs)

    InterpretedFunction.run = launch
    try:
        with _Computing(counts):
            yield counts
    finally:
        InterpretedFunction.run = run


def adapter(spec: ModelSpec) -> LoraWeights:
    """Return an adapter of all projections."""
    hidden, heads, keys = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    sizes = {
        "q": (hidden, heads),
        "k": (hidden, keys),
        "v": (hidden, keys),
        "output": (heads, hidden),
        "gate": (hidden, spec.intermediate),
        "up": (hidden, spec.intermediate),
        "down": (spec.intermediate, hidden),
    }
    layer = {
        name: LowRank(torch.zeros(RANK, inputs), torch.zeros(outputs, RANK))
        for name, (inputs, outputs) in sizes.items()
    }
    return LoraWeights(digest="", rank=RANK, layers=(layer,) * spec.layers)


class Rows(NamedTuple):
    """Rows of one token each, with blocks of their own."""

    starts: Sequence[int] = STARTS
    adapters: int = 0
    """Number of adapters, which the rows have in turn. 0: rows have none."""

    def batch(self, model: Decoder) -> Batch:
        chosen = [model.prepare_adapter(adapter(model.spec)) for _ in range(self.adapters)] or [None]
        rows = [
            BatchRow([5], start, range(1 + 3 * row, 4 + 3 * row), 1, adapter=chosen[row % len(chosen)])
            for row, start in enumerate(self.starts)
        ]
        return Batch(rows, BLOCK_SIZE, CPU)

    def cache(self, model: Decoder) -> KVCache:
        return KVCache(model.spec, 4 + 3 * len(self.starts), torch.float32, CPU)


FOUR = Rows()
ONE_ADAPTER, ADAPTERS = Rows(STARTS * 4, adapters=1), Rows(STARTS * 4, adapters=16)


class _Backend:
    """Operations of a group whose other ranks have the same values."""

    def allreduce(self, parts: list[Tensor]) -> _Backend:
        parts[0].mul_(2)
        return self

    def gather(self, outputs: list[list[Tensor]], parts: list[Tensor]) -> _Backend:
        for output in outputs[0]:
            torch.cat(parts, out=output)
        return self

    def wait(self) -> None:
        return


KEPT = ("qkv", "latent_q", "output", "gate_up", "down")
"""Matrices of a layer without experts that are kept quantized."""


def kept(weights: Weights) -> Weights:
    """Return the weights with the matrices of their layers in Q8_0."""
    layers = []
    for layer in weights.layers:
        matrices = {name: getattr(layer, name) for name in KEPT if getattr(layer, name) is not None}
        quantized: dict[str, Any] = {name: quantize(matrix, Format.Q8_0) for name, matrix in matrices.items()}
        layers.append(replace(layer, **quantized))
    return replace(weights, layers=tuple(layers))


def decoder(
    make_ops: Callable[[ModelSpec], Ops], spec: ModelSpec, ranks: int = 1, quantized: bool = False
) -> Decoder:
    """Return a decoder with random weights, `quantized` or not, or rank 0's part of one."""
    if ranks == 1:
        weights = random_weights(spec, torch.float32)
        return Decoder(spec, kept(weights) if quantized else weights, make_ops(spec), CPU)
    shard = Shard(0, ranks)
    part, group = shard.spec(spec), Group(shard, spec.vocab, CPU)
    group.backend, group.in_order = _Backend(), False  # as on a device
    weights = random_weights(replace(part, vocab=len(shard.part(spec.vocab))), torch.float32)
    return Decoder(part, weights, make_ops(part), CPU, group)


def pass_launches(model: Decoder, rows: Rows) -> int:
    """Return the launches of a forward pass of `rows`."""
    batch, cache = rows.batch(model), rows.cache(model)
    with counted() as counts:
        model.forward(batch, cache)
    return counts.total()


def per_layer(
    make_ops: Callable[[ModelSpec], Ops],
    ranks: int = 1,
    rows: Rows = FOUR,
    quantized: bool = False,
    **changes: Any,
) -> tuple[int, int]:
    """Return the launches of a decode pass per layer, and beside those of layers."""
    specs = [tiny_spec(**changes, layers=count) for count in (2, 3)]
    two, three = (pass_launches(decoder(make_ops, spec, ranks, quantized), rows) for spec in specs)
    return three - two, two - 2 * (three - two)


class Step(NamedTuple):
    """Launches of a decode step."""

    name: str
    layer: int
    beside: int
    greedy: int
    chance: int
    copies: int
    waits: int

    @property
    def whole(self) -> int:
        """Launches of a greedy step of `LAYERS` layers."""
        return LAYERS * self.layer + self.beside + self.greedy


def _selections(select: Select, vocab: int, rows: int) -> tuple[int, int]:
    """Return the launches of a greedy selection, and of one with top-p."""
    totals = []
    for rule in (GREEDY, CHANCE):
        logits = torch.randn(rows, vocab)
        with counted() as counts:
            select(logits, [rule] * rows)
        totals.append(counts.total())
    return totals[0], totals[1]


def replayed(
    name: str,
    make_ops: Callable[[ModelSpec], Ops],
    select: Select,
    ranks: int = 1,
    rows: Rows = FOUR,
    quantized: bool = False,
    **changes: Any,
) -> Step:
    """Count the launches of a step whose pass is a captured graph."""
    spec, cuda = tiny_spec(**changes), FakeGraphs()
    model = decoder(make_ops, spec, ranks, quantized)
    cache, count = on_device(rows.cache(model), cuda), len(rows.starts)
    limits = CaptureLimits(count, 2**30, seconds=3600, adapter_rank=RANK if rows.adapters else 0)
    graphs = with_graphs(model, cache, EngineLimits(max_model_len=64), limits, lambda: 2**30)
    batch = rows.batch(model)
    moves: Counter[str] = Counter()
    with _Moving(moves):
        logits = graphs.forward(batch, cache)
        select(logits, [GREEDY] * count)
    replays = sum(graph.replays for graph in cuda.captured)
    greedy, chance = _selections(select, spec.vocab, count)
    return Step(name, 0, replays, greedy, chance, moves["copy"], moves["wait"])


def step(
    name: str,
    make_ops: Callable[[ModelSpec], Ops],
    select: Select,
    ranks: int = 1,
    rows: Rows = FOUR,
    quantized: bool = False,
    **changes: Any,
) -> Step:
    """Count the launches of a step with these operations and this selection of tokens."""
    spec = tiny_spec(**changes)
    moves: Counter[str] = Counter()
    model = decoder(make_ops, spec, ranks, quantized)
    batch, cache = rows.batch(model), rows.cache(model)
    with _Moving(moves):
        logits = model.forward(batch, cache)
        select(logits, [GREEDY] * batch.size)
    layer, beside = per_layer(make_ops, ranks, rows, quantized, **changes)
    greedy, chance = _selections(select, spec.vocab, batch.size)
    return Step(name, layer, beside, greedy, chance, moves["copy"], moves["wait"])


def show(title: str, steps: Iterable[Step]) -> None:
    columns = "operations", "per layer", "beside layers", "greedy", "top-p", "copies", "waits"
    print(f"\n{title}:\n")
    print(f"| {' | '.join(columns)} | step of {LAYERS} layers |\n|{'---|' * (len(columns) + 1)}")
    for one in steps:
        print(f"| {' | '.join(map(str, one))} | {one.whole} |")


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from baton_engine.ops.accelerator import AcceleratorOps
    from baton_engine.ops.plain import PlainOps
    from baton_engine.sampling.sampler import select_on_host

    with torch.inference_mode():
        for title, changes in MODELS.items():
            steps = [
                step("plain", PlainOps, select_on_host, **changes),
                step("kernels", AcceleratorOps, select, **changes),
                replayed("kernels in a graph", AcceleratorOps, select, **changes),
            ]
            if "experts" not in changes:
                options = changes | {"quantized": True}
                steps += [
                    step("kernels, weights in Q8_0", AcceleratorOps, select, **options),
                    replayed("kernels in a graph, weights in Q8_0", AcceleratorOps, select, **options),
                ]
            steps += [
                step("kernels, rank 0 of two", AcceleratorOps, select, ranks=2, **changes),
                replayed("kernels in a graph, rank 0 of two", AcceleratorOps, select, ranks=2, **changes),
            ]
            show(title, steps)
        adapted = (
            step("plain, one adapter", PlainOps, select_on_host, rows=ONE_ADAPTER),
            step("plain, 16 adapters", PlainOps, select_on_host, rows=ADAPTERS),
            step("kernels, one adapter", AcceleratorOps, select, rows=ONE_ADAPTER),
            step("kernels, 16 adapters", AcceleratorOps, select, rows=ADAPTERS),
            replayed("kernels in a graph, one adapter", AcceleratorOps, select, rows=ONE_ADAPTER),
            replayed("kernels in a graph, 16 adapters", AcceleratorOps, select, rows=ADAPTERS),
        )
        show(f"a Llama, {len(ADAPTERS.starts)} rows with adapters", adapted)


if __name__ == "__main__":
    main()
