"""The choice of a pair: a table of cases, then laws, compared with a plain formulation."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product

import pytest

from baton_router.scheduling import pair_selection
from baton_router.scheduling.pair_selection import (
    CLOSE_S,
    LOCAL_PREFILL,
    PairOption,
    PlainOption,
    PromptWork,
    WorkerGroup,
    choose_option,
    congestion,
    pair_options,
)
from baton_router.workers.costs import NEVER

CONTEXT = 4000


@dataclass
class Prefill:
    """A worker that computes 10,000 tokens a second."""

    name: str
    cached: int = 0
    group: str = "g"
    backlog_s: float = 0.0
    waiting: int = 0

    @property
    def compute_s(self) -> float:
        return (CONTEXT - self.cached) / 10_000

    @property
    def price_s(self) -> float:
        return self.backlog_s + (1 + congestion(self.waiting)) * self.compute_s


@dataclass
class Decode:
    """A worker that computes 5,000 tokens a second."""

    name: str
    cached: int = 0
    group: str = "g"
    backlog_s: float = 0.0
    waiting: int = 0
    streams: int = 0
    blocks_free_s: float = 0.0
    slowdown_s: float = 0.0

    @property
    def compute_s(self) -> float:
        return (CONTEXT - self.cached) / 5_000

    @property
    def price_s(self) -> float:
        return self.blocks_free_s + self.slowdown_s

    @property
    def local_s(self) -> float:
        mine = self.backlog_s + (1 + congestion(self.waiting)) * self.compute_s
        return self.price_s + mine + self.streams * pair_selection.DISTURBANCE * self.compute_s


def work(worker: Decode | Prefill) -> PromptWork:
    return worker.cached, worker.backlog_s, worker.waiting, worker.compute_s, 0.0


Moving = dict[tuple[str, str], float]


def found_ways(
    decodes: list[Decode], prefills: list[Prefill], moving: Moving, local_prefill_limit: int
) -> list[PlainOption]:
    groups = [
        WorkerGroup(
            [number for number, one in enumerate(decodes) if one.group == name],
            [number for number, one in enumerate(prefills) if one.group == name],
        )
        for name in {one.group for one in decodes}
    ]
    return pair_options(
        [
            pair_selection.decode_offer(work(one), one.streams, one.blocks_free_s, one.slowdown_s)
            for one in decodes
        ],
        [pair_selection.prefill_offer(work(one)) for one in prefills],
        groups,
        lambda source, target: moving.get((prefills[source].name, decodes[target].name), 0.005),
        local_prefill_limit,
        CONTEXT,
    )


def chosen(
    decodes: list[Decode],
    prefills: list[Prefill],
    local_prefill_limit: int = 512,
    moving: Moving | None = None,
) -> tuple[str, str | None]:
    way = choose_option(found_ways(decodes, prefills, moving or {}, local_prefill_limit), random.Random(0))
    return decodes[way.decode].name, None if way.prefill == LOCAL_PREFILL else prefills[way.prefill].name


CASES = {
    "a long prompt is computed by a prefill worker": ([Decode("d")], [Prefill("p")], ("d", "p")),
    "what the decode worker holds is not computed elsewhere": (
        [Decode("d", cached=3900)],
        [Prefill("p")],
        ("d", None),
    ),
    "nor is it where another decode worker is idler": (
        [Decode("d0"), Decode("d1", cached=3900, streams=2)],
        [Prefill("p")],
        ("d1", None),
    ),
    "a decode worker with many streams is spared": (
        [Decode("d", cached=3600, streams=400)],
        [Prefill("p", cached=3600)],
        ("d", "p"),
    ),
    "the prefill worker that holds the prompt": (
        [Decode("d")],
        [Prefill("p0"), Prefill("p1", cached=3500)],
        ("d", "p1"),
    ),
    "unless it is too busy": (
        [Decode("d")],
        [Prefill("p0"), Prefill("p1", cached=3500, backlog_s=3.0, waiting=6)],
        ("d", "p0"),
    ),
    "the idler of two that hold as much": (
        [Decode("d")],
        [Prefill("p0", backlog_s=0.2, waiting=1), Prefill("p1")],
        ("d", "p1"),
    ),
    "the decode worker with room": (
        [Decode("d0", blocks_free_s=2.0), Decode("d1", streams=3, slowdown_s=0.2)],
        [Prefill("p")],
        ("d1", "p"),
    ),
    "no pair across groups": (
        [Decode("d", group="a")],
        [Prefill("p", group="b", cached=3900)],
        ("d", None),
    ),
    "alone, if there is nobody else": ([Decode("d")], [], ("d", None)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_selection_chooses_the_cheapest_pair(
    case: tuple[list[Decode], list[Prefill], tuple[str, str | None]],
) -> None:
    decodes, prefills, expected = case
    assert chosen(decodes, prefills) == expected


def test_slow_link_keeps_the_prompt_local() -> None:
    assert chosen([Decode("d")], [Prefill("p")], CONTEXT, {("p", "d"): 5.0}) == ("d", None)


def test_pairs_without_a_link_leave_local_prefill() -> None:
    """A worker without a matching prefill worker computes locally, for any length and beside any pairs."""
    apart = {("p", "d"): NEVER}
    assert chosen([Decode("d")], [Prefill("p")], moving=apart) == ("d", None)
    busy = Decode("busy", group="other", blocks_free_s=60.0)
    prefills = [Prefill("p"), Prefill("q", group="other")]
    assert chosen([Decode("d"), busy], prefills, moving=apart) == ("d", None)


def test_equal_candidates_are_chosen_at_random() -> None:
    candidates = found_ways([Decode("d0"), Decode("d1")], [], {}, CONTEXT)
    assert {choose_option(candidates, random.Random(seed)).decode for seed in range(30)} == {0, 1}


def test_equal_costs_prefer_the_longest_match_then_least_load() -> None:
    close: list[PlainOption] = [
        (1.0, 1.0, 16, 1, 0, LOCAL_PREFILL),
        (1.0 + CLOSE_S / 2, 1.0, 48, 5, 1, LOCAL_PREFILL),
        (1.0 + 2 * CLOSE_S, 1.0, 96, 0, 2, LOCAL_PREFILL),
    ]
    assert choose_option(close, random.Random(0)).decode == 1
    same: list[PlainOption] = [(1.0, 1.0, 0, 4, 2, LOCAL_PREFILL), (1.0, 1.0, 0, 1, 3, LOCAL_PREFILL)]
    assert choose_option(same, random.Random(0)).decode == 3


def test_time_weighs_more_on_a_busy_worker() -> None:
    prices = [congestion(waiting) for waiting in range(40)]
    assert prices == sorted(prices)
    assert prices[0] < prices[3] < prices[-1] == prices[-2]


@pytest.mark.parametrize(
    ("queued_s", "backlog_s", "holds"),
    [
        pytest.param(0.0, 0.5, True, id="no queue, a short wait"),
        pytest.param(0.0, 0.7, False, id="no queue, a long wait"),
        pytest.param(0.3, 0.7, False, id="a queue of short prompts"),
        pytest.param(20.0, 0.7, True, id="an overload"),
        pytest.param(20.0, 30.0, False, id="an overload, and far more at the holder"),
    ],
)
def test_queue_raises_the_price_of_uncached_tokens(queued_s: float, backlog_s: float, holds: bool) -> None:
    """A prompt of 0.4 s, half of it cached at a busy worker, which it waits for the longer, the more wait."""
    holder, _, _, _ = pair_selection.prefill_offer((2000, backlog_s, 0, 0.2, queued_s))
    free, _, _, _ = pair_selection.prefill_offer((0, 0.0, 0, 0.4, queued_s))
    assert (holder < free) is holds


@pytest.mark.parametrize("seed", range(20))
def test_law_longer_queues_never_prefer_fewer_hits(seed: int) -> None:
    """If a worker with more cached tokens is the cheaper one, it also is with a longer queue."""
    rng = random.Random(seed)
    for _ in range(50):
        most = rng.uniform(0.1, 40.0)
        least, waiting = rng.uniform(0.0, most), rng.randrange(6)
        far, near = rng.uniform(0, 60), rng.uniform(0, 60)
        wins = []
        for queued_s in sorted(rng.uniform(0, 200) for _ in range(8)):
            cached = 9, far, waiting, least, queued_s
            holder = pair_selection.prefill_offer(cached)
            other = pair_selection.prefill_offer((0, near, waiting, most, queued_s))
            local = pair_selection.decode_offer(cached, 0, 0.0, 0.0)
            assert local[1] == pytest.approx(holder[0])
            wins.append(holder[0] <= other[0])
        assert wins == sorted(wins)


@pytest.mark.parametrize("seed", range(60))
def test_selection_equals_the_plain_formula(seed: int) -> None:
    rng = random.Random(seed)
    groups = ["a", "b"][: rng.randint(1, 2)]
    size = rng.choice([4, 12])

    def busy() -> dict[str, object]:
        return {
            "backlog_s": rng.choice([0.0, rng.uniform(0, 2)]),
            "waiting": rng.randrange(4),
            "group": rng.choice(groups),
            "cached": rng.randrange(CONTEXT),
        }

    decodes = [
        Decode(f"d{n}", streams=rng.randrange(9), blocks_free_s=rng.choice([0.0, rng.random()]),
               slowdown_s=rng.random() / 10, **busy())  # type: ignore[arg-type]
        for n in range(rng.randint(1, size))
    ]  # fmt: skip
    prefills = [Prefill(f"p{n}", **busy()) for n in range(rng.randint(0, size))]  # type: ignore[arg-type]
    pairs = list(product(prefills, decodes))
    # With links that differ more than the workers do, the four best of each kind need not have the best pair.
    slowest = 0.2 if size == 4 else 0.0
    moving = {(p.name, d.name): rng.uniform(0, slowest) for p, d in pairs}
    limit = rng.choice([0, 512, CONTEXT])
    candidates = found_ways(decodes, prefills, moving, limit)

    prices: dict[tuple[str, str | None], float] = {}
    for p, d in pairs:
        if p.group == d.group:
            prices[d.name, p.name] = p.price_s + moving[p.name, d.name] + d.price_s
    for d in decodes:
        if CONTEXT - d.cached <= limit or not any(p.group == d.group for p in prefills):
            prices[d.name, None] = d.local_s
    assert candidates[0][0] == pytest.approx(min(prices.values()))
    assert [way[0] for way in candidates] == sorted(way[0] for way in candidates)
    for way in map(PairOption._make, candidates):
        d = decodes[way.decode]
        source = None if way.prefill == LOCAL_PREFILL else prefills[way.prefill]
        assert way.price == pytest.approx(prices[d.name, source.name if source else None])
        computer = source or d
        moved = moving[source.name, d.name] if source else 0.0
        assert way.first_token_s == pytest.approx(
            computer.backlog_s + computer.compute_s + moved + d.blocks_free_s
        )
        assert way.cached == computer.cached and way.busy == d.streams + computer.waiting
        assert way.first_token_s <= way.price + 1e-9

    taken = choose_option(candidates, rng)
    close = [way for way in map(PairOption._make, candidates) if way.price <= candidates[0][0] + CLOSE_S]
    assert taken in close
    assert (taken.cached, -taken.busy) == max((way.cached, -way.busy) for way in close)
