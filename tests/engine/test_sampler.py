"""Drawing tokens: the right distribution, and the same token whatever else is in the batch."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from baton_api.messages import TokenChoice
from baton_api.sampling import SamplingParams
from baton_engine.ops.token_weights import BLOCK
from baton_engine.sampling import sampler
from baton_engine.sampling.state import SamplingState, uniform

GREEDY = SamplingParams(temperature=0.0)
PLAIN = SamplingParams(temperature=1.0)


def make_logits(rows: int, vocab: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * spread


def choices(logits: Tensor, states: list[SamplingState]) -> list[TokenChoice]:
    drawn = [choice for choice in sampler.sample(logits.clone(), states) if choice is not None]
    assert len(drawn) == len(states)
    return drawn


def tokens(logits: Tensor, states: list[SamplingState]) -> list[int]:
    return [choice.token for choice in choices(logits, states)]


def one(logits: list[float], params: SamplingParams, prompt: tuple[int, ...] = (), *drawn: int) -> int:
    state = SamplingState(params, prompt)
    for token in drawn:
        state.push(token)
    return tokens(torch.tensor([logits]), [state])[0]


def expected(logits: Tensor, params: SamplingParams) -> dict[int, float]:
    """Return a row's candidates and probabilities, sorted, the slow and obvious way."""
    scaled = logits.double() / params.temperature
    likely = sorted(
        ((p, token) for token, p in enumerate(scaled.softmax(-1).tolist())),
        key=lambda pair: (-pair[0], pair[1]),
    )
    likely = [pair for pair in likely if pair[0] >= params.min_p * likely[0][0]]
    if params.top_k:
        likely = likely[: params.top_k]
    mass = sum(p for p, _ in likely)
    kept: list[tuple[float, int]] = []
    for pair in likely:
        kept.append(pair)
        if sum(p for p, _ in kept) >= params.top_p * mass:
            break
    mass = sum(p for p, _ in kept)
    return {token: p / mass for p, token in kept}


# --- Greedy ---


@pytest.mark.parametrize("vocab", [5, 128, 384, 1000])
def test_greedy_takes_the_highest_logit(vocab: int) -> None:
    logits = make_logits(9, vocab)
    assert tokens(logits, [SamplingState(GREEDY, ())] * 9) == logits.argmax(-1).tolist()


def test_of_equal_logits_greedy_takes_the_first() -> None:
    logits = torch.zeros((1, 512))
    logits[0, [130, 140, 300]] = 4.0
    assert tokens(logits, [SamplingState(GREEDY, ())]) == [130]


@pytest.mark.parametrize(
    "params",
    [
        replace(PLAIN, top_p=0.0),
        replace(PLAIN, top_k=1),
        replace(PLAIN, temperature=1e-6),
        replace(PLAIN, temperature=1e-4),
        replace(PLAIN, min_p=1.0),
    ],
)
def test_settings_that_leave_one_token_are_greedy(params: SamplingParams) -> None:
    logits = make_logits(40, 256)
    states = [SamplingState(replace(params, seed=seed), ()) for seed in range(40)]
    assert tokens(logits, states) == logits.argmax(-1).tolist()


# --- What changes the logits ---

FLAT = [1.0, 1.0, 1.0, 0.9]
REPETITION = replace(GREEDY, repetition_penalty=1.5)
BOTH = replace(GREEDY, repetition_penalty=1.1, presence_penalty=1.0)


def frequency(penalty: float) -> SamplingParams:
    return replace(GREEDY, frequency_penalty=penalty)


def presence(penalty: float) -> SamplingParams:
    return replace(GREEDY, presence_penalty=penalty)


def stops(*tokens: int) -> SamplingParams:
    return replace(GREEDY, min_tokens=2, stop_ids=frozenset(tokens))


@pytest.mark.parametrize(
    ("name", "logits", "params", "prompt", "output", "token"),
    [
        ("frequency counts each occurrence", [1.0, 0.8, 0.0], frequency(0.15), (), (0, 0), 1),
        ("frequency of one occurrence", [1.0, 0.8, 0.0], frequency(0.15), (), (0,), 0),
        ("frequency ignores the prompt", [1.0, 0.8], frequency(2.0), (0, 0), (), 0),
        ("presence counts once", [1.0, 0.8, 0.0], presence(0.15), (), (0, 0, 0), 0),
        ("presence", [1.0, 0.8, 0.0], presence(0.3), (), (0,), 1),
        ("presence ignores the prompt", [1.0, 0.8], presence(2.0), (0,), (), 0),
        ("negative presence draws it again", [1.0, 0.8], presence(-0.5), (), (1,), 1),
        ("repetition divides what is positive", [1.0, 0.8], REPETITION, (), (0,), 1),
        ("repetition multiplies what is not", [-1.0, -1.2], REPETITION, (), (0,), 1),
        ("repetition sees the prompt", [1.0, 0.8], REPETITION, (0,), (), 1),
        ("repetition of two", [1.0, 0.6], replace(GREEDY, repetition_penalty=2.0), (), (0,), 1),
        ("repetition sees the prompt, presence does not", [1.0, 0.8], BOTH, (0,), (), 0),
        ("bias", FLAT, replace(GREEDY, logit_bias=((3, 1.0),)), (), (), 3),
        ("bias of a whole number", FLAT, replace(GREEDY, logit_bias=((3, 5),)), (), (), 3),
        ("bias bans", FLAT, replace(GREEDY, logit_bias=((0, -100.0), (1, -100.0))), (), (), 2),
        ("min_tokens", FLAT, stops(0), (), (9,), 1),
        ("min_tokens reached", FLAT, stops(0), (), (9, 9), 0),
        ("stop ids beyond the vocabulary", FLAT, stops(0, 70), (), (), 1),
        ("no stop id in the vocabulary of ten", FLAT, stops(10, 70), (), (), 0),
    ],
)  # fmt: skip
def test_logits_are_changed(
    name: str,
    logits: list[float],
    params: SamplingParams,
    prompt: tuple[int, ...],
    output: tuple[int, ...],
    token: int,
) -> None:
    padded = logits + [-50.0] * (10 - len(logits))
    assert one(padded, params, prompt, *output) == token, name


def test_penalties_follow_a_long_output() -> None:
    """The counts grow past their first size, and each of them is right."""
    params = replace(GREEDY, frequency_penalty=1.0, repetition_penalty=1.1)
    state, chance = SamplingState(params, (1, 2, 3)), random.Random(1)
    output: list[int] = []
    for _ in range(500):
        token = chance.randrange(300)
        state.push(token)
        output.append(token)
    logits = make_logits(1, 300)
    wanted = logits[0].clone()
    for token in {1, 2, 3, *output}:
        wanted[token] = wanted[token] / 1.1 if wanted[token] > 0 else wanted[token] * 1.1
    for token in output:
        wanted[token] -= 1.0
    assert tokens(logits, [state]) == [int(wanted.argmax())]


@pytest.mark.parametrize("params", [GREEDY, PLAIN, replace(PLAIN, top_k=3), replace(GREEDY, logprobs=0)])
def test_sampler_masked_row_gives_an_allowed_token(params: SamplingParams) -> None:
    """Rows without a mask give what they give without any, and logprobs are those of the unmasked logits."""
    logits, allowed = make_logits(3, 64), [3, 17, 60]
    bits = np.zeros(64, dtype=np.uint8)
    bits[allowed] = 1
    mask = np.packbits(bits, bitorder="little").view(np.int32)
    states = [SamplingState(replace(params, seed=seed), ()) for seed in range(3)]
    first, masked, last = sampler.sample(logits.clone(), states, [None, mask, None])
    free = choices(logits, states)
    assert [first, last] == [free[0], free[2]]
    assert masked is not None and masked.token in allowed
    if params.temperature == 0.0:
        assert masked.token == max(allowed, key=logits[1].tolist().__getitem__)
    if params.logprobs is not None:
        assert masked.logprob == pytest.approx(logits[1].log_softmax(-1)[masked.token].item(), abs=1e-5)


def test_sampler_row_without_a_draw_raises() -> None:
    with pytest.raises(ValueError, match="Expected 2, one for each row"):
        sampler.sample(make_logits(2, 50), [SamplingState(PLAIN, ())])


@pytest.mark.parametrize(
    "params",
    [
        replace(PLAIN, temperature=0.2),
        replace(PLAIN, top_k=4),
        BOTH,
        stops(1),
        replace(GREEDY, logit_bias=((3, 1.0),)),
    ],
)
def test_sampler_default_device_is_another_same_token(params: SamplingParams) -> None:
    """The sampler computes where the logits are, whichever device the process creates tensors on."""
    logits, state = make_logits(1, 300), SamplingState(params, (0, 5))
    expected = tokens(logits, [state])
    with torch.device("meta"):
        assert tokens(logits, [state]) == expected


# --- Chance ---

PARAMS = {
    "all": PLAIN,
    "temperature": replace(PLAIN, temperature=0.6),
    "top_k": replace(PLAIN, top_k=5),
    "top_p": replace(PLAIN, top_p=0.8),
    "top_p nearly all": replace(PLAIN, top_p=0.995),
    "min_p": replace(PLAIN, min_p=0.1),
    "top_k then top_p": replace(PLAIN, top_k=6, top_p=0.7),
    "min_p then top_p": replace(PLAIN, min_p=0.05, top_p=0.9),
    "all of them": replace(PLAIN, temperature=1.3, top_k=30, top_p=0.9, min_p=0.02),
    "top_k of more than there are": replace(PLAIN, top_k=10_000),
}


@pytest.mark.parametrize("spread", [2.0, pytest.param(0.05, marks=pytest.mark.slow)])
@pytest.mark.parametrize("vocab", [40, 1000])
@pytest.mark.parametrize("name", PARAMS)
def test_tokens_are_drawn_with_their_probability(name: str, vocab: int, spread: float) -> None:
    count = 3000
    logits = make_logits(1, vocab, spread=spread)
    wanted = expected(logits[0], PARAMS[name])
    states = [SamplingState(replace(PARAMS[name], seed=seed), (0,) * 7) for seed in range(count)]
    drawn = np.bincount(tokens(logits.expand(count, -1), states), minlength=vocab)
    assert set(np.flatnonzero(drawn).tolist()) <= set(wanted)
    for token, probability in wanted.items():
        deviation = math.sqrt(count * probability * (1 - probability)) + 1
        assert abs(drawn[token] - count * probability) < 5 * deviation, token


def drawn_by_torch(logits: Tensor, params: SamplingParams, position: int) -> int:
    """The token of one row: everything sorted, cut, and looked up in double precision."""
    weights, order = (logits.double() / params.temperature).softmax(-1).sort(descending=True)
    weights[weights < params.min_p * weights[0]] = 0.0
    if params.top_k:
        weights[params.top_k :] = 0.0
    before = weights.cumsum(-1) - weights
    weights[before >= params.top_p * weights.sum()] = 0.0
    kept = torch.zeros_like(weights).scatter(0, order, weights)
    ends = kept.cumsum(-1)
    number = uniform(params.seed, position) * float(ends[-1])
    return int(torch.searchsorted(ends, torch.tensor(number, dtype=torch.float64), right=True))


@pytest.mark.parametrize("spread", [0.5, 3.0])
@pytest.mark.parametrize("vocab", [1000, 80 * BLOCK, 600 * BLOCK])
@pytest.mark.parametrize("top_k", [0, 2, 63, 64, 65, 100, 511, 513, 5000, 10**6])
def test_sampler_cuts_draw_as_sorted_torch_does(top_k: int, vocab: int, spread: float) -> None:
    """top_p is a share of what top_k and min_p leave, however many tokens these are."""
    logits = make_logits(1, vocab, seed=top_k, spread=spread)
    chance = random.Random(f"{top_k} {vocab} {spread}")
    for seed in range(15):
        params = replace(
            PLAIN,
            seed=seed,
            top_k=top_k,
            top_p=chance.choice([0.1, 0.5, 0.9, 0.99]),
            min_p=chance.choice([0.0, 0.0, 0.02]),
            temperature=chance.choice([0.7, 1.0, 1.5]),
        )
        assert tokens(logits, [SamplingState(params, (0,))]) == [drawn_by_torch(logits[0], params, 1)], params


def test_sampler_top_p_beyond_the_likeliest_block_is_exact() -> None:
    """Many block maxima, nearly equal logits: the nucleus has thousands of tokens."""
    vocab = 600 * BLOCK
    logits = make_logits(1, vocab, spread=0.01)
    params = replace(PLAIN, top_p=0.5)
    wanted = expected_set(logits[0], 0.5)
    drawn = tokens(
        logits.expand(50, -1), [SamplingState(replace(params, seed=seed), ()) for seed in range(50)]
    )
    assert set(drawn) <= wanted
    assert len(set(drawn)) > 40


def expected_set(logits: Tensor, top_p: float) -> set[int]:
    likely, ids = logits.double().softmax(-1).sort(descending=True)
    count = int((likely.cumsum(-1) < top_p + 1e-5).sum()) + 1
    return set(ids[:count].tolist())


@pytest.mark.parametrize("name", PARAMS)
def test_sampler_row_is_independent_of_the_batch(name: str) -> None:
    """Over a vocabulary that makes torch share the work among threads, ties included."""
    vocab = 40_000
    logits = (make_logits(32, vocab) * 4).round() / 4
    mixed = [*PARAMS.values(), GREEDY]
    states = [SamplingState(replace(mixed[row % len(mixed)], seed=row), (0,) * row) for row in range(32)]
    states[5] = SamplingState(replace(PARAMS[name], seed=99), (1, 2))
    together = tokens(logits, states)
    assert together[5] == tokens(logits[5:6], [states[5]])[0]
    order = list(range(32))
    random.Random(3).shuffle(order)
    shuffled = tokens(logits[order], [states[row] for row in order])
    assert [together[row] for row in order] == shuffled


def test_sampler_token_depends_only_on_seed_and_position() -> None:
    logits = make_logits(1, 1000)
    fresh, used = (
        SamplingState(replace(PLAIN, seed=4), (1, 2, 3)),
        SamplingState(replace(PLAIN, seed=4), (1,)),
    )
    used.push(8)
    used.push(9)
    assert tokens(logits, [fresh]) == tokens(logits, [used])


def test_uniform_is_uniform_and_independent_over_seeds() -> None:
    for numbers in (
        [uniform(seed, 11) for seed in range(20_000)],
        [uniform(11, position) for position in range(20_000)],
        [uniform(2**64 - 1 - step, step) for step in range(20_000)],
    ):
        values = np.array(numbers)
        assert values.min() >= 0.0
        assert values.max() < 1.0
        counts = np.histogram(values, bins=50, range=(0, 1))[0]
        assert abs(counts - 400).max() < 5 * math.sqrt(400)
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.04
    same = [uniform(seed, 3) == uniform(seed + 1, 2) for seed in range(1000)]
    assert not any(same)


MASK_64 = 2**64 - 1
NEVER = -math.inf
LAST = 1 - 2**-53
"""The greatest number that `uniform` gives."""


def seed_of(number: float) -> int:
    """The seed for which `uniform` gives this multiple of 2**-53 at position 0: its steps backwards."""
    value = int(number * 2**53) << 11
    for _ in range(2):
        for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
            value ^= (value >> shift) ^ (value >> 2 * shift)
            value = value * pow(factor, -1, 2**64) & MASK_64
    return (value - 0x9E3779B97F4A7C15) & MASK_64


@pytest.mark.parametrize(
    ("name", "logits", "params", "number", "token"),
    [
        ("the least number skips what is forbidden", [NEVER, 0.0, 0.0], PLAIN, 0.0, 1),
        ("the least number skips a forbidden block", [NEVER] * BLOCK + [0.0], PLAIN, 0.0, BLOCK),
        ("a border belongs to the token behind it", [0.0, 0.0], PLAIN, 0.5, 1),
        ("a border of blocks likewise", [0.0] * 2 * BLOCK, PLAIN, 0.5, BLOCK),
        ("a border of cut tokens likewise", [0.0, 0.0, -9.0], replace(PLAIN, top_k=2), 0.5, 1),
        ("the greatest number gives the last token", [0.0] * BLOCK, PLAIN, LAST, BLOCK - 1),
        ("many unlikely tokens add up", [0.0] + [-18.0] * (BLOCK - 1), PLAIN, LAST, BLOCK - 1),
    ],
)  # fmt: skip
def test_sampler_number_at_a_border_gives_its_token(
    name: str, logits: list[float], params: SamplingParams, number: float, token: int
) -> None:
    """A token has the numbers from the weights before it up to, and without, those with its own."""
    seed = seed_of(number)
    assert uniform(seed, 0) == number
    assert one(logits, replace(params, seed=seed)) == token, name


# --- Logprobs ---


def test_logprobs_are_those_of_the_unchanged_logits() -> None:
    logits = make_logits(3, 200)
    params = replace(
        PLAIN, logprobs=4, temperature=0.3, top_k=3, presence_penalty=1.5, logit_bias=((7, 3.0),), seed=5
    )
    wanted = logits.log_softmax(-1)
    state = SamplingState(params, (1,))
    state.push(int(logits[0].argmax()))
    for row, choice in enumerate(
        choices(logits, [state, SamplingState(params, ()), SamplingState(params, ())])
    ):
        assert choice.logprob == pytest.approx(wanted[row, choice.token].item(), abs=1e-5)
        values, ids = wanted[row].topk(4)
        assert [token for token, _ in choice.top] == ids.tolist()
        assert [logprob for _, logprob in choice.top] == pytest.approx(values.tolist(), abs=1e-5)


def test_logprobs_come_only_to_rows_that_ask() -> None:
    logits = make_logits(3, 200)
    plain, bare, full = choices(
        logits,
        [
            SamplingState(GREEDY, ()),
            SamplingState(replace(GREEDY, logprobs=0), ()),
            SamplingState(replace(GREEDY, logprobs=20), ()),
        ],
    )
    assert (plain.logprob, plain.top) == (None, [])
    assert bare.logprob is not None
    assert bare.top == []
    assert len(full.top) == 20
    assert full.top[0] == (full.token, full.logprob)


def test_sampler_logprob_ids_replace_the_likeliest() -> None:
    logits = make_logits(2, 200)
    wanted = logits.log_softmax(-1)
    params = replace(GREEDY, logprobs=3, logprob_ids=(7, 150, 3))
    named, likeliest = choices(
        logits, [SamplingState(params, ()), SamplingState(replace(GREEDY, logprobs=3), ())]
    )
    assert [token for token, _ in named.top] == [7, 150, 3]
    expected = [wanted[0, token].item() for token in (7, 150, 3)]
    assert [logprob for _, logprob in named.top] == pytest.approx(expected, abs=1e-5)
    assert likeliest.top[0] == (likeliest.token, likeliest.logprob) and len(likeliest.top) == 3


def test_sampler_small_vocabulary_is_reported_whole() -> None:
    (choice,) = choices(make_logits(1, 6), [SamplingState(replace(GREEDY, logprobs=20), ())])
    assert len(choice.top) == 6


# --- Broken rows ---


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("params", [GREEDY, PLAIN, replace(PLAIN, top_p=0.5), replace(GREEDY, logprobs=2)])
@pytest.mark.parametrize("vocab", [50, 256])
def test_sampler_broken_logit_affects_only_its_row(value: float, params: SamplingParams, vocab: int) -> None:
    logits = make_logits(3, vocab)
    whole = sampler.sample(logits.clone(), [SamplingState(params, ())] * 3)
    logits[1, 17] = value
    drawn = sampler.sample(logits.clone(), [SamplingState(params, ())] * 3)
    assert drawn[1] is None
    assert [drawn[0], drawn[2]] == [whole[0], whole[2]]


def test_sampler_fully_suppressed_row_gives_none() -> None:
    params = replace(PLAIN, min_tokens=1, stop_ids=frozenset(range(10)))
    assert sampler.sample(make_logits(1, 10), [SamplingState(params, ())]) == [None]
