"""The queue of a worker: tenants take turns, patient sequences come last, and each leaves once."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from baton_engine.scheduling.sequence import Sequence
from baton_engine.scheduling.waiting import WaitingQueue
from tests.engine.serving import request_of


def sequence(name: str, tenant: str = "", *, patient: bool = False) -> Sequence:
    return Sequence(request_of(name, tenant=tenant, patient=patient), 4, 8)


def drained(queue: WaitingQueue, batch: Counter[str]) -> list[str]:
    """All of them in their order, if none leaves the batch."""
    order = []
    while queue:
        head = queue.head(batch, patient=False) or queue.head(batch, patient=True)
        assert head is not None
        queue.take(head)
        batch[head.request.tenant] += 1
        order.append(head.request.id)
    return order


QUEUED: dict[str, tuple[str, dict[str, int], str]] = {
    "one tenant, in order": ("a1 a2 a3", {}, "a1 a2 a3"),
    "two tenants in turn": ("a1 a2 a3 b1 b2", {}, "a1 b1 a2 b2 a3"),
    "the one with fewer in the batch": ("a1 a2 b1 b2", {"a": 2}, "b1 b2 a1 a2"),
    "patient ones last": ("A1 b1 a1 B1", {}, "b1 a1 A1 B1"),
}


@pytest.mark.parametrize(("queued", "batch", "expected"), QUEUED.values(), ids=QUEUED.keys())
def test_waiting_queue_order(queued: str, batch: dict[str, int], expected: str) -> None:
    queue = WaitingQueue()
    for name in queued.split():
        queue.add(sequence(name, name[0].lower(), patient=name[0].isupper()))
    assert drained(queue, Counter(batch)) == expected.split()


def test_waiting_queue_retracted_sequence_is_next_unless_its_tenant_has_more() -> None:
    queue = WaitingQueue()
    for name in ("a1", "b1", "c1"):
        queue.add(sequence(name, name[0]))
    queue.put_back(sequence("c0", "c"))
    assert drained(queue, Counter()) == ["c0", "a1", "b1", "c1"]
    for name in ("a1", "b1"):
        queue.add(sequence(name, name[0]))
    queue.put_back(sequence("c0", "c"))
    assert drained(queue, Counter(c=1)) == ["a1", "b1", "c0"]


@pytest.mark.parametrize("seed", range(5))
def test_law_waiting_tenant_sees_one_turn_of_each_other(seed: int) -> None:
    """Between two turns of a tenant that waits all the time; counts are those of a list."""
    rng, queue, plain = random.Random(seed), WaitingQueue(), list[Sequence]()
    seen = {tenant: Counter[str]() for tenant in "abc"}
    for number in range(400):
        if rng.random() < 0.5:
            one = sequence(f"{number}", rng.choice("abc"))
            if not queue.count(one.request.tenant):
                seen[one.request.tenant].clear()
            queue.add(one)
            plain.append(one)
        elif plain and rng.random() < 0.2:
            one = rng.choice(plain)
            queue.remove(one)
            plain.remove(one)
        elif plain:
            head = queue.head({}, patient=False)
            assert head is not None
            tenant = head.request.tenant
            assert head is next(one for one in plain if one.request.tenant == tenant)
            queue.take(head)
            plain.remove(head)
            seen[tenant].clear()
            for other in {one.request.tenant for one in plain} - {tenant}:
                seen[other][tenant] += 1
                assert seen[other][tenant] == 1
        assert len(queue) == len(plain) and set(queue.copy()) == set(queue) == set(plain)
        for tenant in "abc":
            assert queue.count(tenant) == sum(one.request.tenant == tenant for one in plain)
