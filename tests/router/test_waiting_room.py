"""Classes, tenants and time: who goes next, and that everybody leaves exactly once."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from baton_router.scheduling.fair_share import QUANTUM
from baton_router.scheduling.tenant_queue import QueueEntry
from baton_router.scheduling.waiting_room import (
    LEVELS,
    LOWEST,
    MAX_WAIT_SHARE,
    STARVED_S,
    WINDOW,
    WaitingRoom,
)
from tests.router.test_tenant_queue import entry

CRITICAL, INTERACTIVE, DEFAULT, BATCH = range(4)


def room_of(*entries: QueueEntry) -> WaitingRoom:
    room = WaitingRoom()
    for one in entries:
        room.add(one)
    return room


def always() -> bool:
    return True


def served(room: WaitingRoom, now: float, most: int = 10**6) -> list[QueueEntry]:
    """Who goes if so many can."""
    order: list[QueueEntry] = []

    def take(one: QueueEntry) -> bool:
        order.append(one)
        return True

    assert room.offer(take, always, now, most) == len(order)
    return order


def test_the_names_of_the_classes_have_their_order() -> None:
    assert LEVELS == {"critical": CRITICAL, "interactive": INTERACTIVE, "default": DEFAULT, "batch": BATCH}
    assert LOWEST == BATCH


def test_higher_classes_first() -> None:
    low, high, middle = (entry(1, level=level) for level in (DEFAULT, CRITICAL, INTERACTIVE))
    assert served(room_of(low, high, middle), 0) == [high, middle, low]


def test_a_lower_class_gets_what_the_higher_ones_cannot_use() -> None:
    blocked, lower = entry(1, level=INTERACTIVE), entry(1, level=DEFAULT)
    room = room_of(blocked, lower)
    assert room.offer(lambda one: one is lower, always, 0) == 1
    assert list(room) == [blocked]


BEFORE: dict[str, tuple[list[int], int, bool, bool]] = {
    "an empty room": ([], BATCH, False, False),
    "a batch before interactive": ([BATCH], INTERACTIVE, False, False),
    "a batch before default": ([BATCH], DEFAULT, False, False),
    "a batch before another": ([BATCH], BATCH, True, True),
    "default before interactive": ([DEFAULT, BATCH], INTERACTIVE, False, True),
    "interactive before interactive": ([INTERACTIVE], INTERACTIVE, True, True),
    "critical before interactive": ([CRITICAL], INTERACTIVE, True, True),
    "interactive before batch": ([INTERACTIVE], BATCH, True, True),
}
"""(classes that wait, the class that comes, whether one goes before it, and after they have starved)"""


@pytest.mark.parametrize(("waiting", "level", "young", "old"), BEFORE.values(), ids=BEFORE.keys())
def test_goes_before_says_who_is_asked_first(waiting: list[int], level: int, young: bool, old: bool) -> None:
    room = room_of(*(entry(1, 0, level=one) for one in waiting))
    assert room.precedes(level, 1.0) is young
    assert room.precedes(level, STARVED_S) is old


@pytest.mark.parametrize("seed", range(30))
def test_law_goes_before_agrees_with_the_order(seed: int) -> None:
    """Who is not asked after anybody would be offered the first worker, were it added."""
    rng = random.Random(seed)
    for _ in range(50):
        now = rng.uniform(0, 2 * STARVED_S)
        room = room_of(
            *(entry(1, now * rng.random(), level=rng.randrange(4)) for _ in range(rng.randrange(5)))
        )
        level = rng.randrange(4)
        if not room.precedes(level, now):
            comer = entry(1, now, level=level)
            room.add(comer)
            assert served(room, now)[0] is comer


def test_nobody_is_asked_once_no_other_could_go() -> None:
    first, second, third = (entry(seconds) for seconds in (1, 2, 3))
    room = room_of(first, second, third)
    asked: list[QueueEntry] = []

    def take(one: QueueEntry) -> bool:
        asked.append(one)
        return one is second

    assert room.offer(take, lambda: False, 0) == 1
    assert (asked, list(room)) == ([first, second], [first, third])


def test_batch_goes_only_while_nothing_else_waits() -> None:
    blocked, batch = entry(1, level=DEFAULT), entry(1, level=BATCH)
    room = room_of(blocked, batch)
    assert room.offer(lambda one: one is batch, always, 0) == 0
    room.discard(blocked)
    assert served(room, 0) == [batch]


def test_batch_cannot_starve() -> None:
    batch = entry(1, level=BATCH)
    high = [entry(1, 1e9, level=INTERACTIVE) for _ in range(20)]
    room = room_of(batch, *high)
    assert room.expire(1e9) == []
    assert served(room, 1e9) == [*high, batch]


def test_a_class_that_starves_has_every_fourth_turn() -> None:
    low = [entry(1, 0, level=DEFAULT) for _ in range(3)]
    high = [entry(1, STARVED_S, level=CRITICAL) for _ in range(12)]
    order = served(room_of(*low, *high), STARVED_S)
    assert [number for number, one in enumerate(order) if one.level == DEFAULT] == [3, 7, 11]
    assert served(room_of(*low, *high), STARVED_S - 0.1) == [*high, *low]


@pytest.mark.parametrize("level", [CRITICAL, INTERACTIVE])
def test_whose_client_sits_and_waits_goes_first_after_half_a_minute(level: int) -> None:
    old, young = entry(20, 0, level=level), entry(0.1, STARVED_S - 0.2, level=level)
    room = room_of(old, young)
    assert room.alarm == STARVED_S
    room.expire(STARVED_S - 0.1)
    assert served(room_of(old, young), STARVED_S - 0.1) == [young, old]
    room.expire(STARVED_S)
    assert served(room, STARVED_S) == [old, young]


def test_default_is_promoted_before_its_patience_ends() -> None:
    """Short ones that come later pass it for four fifths of its patience, and then no more."""
    old, max_wait_s = entry(200, 0, level=DEFAULT, max_wait_s=300), 300
    room, now = room_of(old), MAX_WAIT_SHARE * max_wait_s
    young = entry(0.1, now - 1, level=DEFAULT, max_wait_s=300)
    room.add(young)
    assert room.alarm == now
    assert room.expire(now - 0.1) == []
    assert served(room_of(old, young), now - 0.1) == [young, old]
    assert room.expire(now) == []
    assert served(room, now) == [old, young]


def test_a_short_patience_ends_before_a_promotion() -> None:
    room = room_of(entry(1, 0, level=DEFAULT, max_wait_s=5))
    assert room.alarm == 5
    assert len(room.expire(5)) == 1


def test_others_go_by_length_however_long_they_wait() -> None:
    old, young = entry(20, 0, level=DEFAULT), entry(0.1, STARVED_S, level=DEFAULT)
    room = room_of(old, young)
    room.expire(STARVED_S)
    assert served(room, STARVED_S) == [young, old]


def test_tenants_take_turns_however_much_one_of_them_sends() -> None:
    flood = [entry(0.01, tenant="flood", cost=QUANTUM) for _ in range(1000)]
    others = [entry(5, tenant=f"t{number}", cost=QUANTUM) for number in range(9)]
    order = served(room_of(*flood, *others), 0)
    assert {one.tenant for one in order[:10]} == {"flood", *(one.tenant for one in others)}


def test_to_starve_is_not_to_pass_other_tenants() -> None:
    flood = [entry(1, 0, tenant="flood", level=INTERACTIVE, cost=QUANTUM) for _ in range(100)]
    other = [entry(1, STARVED_S, tenant="other", level=INTERACTIVE, cost=QUANTUM) for _ in range(10)]
    room = room_of(*flood, *other)
    room.expire(STARVED_S)
    assert Counter(one.tenant for one in served(room, STARVED_S)[:20])["other"] == 10


def test_no_more_are_asked_than_the_window_has() -> None:
    asked: list[QueueEntry] = []
    room = room_of(*(entry(1, tenant=f"t{number % 7}") for number in range(300)))

    def refuse(one: QueueEntry) -> bool:
        asked.append(one)
        return False

    assert room.offer(refuse, always, 0) == 0
    assert len(asked) == len(set(asked)) == WINDOW


def test_patience_ends() -> None:
    short, long = entry(1, 0, max_wait_s=5), entry(1, 0, max_wait_s=50)
    room = room_of(short, long)
    assert room.expire(4.9) == []
    assert room.expire(5) == [short]
    assert short not in room and long in room
    assert room.expire(50) == [long] and not room


def test_what_is_computed_before_a_request() -> None:
    room = room_of(
        entry(4, tenant="a", level=CRITICAL),
        *(entry(1, tenant="flood", level=INTERACTIVE) for _ in range(100)),
        entry(2, tenant="b", level=INTERACTIVE),
        entry(7, tenant="b", level=DEFAULT),
    )
    # All that is critical, one's own shorter one, and of the flood as much as that and oneself.
    assert room.seconds_before(entry(3, tenant="b", level=INTERACTIVE)) == 4 + 2 + 5
    assert room.seconds_before(entry(1, tenant="new", level=INTERACTIVE)) == 4 + 1 + 1
    assert room.seconds_before(entry(1, tenant="flood", level=INTERACTIVE)) == 4 + 100 + 2
    assert room.seconds_before(entry(1, tenant="c", level=CRITICAL)) == 1


@pytest.mark.parametrize("seed", range(20))
def test_everybody_leaves_exactly_once(seed: int) -> None:
    rng = random.Random(seed)
    room, now = WaitingRoom(quantum=50), 0.0
    there, left = set[QueueEntry](), list[QueueEntry]()

    def leave(one: QueueEntry) -> None:
        there.remove(one)  # KeyError if it had left before
        left.append(one)

    for _ in range(1500):
        now += rng.expovariate(2)
        action = rng.random()
        if action < 0.5:
            one = entry(
                rng.uniform(0, 3), now - rng.random(), tenant=f"t{rng.randrange(6)}", level=rng.randrange(4),
                cost=rng.uniform(1, 500), objective_s=rng.choice([math.inf, rng.uniform(0, 40)]),
                max_wait_s=rng.choice([math.inf, rng.uniform(0, 60)]), retried=rng.random() < 0.1,
            )  # fmt: skip
            room.add(one)
            there.add(one)
        elif action < 0.6 and there:
            one = rng.choice(sorted(there, key=lambda one: one.number))
            assert room.discard(one)
            assert not room.discard(one)
            leave(one)
        elif action < 0.7:
            for one in room.expire(now):
                assert now >= one.arrived + one.max_wait_s
                leave(one)
            assert all(now < one.arrived + one.max_wait_s for one in room)
            waited = [now - one.arrived for one in room if one.level <= INTERACTIVE and not one.starved]
            assert max(waited, default=0) < STARVED_S
        else:
            chance, offered, taken = rng.random(), list[QueueEntry](), list[QueueEntry]()

            def take(one: QueueEntry, chance: float = chance, offered: list[QueueEntry] = offered,
                     taken: list[QueueEntry] = taken) -> bool:  # fmt: skip
                assert one in there
                offered.append(one)
                if rng.random() < chance:
                    taken.append(one)
                    leave(one)
                    return True
                return False

            others = [one for one in there if one.level != BATCH]
            assert room.offer(take, always, now) == len(taken)
            assert len(offered) == len(set(offered))
            if any(one.level == BATCH for one in taken):
                assert not set(others) & there, "batch went while others waited"
        assert set(room) == there
        assert [room.count(level) for level in range(4)] == [
            sum(one.level == level for one in there) for level in range(4)
        ]
        assert room.alarm >= min((one.arrived for one in there), default=math.inf)
    served(room, now)
    assert not room and room.alarm == math.inf


@pytest.mark.parametrize("seed", range(5))
def test_a_flood_takes_no_more_than_its_share(seed: int) -> None:
    """One of five tenants sends ten times what the others do, and more than is left of one worker."""
    rng = random.Random(seed)
    room = WaitingRoom()
    waits: dict[str, list[float]] = {"flood": [], "calm": []}
    for step in range(2000):
        now = float(step)
        for number in range(4):
            if rng.random() < 0.15:
                room.add(entry(1, now, tenant=f"calm {number}", level=DEFAULT, cost=1000))
        if rng.random() < 0.75:
            for _ in range(2):
                room.add(entry(0.5, now, tenant="flood", level=DEFAULT, cost=1000))
        room.expire(now)
        for one in served(room, now, most=1):
            waits[one.tenant.split()[0]].append(now - one.arrived)
    calm = waits["calm"]
    assert len(calm) > 1100
    assert sum(calm) / len(calm) < 15 and max(calm) < 60
    assert sum(waits["flood"]) / len(waits["flood"]) > 100
