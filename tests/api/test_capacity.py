"""Capacity that tenants share."""

from __future__ import annotations

import random

import pytest

from baton_api.capacity import SharedCapacity
from baton_api.limits import TENANT_SHARE
from tests.seeds import seeds


@pytest.mark.parametrize(
    ("held", "tenant", "units", "fits"),
    [
        ({}, "a", 80, True),
        ({}, "a", 81, False),
        ({"a": 80}, "a", 1, False),
        ({"a": 80}, "b", 16, True),
        ({"a": 80}, "b", 17, False),
        ({"a": 80, "b": 16}, "a", 0, False),  # b has come: a may not keep so much, but nothing is taken away
        ({"a": 80, "b": 16}, "c", 3, True),
    ],
)
def test_tenant_may_fill_a_share_of_what_others_leave(
    held: dict[str, int], tenant: str, units: int, fits: bool
) -> None:
    capacity = SharedCapacity(100)
    for name, count in held.items():
        capacity.add(name, count)
    assert capacity.fits(tenant, units) is fits


@pytest.mark.parametrize("seed", seeds(20, quick=5))
def test_law_nothing_exceeds_the_limit_and_a_new_tenant_finds_room(seed: int) -> None:
    random_numbers = random.Random(seed)
    limit = random_numbers.randint(10, 10_000)
    capacity = SharedCapacity(limit)
    for _ in range(500):
        tenant, units = random_numbers.choice("abcd"), random_numbers.randint(1, limit)
        if random_numbers.random() < 0.7:
            if capacity.fits(tenant, units):
                capacity.add(tenant, units)
        else:
            capacity.add(tenant, -min(units, capacity.used_by(tenant)))
        assert capacity.used == sum(map(capacity.used_by, "abcd")) <= limit
        assert capacity.allowed("new") == int(TENANT_SHARE * (limit - capacity.used))
        assert limit - capacity.used >= int((1 - TENANT_SHARE) ** 4 * limit)
