"""Experts: which ones compute a token, with which weights, and that other tokens do not matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from baton_engine.model.experts import Experts, choose
from baton_engine.ops.plain import PlainExpertLinear, PlainLinear, PlainOps
from baton_engine.spec import ExpertSpec
from tests.engine.random_weights import tiny_spec

HIDDEN, INNER, COUNT = 12, 7, 5

LOGITS = [[1.0, 3.0, -2.0, 2.0], [0.0, -1.0, 4.0, -3.0]]

CHOICES: dict[str, tuple[dict[str, Any], list[list[int]], list[list[float]]]] = {
    "softmax over all": ({"chosen": 2}, [[1, 3], [2, 0]], [[0.6623, 0.2436], [0.9747, 0.0179]]),
    "normalized": (
        {"chosen": 2, "normalized": True},
        [[1, 3], [2, 0]],
        [[0.7311, 0.2689], [0.9820, 0.0180]],
    ),
    "sigmoid": ({"chosen": 1, "scoring": "sigmoid"}, [[1], [2]], [[0.9526], [0.9820]]),
}


@pytest.mark.parametrize("name", CHOICES)
def test_choose_takes_the_highest_scores(name: str) -> None:
    options, expected, shares = CHOICES[name]
    chosen, weights = choose(ExpertSpec(count=4, intermediate=INNER, **options), torch.tensor(LOGITS))
    assert chosen.tolist() == expected
    torch.testing.assert_close(weights, torch.tensor(shares), rtol=0, atol=1e-4)


class CountingLinear:
    """Notes each use of a weight."""

    def __init__(self, weight: Tensor) -> None:
        self.linear = PlainLinear(weight, None)
        self.rows: list[int] = []

    def __call__(self, x: Tensor) -> Tensor:
        self.rows.append(len(x))
        return self.linear(x)


def experts_of(spec: ExpertSpec) -> tuple[Experts, list[CountingLinear], list[CountingLinear]]:
    """Experts, and their products of gate and up, and of down."""
    generator = torch.Generator().manual_seed(5)
    gates = [CountingLinear(torch.randn(2 * INNER, HIDDEN, generator=generator)) for _ in range(COUNT)]
    downs = [CountingLinear(torch.randn(HIDDEN, INNER, generator=generator)) for _ in range(COUNT)]
    router = torch.randn(COUNT, HIDDEN, generator=generator)
    experts = Experts(
        spec=spec,
        router=router,
        router_bias=None,
        correction=None,
        gate_up=PlainExpertLinear(gates, 2 * INNER),
        down=PlainExpertLinear(downs, HIDDEN),
        ops=PlainOps(tiny_spec()),
    )
    return experts, gates, downs


def test_experts_sum_the_weighted_results_of_chosen_ones() -> None:
    spec = ExpertSpec(count=COUNT, chosen=3, intermediate=INNER, normalized=True)
    experts, gates, downs = experts_of(spec)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(6))
    chosen, shares = choose(spec, functional.linear(x, experts.router))
    for token, row in enumerate(experts(x)):
        expected = torch.zeros(HIDDEN)
        for expert, share in zip(chosen[token].tolist(), shares[token], strict=True):
            hidden = experts.ops.gated(gates[expert](x[token : token + 1]))
            expected += share * downs[expert](hidden)[0]
        torch.testing.assert_close(row, expected, rtol=1e-5, atol=1e-5)


def test_experts_use_weights_of_chosen_experts_once() -> None:
    spec = ExpertSpec(count=COUNT, chosen=2, intermediate=INNER)
    experts, gates, _ = experts_of(spec)
    x = torch.randn(1, HIDDEN, generator=torch.Generator().manual_seed(7)).expand(4, HIDDEN)
    experts(x)
    chosen, _ = choose(spec, functional.linear(x[:1], experts.router))
    used = [number for number, gate in enumerate(gates) if gate.rows]
    assert used == sorted(chosen[0].tolist())
    assert all(gate.rows == [4] for gate in gates if gate.rows)
