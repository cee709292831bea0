"""
Launches of a decode step, counted: calls of torch that compute, and kernels under Triton's interpreter.

    python -m benchmarks.launches

A step is the input of a pass, the pass, and the selection of tokens. Copies to the device and waits for it
are counted apart. No device is needed: the same Python code makes the same calls there. A replayed graph is
one launch. Of two ranks, rank 0 is counted. An operation of the group is a launch, and the gather of logits
two. Numbers are in float32: a sum of bfloat16 over ranks has two launches more.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
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
from baton_engine.model.shards import Shard
from baton_engine.ops import Ops
from baton_engine.ops.token_weights import GREEDY, TokenRule
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.spec import ExpertSpec, ModelSpec
from tests.engine.fake_graphs import FakeGraphs
from tests.engine.fake_streams import on_device
from tests.engine.random_weights import random_weights, tiny_spec

CPU = torch.device("cpu")
STARTS = (3, 20, 33, 40)
"""Contexts of the rows: of several lengths, so that plain operations do not compute them as one."""

LAYERS = 32
"""Of the model whose whole step is reported."""

WAITS = ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "nonzero")
EXPERTS = ExpertSpec(count=8, chosen=4, intermediate=32, normalized=True)
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


def rows_of(starts: Sequence[int]) -> list[BatchRow]:
    """Return rows of one token each, with blocks of their own."""
    return [BatchRow([5], start, range(1 + 3 * row, 4 + 3 * row), 1) for row, start in enumerate(starts)]


class _Backend:
    """Operations of a group whose other ranks have the same values."""

    def _allgather_base(self, output: Tensor, part: Tensor) -> _Backend:
        torch.cat([part] * (len(output) // len(part)), out=output)
        return self

    def gather(self, outputs: list[list[Tensor]], parts: list[Tensor]) -> _Backend:
        for output in outputs[0]:
            torch.cat(parts, out=output)
        return self

    def wait(self) -> None:
        return


def decoder(make_ops: Callable[[ModelSpec], Ops], spec: ModelSpec, ranks: int = 1) -> Decoder:
    """Return a decoder with random weights, or rank 0's part of one."""
    if ranks == 1:
        return Decoder(spec, random_weights(spec, torch.float32), make_ops(spec), CPU)
    shard = Shard(0, ranks)
    part, group = shard.spec(spec), Group(shard, spec.vocab, CPU)
    group.backend = _Backend()
    weights = random_weights(replace(part, vocab=len(shard.part(spec.vocab))), torch.float32)
    return Decoder(part, weights, make_ops(part), CPU, group)


def pass_launches(model: Decoder) -> int:
    """Return the launches of a forward pass of `STARTS`."""
    spec = model.spec
    batch, cache = Batch(rows_of(STARTS), BLOCK_SIZE, CPU), KVCache(spec, 16, torch.float32, CPU)
    with counted() as counts:
        model.forward(batch, cache)
    return counts.total()


def per_layer(make_ops: Callable[[ModelSpec], Ops], ranks: int = 1, **changes: Any) -> tuple[int, int]:
    """Return the launches of a decode pass per layer, and beside those of layers."""
    specs = [tiny_spec(**changes, layers=count) for count in (2, 3)]
    two, three = (pass_launches(decoder(make_ops, spec, ranks)) for spec in specs)
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


def _selections(select: Select, vocab: int) -> tuple[int, int]:
    """Return the launches of a greedy selection, and of one with top-p."""
    totals = []
    for rule in (GREEDY, CHANCE):
        logits = torch.randn(len(STARTS), vocab)
        with counted() as counts:
            select(logits, [rule] * len(STARTS))
        totals.append(counts.total())
    return totals[0], totals[1]


def replayed(
    name: str, make_ops: Callable[[ModelSpec], Ops], select: Select, ranks: int = 1, **changes: Any
) -> Step:
    """Count the launches of a step whose pass is a captured graph."""
    spec, cuda = tiny_spec(**changes), FakeGraphs()
    model = decoder(make_ops, spec, ranks)
    cache = on_device(KVCache(model.spec, 16, torch.float32, CPU), cuda)
    limits = CaptureLimits(len(STARTS), memory=2**30, seconds=3600)
    graphs = with_graphs(model, cache, EngineLimits(max_model_len=64), limits, lambda: 2**30)
    batch = Batch(rows_of(STARTS), BLOCK_SIZE, CPU)
    moves: Counter[str] = Counter()
    with _Moving(moves):
        logits = graphs.forward(batch, cache)
        select(logits, [GREEDY] * len(STARTS))
    replays = sum(graph.replays for graph in cuda.captured)
    greedy, chance = _selections(select, spec.vocab)
    return Step(name, 0, replays, greedy, chance, moves["copy"], moves["wait"])


def step(
    name: str, make_ops: Callable[[ModelSpec], Ops], select: Select, ranks: int = 1, **changes: Any
) -> Step:
    """Count the launches of a step with these operations and this selection of tokens."""
    spec = tiny_spec(**changes)
    moves: Counter[str] = Counter()
    model = decoder(make_ops, spec, ranks)
    cache = KVCache(model.spec, 16, torch.float32, CPU)
    with _Moving(moves):
        logits = model.forward(Batch(rows_of(STARTS), BLOCK_SIZE, CPU), cache)
        select(logits, [GREEDY] * len(STARTS))
    layer, beside = per_layer(make_ops, ranks, **changes)
    greedy, chance = _selections(select, spec.vocab)
    return Step(name, layer, beside, greedy, chance, moves["copy"], moves["wait"])


def main() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from baton_engine.ops.accelerator import AcceleratorOps
    from baton_engine.ops.plain import PlainOps
    from baton_engine.sampling.sampler import select_on_host

    columns = "operations", "per layer", "beside layers", "greedy", "top-p", "copies", "waits"
    models: tuple[dict[str, Any], ...] = ({}, {"experts": EXPERTS})
    for changes in models:
        print(f"\na Llama{f' with {EXPERTS.count} experts, {EXPERTS.chosen} chosen' if changes else ''}:\n")
        print(f"| {' | '.join(columns)} | step of {LAYERS} layers |\n|{'---|' * (len(columns) + 1)}")
        with torch.inference_mode():
            for one in (
                step("plain", PlainOps, select_on_host, **changes),
                step("kernels", AcceleratorOps, select, **changes),
                replayed("kernels in a graph", AcceleratorOps, select, **changes),
                step("kernels, rank 0 of two", AcceleratorOps, select, ranks=2, **changes),
                replayed("kernels in a graph, rank 0 of two", AcceleratorOps, select, ranks=2, **changes),
            ):
                print(f"| {' | '.join(map(str, one))} | {one.whole} |")


if __name__ == "__main__":
    main()
