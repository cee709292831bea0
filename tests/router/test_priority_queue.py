"""Classes, tenants and time: the order of requests, each of which leaves exactly once."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

from baton_router.scheduling.fair_share import QUANTUM
from baton_router.scheduling.priority_queue import LEVELS, MAX_WAIT_SHARE, STARVED_S, WINDOW, PriorityQueue
from baton_router.scheduling.tenant_queue import QueueEntry
from tests.router.test_tenant_queue import entry

CRITICAL, INTERACTIVE, DEFAULT, BATCH = range(4)


def queue_of(*entries: QueueEntry) -> PriorityQueue:
    queue = PriorityQueue()
    for one in entries:
        queue.add(one)
    return queue


def always() -> bool:
    return True


def served(queue: PriorityQueue, now: float, most: int = 10**6) -> list[QueueEntry]:
    """Return the requests that start if this many can."""
    order: list[QueueEntry] = []

    def take(one: QueueEntry) -> bool:
        order.append(one)
        return True

    assert queue.offer(take, always, now, most) == len(order)
    return order


def test_class_names_have_their_order() -> None:
    assert LEVELS == {"critical": CRITICAL, "interactive": INTERACTIVE, "default": DEFAULT, "batch": BATCH}


def test_higher_classes_first() -> None:
    low, high, middle = (entry(1, level=level) for level in (DEFAULT, CRITICAL, INTERACTIVE))
    assert served(queue_of(low, high, middle), 0) == [high, middle, low]


def test_lower_class_uses_workers_that_higher_ones_cannot() -> None:
    blocked, lower = entry(1, level=INTERACTIVE), entry(1, level=DEFAULT)
    queue = queue_of(blocked, lower)
    assert queue.offer(lambda one: one is lower, always, 0) == 1
    assert list(queue) == [blocked]


BEFORE: dict[str, tuple[list[int], int, bool, bool]] = {
    "an empty queue": ([], BATCH, False, False),
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
def test_precedes_compares_class_and_starvation(
    waiting: list[int], level: int, young: bool, old: bool
) -> None:
    queue = queue_of(*(entry(1, 0, level=one) for one in waiting))
    assert queue.precedes(level, 1.0) is young
    assert queue.precedes(level, STARVED_S) is old


@pytest.mark.parametrize("seed", range(30))
def test_law_precedes_agrees_with_the_order(seed: int) -> None:
    """Check that a request is not considered once any other would get the first worker."""
    rng = random.Random(seed)
    for _ in range(50):
        now = rng.uniform(0, 2 * STARVED_S)
        queue = queue_of(
            *(entry(1, now * rng.random(), level=rng.randrange(4)) for _ in range(rng.randrange(5)))
        )
        level = rng.randrange(4)
        if not queue.precedes(level, now):
            comer = entry(1, now, level=level)
            queue.add(comer)
            assert served(queue, now)[0] is comer


def test_plan_ends_when_no_other_request_could_start() -> None:
    first, second, third = (entry(seconds) for seconds in (1, 2, 3))
    queue = queue_of(first, second, third)
    considered: list[QueueEntry] = []

    def take(one: QueueEntry) -> bool:
        considered.append(one)
        return one is second

    assert queue.offer(take, lambda: False, 0) == 1
    assert (considered, list(queue)) == ([first, second], [first, third])


def test_batch_starts_only_while_no_other_class_waits() -> None:
    blocked, batch = entry(1, level=DEFAULT), entry(1, level=BATCH)
    queue = queue_of(blocked, batch)
    assert queue.offer(lambda one: one is batch, always, 0) == 0
    queue.discard(blocked)
    assert served(queue, 0) == [batch]


def test_batch_cannot_starve() -> None:
    batch = entry(1, level=BATCH)
    high = [entry(1, 1e9, level=INTERACTIVE) for _ in range(20)]
    queue = queue_of(batch, *high)
    assert queue.expire(1e9) == []
    assert served(queue, 1e9) == [*high, batch]


def test_starving_class_gets_every_fourth_turn() -> None:
    low = [entry(1, 0, level=DEFAULT) for _ in range(3)]
    high = [entry(1, STARVED_S, level=CRITICAL) for _ in range(12)]
    order = served(queue_of(*low, *high), STARVED_S)
    assert [number for number, one in enumerate(order) if one.level == DEFAULT] == [3, 7, 11]
    assert served(queue_of(*low, *high), STARVED_S - 0.1) == [*high, *low]


@pytest.mark.parametrize("level", [CRITICAL, INTERACTIVE])
def test_interactive_request_goes_first_after_half_a_minute(level: int) -> None:
    old, young = entry(20, 0, level=level), entry(0.1, STARVED_S - 0.2, level=level)
    queue = queue_of(old, young)
    assert queue.alarm == STARVED_S
    queue.expire(STARVED_S - 0.1)
    assert served(queue_of(old, young), STARVED_S - 0.1) == [young, old]
    queue.expire(STARVED_S)
    assert served(queue, STARVED_S) == [old, young]


def test_default_is_promoted_before_its_wait_limit() -> None:
    """Shorter later requests pass it for four fifths of its waiting time, and then no more."""
    old, max_wait_s = entry(200, 0, level=DEFAULT, max_wait_s=300), 300
    queue, now = queue_of(old), MAX_WAIT_SHARE * max_wait_s
    young = entry(0.1, now - 1, level=DEFAULT, max_wait_s=300)
    queue.add(young)
    assert queue.alarm == now
    assert queue.expire(now - 0.1) == []
    assert served(queue_of(old, young), now - 0.1) == [young, old]
    assert queue.expire(now) == []
    assert served(queue, now) == [old, young]


def test_short_wait_limit_ends_before_a_promotion() -> None:
    queue = queue_of(entry(1, 0, level=DEFAULT, max_wait_s=5))
    assert queue.alarm == 5
    assert len(queue.expire(5)) == 1


def test_other_requests_go_by_length_for_any_wait() -> None:
    old, young = entry(20, 0, level=DEFAULT), entry(0.1, STARVED_S, level=DEFAULT)
    queue = queue_of(old, young)
    queue.expire(STARVED_S)
    assert served(queue, STARVED_S) == [young, old]


def test_tenants_take_turns_during_a_flood() -> None:
    flood = [entry(0.01, tenant="flood", cost=QUANTUM) for _ in range(1000)]
    others = [entry(5, tenant=f"t{number}", cost=QUANTUM) for number in range(9)]
    order = served(queue_of(*flood, *others), 0)
    assert {one.tenant for one in order[:10]} == {"flood", *(one.tenant for one in others)}


def test_starving_flood_does_not_pass_other_tenants() -> None:
    flood = [entry(1, 0, tenant="flood", level=INTERACTIVE, cost=QUANTUM) for _ in range(100)]
    other = [entry(1, STARVED_S, tenant="other", level=INTERACTIVE, cost=QUANTUM) for _ in range(10)]
    queue = queue_of(*flood, *other)
    queue.expire(STARVED_S)
    assert Counter(one.tenant for one in served(queue, STARVED_S)[:20])["other"] == 10


def test_plan_considers_no_more_requests_than_its_window() -> None:
    considered: list[QueueEntry] = []
    queue = queue_of(*(entry(1, tenant=f"t{number % 7}") for number in range(300)))

    def refuse(one: QueueEntry) -> bool:
        considered.append(one)
        return False

    assert queue.offer(refuse, always, 0) == 0
    assert len(considered) == len(set(considered)) == WINDOW


def test_requests_expire_at_their_wait_limit() -> None:
    short, long = entry(1, 0, max_wait_s=5), entry(1, 0, max_wait_s=50)
    queue = queue_of(short, long)
    assert queue.expire(4.9) == []
    assert queue.expire(5) == [short]
    assert short not in queue and long in queue
    assert queue.expire(50) == [long] and not queue


def test_seconds_before_sums_the_work_ahead() -> None:
    queue = queue_of(
        entry(4, tenant="a", level=CRITICAL),
        *(entry(1, tenant="flood", level=INTERACTIVE) for _ in range(100)),
        entry(2, tenant="b", level=INTERACTIVE),
        entry(7, tenant="b", level=DEFAULT),
    )
    # All that is critical, one's own shorter one, and of the flood as much as that and oneself.
    assert queue.seconds_before(entry(3, tenant="b", level=INTERACTIVE)) == 4 + 2 + 5
    assert queue.seconds_before(entry(1, tenant="new", level=INTERACTIVE)) == 4 + 1 + 1
    assert queue.seconds_before(entry(1, tenant="flood", level=INTERACTIVE)) == 4 + 100 + 2
    assert queue.seconds_before(entry(1, tenant="c", level=CRITICAL)) == 1


def test_seconds_leave_out_the_batches() -> None:
    queue = queue_of(entry(4, level=CRITICAL), entry(7, tenant="b", level=DEFAULT), entry(90, level=BATCH))
    assert queue.seconds == 11


def test_repriced_request_keeps_its_turn() -> None:
    """Its tenant's turn is not lost, although it has no other request."""
    first, second, third = (entry(3, tenant=tenant, cost=QUANTUM) for tenant in "abc")
    queue = queue_of(first, second, third)
    assert served(queue, 0.0, most=1) == [first]
    queue.reprice(second, 9.0)
    assert served(queue, 0.0) == [second, third]


@pytest.mark.parametrize("seed", range(20))
def test_law_requests_leave_exactly_once(seed: int) -> None:
    rng = random.Random(seed)
    queue, now = PriorityQueue(quantum=50), 0.0
    queued, left = set[QueueEntry](), list[QueueEntry]()

    def leave(one: QueueEntry) -> None:
        queued.remove(one)  # KeyError if it had left before
        left.append(one)

    for _ in range(1500):
        now += rng.expovariate(2)
        action = rng.random()
        if action < 0.5:
            one = entry(
                rng.uniform(0, 3), now - rng.random(), tenant=f"t{rng.randrange(6)}", level=rng.randrange(4),
                cost=rng.uniform(1, 500), ttft_slo_s=rng.choice([math.inf, rng.uniform(0, 40)]),
                max_wait_s=rng.choice([math.inf, rng.uniform(0, 60)]), retried=rng.random() < 0.1,
            )  # fmt: skip
            queue.add(one)
            queued.add(one)
        elif action < 0.6 and queued:
            one = rng.choice(sorted(queued, key=lambda one: one.number))
            assert queue.discard(one)
            assert not queue.discard(one)
            leave(one)
        elif action < 0.7:
            for one in queue.expire(now):
                assert now >= one.arrived + one.max_wait_s
                leave(one)
            assert all(now < one.arrived + one.max_wait_s for one in queue)
            waited = [now - one.arrived for one in queue if one.level <= INTERACTIVE and not one.starved]
            assert max(waited, default=0) < STARVED_S
        else:
            chance, offered, taken = rng.random(), list[QueueEntry](), list[QueueEntry]()

            def take(one: QueueEntry, chance: float = chance, offered: list[QueueEntry] = offered,
                     taken: list[QueueEntry] = taken) -> bool:  # fmt: skip
                assert one in queued
                offered.append(one)
                if rng.random() < chance:
                    taken.append(one)
                    leave(one)
                    return True
                return False

            others = [one for one in queued if one.level != BATCH]
            assert queue.offer(take, always, now) == len(taken)
            assert len(offered) == len(set(offered))
            if any(one.level == BATCH for one in taken):
                assert not set(others) & queued, "batch went while others waited"
        assert set(queue) == queued
        assert [queue.count(level) for level in range(4)] == [
            sum(one.level == level for one in queued) for level in range(4)
        ]
        assert queue.alarm >= min((one.arrived for one in queued), default=math.inf)
    served(queue, now)
    assert not queue and queue.alarm == math.inf


@pytest.mark.parametrize("seed", range(5))
def test_flood_takes_no_more_than_its_share(seed: int) -> None:
    """One of five tenants sends ten times what the others do, and more than is left of one worker."""
    rng = random.Random(seed)
    queue = PriorityQueue()
    waits: dict[str, list[float]] = {"flood": [], "calm": []}
    for step in range(2000):
        now = float(step)
        for number in range(4):
            if rng.random() < 0.15:
                queue.add(entry(1, now, tenant=f"calm {number}", level=DEFAULT, cost=1000))
        if rng.random() < 0.75:
            for _ in range(2):
                queue.add(entry(0.5, now, tenant="flood", level=DEFAULT, cost=1000))
        queue.expire(now)
        for one in served(queue, now, most=1):
            waits[one.tenant.split()[0]].append(now - one.arrived)
    calm = waits["calm"]
    assert len(calm) > 1100
    assert sum(calm) / len(calm) < 15 and max(calm) < 60
    assert sum(waits["flood"]) / len(waits["flood"]) > 100
