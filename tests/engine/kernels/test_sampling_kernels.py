"""The kernels select the tokens that the host selects, for equal logits."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from baton_api.sampling import SamplingParams
from baton_engine.ops.choice import selection
from baton_engine.ops.kernels import sampling as kernels
from baton_engine.ops.token_weights import GREEDY, TokenRule, scale, weigh
from baton_engine.sampling import sampler
from baton_engine.sampling.state import SamplingState, rule_of
from tests.engine.kernels.cases import DEVICE, guarded
from tests.seeds import seeds

VOCABS = (5, 128, 1024, 1500, 4100)


def rules_by_chance(chance: random.Random, count: int, vocab: int) -> list[TokenRule]:
    """Parameters of all kinds, with borders of numbers among them."""
    rules = []
    for _ in range(count):
        params = SamplingParams(
            temperature=chance.choice([0.0, 0.3, 1.0, 1.0, 2.5]),
            top_k=chance.choice([0, 0, 1, 2, 7, 40, vocab - 1, vocab, 10**6]),
            top_p=chance.choice([1.0, 1.0, 0.999, 0.9, 0.5, 1e-9]),
            min_p=chance.choice([0.0, 0.0, 1e-12, 0.05, 1.0]),
            seed=chance.randrange(2**64),
        )
        rule = rule_of(SamplingState(params, ()), vocab)
        rules.append(rule._replace(number=chance.choice([rule.number, rule.number, 0.0, 0.5, 1 - 2**-53])))
    return rules


def logits_by_chance(chance: random.Random, rows: int, vocab: int) -> Tensor:
    """Peaked, flat and rounded rows, some with forbidden tokens."""
    logits = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(chance.randrange(2**32)))
    for row in logits:
        row *= chance.choice([0.0, 0.01, 3.0, 12.0])
        match chance.randrange(4):
            case 0:
                row.copy_(row.bfloat16())
            case 1:
                row.copy_((row * 2).round() / 2)
            case 2:
                row[chance.sample(range(vocab), vocab // 2)] = -torch.inf
    return logits


def select(logits: Tensor, rules: list[TokenRule]) -> list[int | None]:
    """Return the tokens of the kernels; None for rows with bad logits."""
    return [None if token < 0 else token for token in kernels.select_on_device(logits, rules).tolist()]


def assert_same(logits: Tensor, rules: list[TokenRule]) -> None:
    expected = sampler.select_on_host(logits.clone(), rules)
    assert select(guarded(logits.to(DEVICE)), rules) == expected


@pytest.mark.parametrize("vocab", VOCABS)
def test_selected_tokens_are_those_of_the_host(vocab: int) -> None:
    chance = random.Random(vocab)
    assert_same(logits_by_chance(chance, 12, vocab), rules_by_chance(chance, 12, vocab))


@pytest.mark.parametrize("seed", seeds(16, quick=1))
def test_selected_tokens_by_chance(seed: int) -> None:
    chance = random.Random(f"rows {seed}")
    vocab, rows = chance.randint(1, 5000), chance.randint(1, 20)
    assert_same(logits_by_chance(chance, rows, vocab), rules_by_chance(chance, rows, vocab))


def test_weights_have_the_bits_of_the_host() -> None:
    chance = random.Random(3)
    logits = logits_by_chance(chance, 8, 1500)
    factors = [chance.choice([0.5, 1.0, 1.4, 1e4]) for _ in range(8)]
    rules = [TokenRule(float(np.float32(factor)), number=0.3) for factor in factors]
    expected = weigh(logits.clone(), logits.amax(-1), rules).values.flatten(1)[:, :1500]
    ours = logits.to(DEVICE, copy=True)
    kernels.select_on_device(ours, rules)
    assert torch.equal(ours.cpu(), expected)


@pytest.mark.parametrize("number", [0.0, 0.25, 0.5, 0.75, 1 - 2**-53])
@pytest.mark.parametrize("top_k", [0, 2, 2048])
def test_border_of_equal_tokens_selects_the_later(number: float, top_k: int) -> None:
    """2,048 equal logits: ties are kept whatever top_k is, and a border belongs to the token behind it."""
    rule = TokenRule(1.0, top_k=top_k, number=number)
    assert select(torch.zeros((1, 2048), device=DEVICE), [rule]) == [int(number * 2048)]


SAMPLED = TokenRule(1.0, top_p=0.9, number=0.7)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("rule", [GREEDY, SAMPLED, TokenRule(1.0, number=0.2)])
def test_bad_logits_end_only_their_row(value: float, rule: TokenRule) -> None:
    logits = logits_by_chance(random.Random(1), 3, 1500)
    logits[1] = value
    assert_same(logits, [rule, rule, SAMPLED])
    assert select(logits.to(DEVICE), [rule, rule, SAMPLED])[1] is None


def test_selected_row_with_one_nan_has_no_token() -> None:
    logits = logits_by_chance(random.Random(1), 2, 1500)
    logits[0, 1400] = torch.nan
    first, second = select(logits.to(DEVICE), [SAMPLED, SAMPLED])
    assert first is None
    assert second is not None


def test_selected_token_is_independent_of_the_batch() -> None:
    chance = random.Random(5)
    logits, rules = logits_by_chance(chance, 9, 1500), rules_by_chance(chance, 9, 1500)
    together = select(logits.to(DEVICE, copy=True), rules)
    separate = [
        select(row[None].to(DEVICE, copy=True), [rule]) for row, rule in zip(logits, rules, strict=True)
    ]
    assert together == [token for (token,) in separate]


def test_rows_without_draws_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Invalid number of rules: 1\. Expected 2"):
        select(torch.zeros((2, 9), device=DEVICE), [GREEDY])


@pytest.mark.slow
def test_highest_weights_of_a_large_vocabulary_are_exact() -> None:
    """The sum of equal weights is the highest that there is: 2**52."""
    vocab = 2**18
    assert vocab * 2 ** scale(vocab) == 2**52
    rules = [TokenRule(1.0, number=number) for number in (0.5, 1 - 2**-53)]
    assert select(torch.zeros((2, vocab), device=DEVICE), rules) == [vocab // 2, vocab - 1]


def test_sampler_with_kernels_gives_the_choices_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Penalties, biases, minimum lengths, masks and logprobs in one batch."""
    logits = logits_by_chance(random.Random(8), 6, 1500)
    base = SamplingParams(temperature=0.8, top_p=0.95, seed=4)
    states = [
        SamplingState(params, (3, 9, 9, 700))
        for params in (
            base,
            replace(base, repetition_penalty=1.3, presence_penalty=0.5, logprobs=3),
            replace(base, frequency_penalty=0.7, logit_bias=((3, 2.5), (1499, -4.0))),
            replace(base, min_tokens=6, stop_ids=frozenset({1, 9, 2000})),
            replace(base, temperature=0.0, repetition_penalty=0.7),
            base,
        )
    ]
    for state in states:
        for token in (3, 3, 12, 1499):
            state.push(token)
    mask = np.zeros(-(-1500 // 32), dtype=np.int32)
    mask[[2, 40]] = 0x00F0F0F0
    masks = [None, mask, None, None, mask, mask]
    expected = sampler.sample(logits.clone(), states, masks)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert sampler.sample(logits.to(DEVICE, copy=True), states, masks) == expected


@pytest.mark.parametrize(
    ("device_type", "environment", "expected"),
    [
        ("cuda", {}, kernels.select_on_device),
        ("cpu", {}, None),
        ("cuda", {"BATON_KERNELS": "off"}, None),
        ("cpu", {"TRITON_INTERPRET": "1"}, kernels.select_on_device),
    ],
)
def test_kernels_select_on_accelerators_only(
    device_type: str, environment: dict[str, str], expected: object
) -> None:
    assert selection(device_type, environment) is expected
