"""Which way a request goes: a table of situations, then the laws of the arithmetic."""

from __future__ import annotations

import random
from typing import Any

import pytest

from baton_router.choice import CLOSE_S, DecodeOffer, PrefillOffer, Way, choose, concern, ways

CONTEXT = 4000


def prefill(name: str, *, cached: int = 0, group: str = "g", **fields: Any) -> PrefillOffer:
    """A worker that computes 10,000 tokens a second."""
    seconds = (CONTEXT - cached) / 10_000
    values = {"backlog_s": 0.0, "waiting": 0, "compute_s": seconds, **fields}
    return PrefillOffer(worker=name, group=group, cached=cached, **values)


def decode(name: str, *, cached: int = 0, group: str = "g", **fields: Any) -> DecodeOffer:
    """A worker that computes 5,000 tokens a second."""
    values = {
        "streams": 0,
        "backlog_s": 0.0,
        "waiting": 0,
        "compute_s": (CONTEXT - cached) / 5_000,
        "room_s": 0.0,
        "slowdown_s": 0.0,
        **fields,
    }
    return DecodeOffer(worker=name, group=group, cached=cached, **values)


def at_once(source: str, target: str) -> float:
    return 0.0


def chosen(
    decodes: list[DecodeOffer], prefills: list[PrefillOffer], alone_limit: int = 512, moving: float = 0.005
) -> tuple[str, str | None]:
    way = choose(ways(decodes, prefills, lambda *_: moving, alone_limit, CONTEXT), random.Random(0))
    return way.decode.worker, way.prefill.worker if way.prefill else None


CASES = {
    "a long prompt is computed by a prefill worker": ([decode("d")], [prefill("p")], ("d", "p")),
    "what the decode worker holds is not computed elsewhere": (
        [decode("d", cached=3900)],
        [prefill("p")],
        ("d", None),
    ),
    "nor is it where another decode worker is idler": (
        [decode("d0"), decode("d1", cached=3900, streams=2)],
        [prefill("p")],
        ("d1", None),
    ),
    "a decode worker with many streams is spared": (
        [decode("d", cached=3600, streams=400)],
        [prefill("p", cached=3600)],
        ("d", "p"),
    ),
    "the prefill worker that holds the prompt": (
        [decode("d")],
        [prefill("p0"), prefill("p1", cached=3500)],
        ("d", "p1"),
    ),
    "unless it is too busy": (
        [decode("d")],
        [prefill("p0"), prefill("p1", cached=3500, backlog_s=3.0, waiting=6)],
        ("d", "p0"),
    ),
    "the idler of two that hold as much": (
        [decode("d")],
        [prefill("p0", backlog_s=0.2, waiting=1), prefill("p1")],
        ("d", "p1"),
    ),
    "the decode worker with room": (
        [decode("d0", room_s=2.0), decode("d1", streams=3, slowdown_s=0.2)],
        [prefill("p")],
        ("d1", "p"),
    ),
    "no pair across groups": (
        [decode("d", group="a")],
        [prefill("p", group="b", cached=3900)],
        ("d", None),
    ),
    "alone, if there is nobody else": ([decode("d")], [], ("d", None)),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_way_is(case: tuple[list[DecodeOffer], list[PrefillOffer], tuple[str, str | None]]) -> None:
    decodes, prefills, expected = case
    assert chosen(decodes, prefills) == expected


def test_a_slow_link_keeps_the_prompt_where_it_is() -> None:
    assert chosen([decode("d")], [prefill("p")], alone_limit=CONTEXT, moving=5.0) == ("d", None)


def test_of_equal_ways_chance_decides() -> None:
    found = ways([decode("d0"), decode("d1")], [], at_once, CONTEXT, CONTEXT)
    taken = {choose(found, random.Random(seed)).decode.worker for seed in range(30)}
    assert taken == {"d0", "d1"}


def test_of_about_equal_ways_the_longest_match_is_taken_then_the_idler() -> None:
    near = decode("d0", cached=16, streams=1)
    held = decode("d1", cached=48, streams=5, slowdown_s=CLOSE_S / 2)
    found = ways([near, held], [], at_once, CONTEXT, CONTEXT)
    assert abs(found[0].price_s - found[1].price_s) < 1.0
    close = [Way(one, None, 1.0 + step, 1.0) for one, step in ((near, 0.0), (held, CLOSE_S / 2))]
    assert choose(close, random.Random(0)).decode.worker == "d1"
    same = [Way(one, None, 1.0, 1.0) for one in (decode("d2", streams=4), decode("d3", streams=1))]
    assert choose(same, random.Random(0)).decode.worker == "d3"


def test_the_busier_a_worker_the_more_its_time_is_worth() -> None:
    prices = [concern(waiting) for waiting in range(40)]
    assert prices == sorted(prices)
    assert prices[0] < prices[3] < prices[-1] == prices[-2]


@pytest.mark.parametrize("seed", range(30))
def test_the_cheapest_way_of_all_is_among_those_compared(seed: int) -> None:
    rng = random.Random(seed)
    groups = ["a", "b"][: rng.randint(1, 2)]

    def busy() -> dict[str, Any]:
        return {"backlog_s": rng.uniform(0, 2), "waiting": rng.randrange(4), "group": rng.choice(groups)}

    decodes = [
        decode(f"d{n}", cached=rng.randrange(CONTEXT), streams=rng.randrange(9), **busy())
        for n in range(rng.randint(1, 4))
    ]
    prefills = [prefill(f"p{n}", cached=rng.randrange(CONTEXT), **busy()) for n in range(rng.randint(0, 4))]
    pairs = {(p.worker, d.worker): rng.uniform(0, 0.2) for p in prefills for d in decodes}
    found = ways(decodes, prefills, lambda *pair: pairs[pair], CONTEXT, CONTEXT)
    prices = [one.alone_s for one in decodes]
    prices += [
        p.price_s + pairs[p.worker, d.worker] + d.price_s
        for p in prefills
        for d in decodes
        if p.group == d.group
    ]
    assert found[0].price_s == pytest.approx(min(prices))
    assert [way.price_s for way in found] == sorted(way.price_s for way in found)
    for way in found:
        assert way.prefill is None or way.prefill.group == way.decode.group
        assert way.first_token_s <= way.price_s + 1e-9
