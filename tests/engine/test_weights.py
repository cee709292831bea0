"""Weights of tokens: exact sums, the right probabilities, and the same bits in torch and the library."""

from __future__ import annotations

import ctypes
import os
import random

import numpy as np
import pytest
import torch
from torch import Tensor

from baton_engine.ops import token_weights
from baton_engine.ops.native import library
from baton_engine.ops.token_weights import BLOCK, TokenRule, TokenWeights, scale, weigh

VOCABS = (1, 7, BLOCK, 1000, 40 * BLOCK, 2**17)


def rows(vocab: int, spread: float) -> tuple[Tensor, list[TokenRule]]:
    chance = random.Random(f"{vocab} {spread}")
    logits = torch.randn((5, vocab), generator=torch.Generator().manual_seed(vocab)) * spread
    logits[1, chance.sample(range(vocab), vocab // 2)] = -torch.inf
    logits[1, 0] = 0.0
    logits[2] = logits[2].bfloat16()
    factors = [chance.choice([0.3, 1.0, 1.4426950408889634, 7.0, 144269.0]) for _ in range(5)]
    return logits, [TokenRule(float(np.float32(factor))) for factor in factors]


def weighed(logits: Tensor, rules: list[TokenRule]) -> TokenWeights:
    return weigh(logits.clone(), logits.amax(-1), rules)


@pytest.fixture(params=["torch", "library"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The weights are computed by torch, or by the native library."""
    kernels: ctypes.CDLL | None = None
    if request.param == "library":
        try:
            kernels = library.load(os.environ)
        except library.Unavailable as reason:
            pytest.skip(str(reason))
    monkeypatch.setattr(library, "loaded", lambda: kernels)
    return str(request.param)


@pytest.mark.parametrize("spread", [0.0, 0.01, 4.0, 60.0])
@pytest.mark.parametrize("vocab", VOCABS)
def test_weights_are_exact_integers(vocab: int, spread: float, way: str) -> None:
    """Sums and maxima are those of Python's integers, and weights those of fp64 up to rounding."""
    logits, rules = rows(vocab, spread)
    result = weighed(logits, rules)
    for row, rule in enumerate(rules):
        values = result.values[row].flatten().double()
        assert torch.equal(values, values.round())
        assert [int(number) for number in result.sums[row]] == [
            sum(int(number) for number in block) for block in values.view(-1, BLOCK).tolist()
        ]
        assert result.maxima[row].tolist() == values.view(-1, BLOCK).amax(-1).tolist()
        assert values.max() == 2.0 ** scale(vocab)
        assert not values[vocab:].any()
        exponents = (logits[row].double() - logits[row].max()) * rule.factor
        wanted = torch.exp2(exponents + scale(vocab))
        assert ((values[:vocab] - wanted).abs() <= wanted * 2e-5 + 0.51).all()
    assert result.sums.sum(1).max() <= 2.0**52


@pytest.mark.parametrize("vocab", VOCABS)
def test_weights_of_library_have_the_bits_of_torch(vocab: int) -> None:
    try:
        kernels = library.load(os.environ)
    except library.Unavailable as reason:
        pytest.skip(str(reason))
    for spread in (0.01, 1.0, 8.0, 60.0):
        logits, rules = rows(vocab, spread)
        factors = torch.tensor([rule.factor for rule in rules])
        expected = token_weights.by_torch(
            logits.clone(), logits.amax(-1), factors, token_weights.ROUNDING + scale(vocab)
        )
        assert kernels is library.loaded()
        assert torch.equal(weighed(logits, rules).values.flatten(1)[:, :vocab], expected)


def test_weights_of_small_steps_never_exceed_the_highest() -> None:
    """Logits right below the highest one: rounding must not make their weights higher."""
    logits = torch.zeros((1, 4096))
    logits[0, 1:] = -torch.logspace(-12, 0, 4095)
    result = weighed(logits, [TokenRule(1.0)])
    assert result.maxima.max() == 2.0 ** scale(4096)
