"""The holder of the Lease: a table of cases, and the law that there are never two."""

from __future__ import annotations

import random
from typing import Any

import pytest

from baton_api import labels
from baton_operator.cluster.leadership import (
    DURATION_S,
    GIVE_UP_S,
    NAMESPACES,
    RENEW_S,
    LeaseView,
    OtherLeases,
    new,
    released,
    taken,
)

TIME = "2026-01-01T00:00:00.000000Z"


def versioned(lease: dict[str, Any], version: int) -> dict[str, Any]:
    return {**lease, "metadata": {**lease["metadata"], "resourceVersion": str(version)}}


HELD = versioned(new("baton", "operator", "other", TIME), 1)


def test_lease_released_may_be_taken_at_once() -> None:
    lease = versioned(released(HELD), 2)
    assert LeaseView("me").seen(lease, 0).may_take(lease, 0)


def test_lease_own_after_restart_may_be_taken() -> None:
    lease = versioned(new("baton", "operator", "me", TIME), 1)
    view = LeaseView("me").seen(lease, 0)
    assert view.may_take(lease, 0)
    assert not view.holds(0)


def test_lease_of_another_not_renewed_in_time_may_be_taken() -> None:
    """The duration is measured by the reader's own clock."""
    view = LeaseView("me").seen(HELD, 100)
    assert not view.may_take(HELD, 100 + DURATION_S)
    assert view.seen(HELD, 110).may_take(HELD, 100 + DURATION_S + 1)
    renewed = versioned(HELD, 2)
    assert not view.seen(renewed, 110).may_take(renewed, 100 + DURATION_S + 1)


def test_lease_holder_without_renewal_stops_before_expiry() -> None:
    lease = versioned(new("baton", "operator", "me", TIME), 1)
    view = LeaseView("me").wrote(lease, 100)
    assert view.holds(100 + GIVE_UP_S - 0.1)
    assert not view.holds(100 + GIVE_UP_S)
    assert GIVE_UP_S + RENEW_S < DURATION_S


def test_lease_seen_with_another_holder_is_lost() -> None:
    view = LeaseView("me").wrote(HELD, 100)
    assert not view.seen(versioned(HELD, 2), 101).holds(101)


def test_lease_new_holder_increments_transitions() -> None:
    lease = taken(HELD, "me", "2026-01-01T00:00:20.000000Z")
    assert lease["spec"] == {
        "holderIdentity": "me",
        "leaseDurationSeconds": DURATION_S,
        "leaseTransitions": 2,
        "acquireTime": "2026-01-01T00:00:20.000000Z",
        "renewTime": "2026-01-01T00:00:20.000000Z",
    }
    again = taken(lease, "me", "2026-01-01T00:00:22.000000Z")
    assert again["spec"]["leaseTransitions"] == 2
    assert again["spec"]["acquireTime"] == "2026-01-01T00:00:20.000000Z"


def test_lease_says_which_namespaces_its_holder_watches() -> None:
    assert new("baton", "operator", "me", TIME)["metadata"]["annotations"] == {NAMESPACES: ""}
    lease = taken(HELD, "me", TIME, ("models", "more"))
    assert lease["metadata"]["annotations"] == {NAMESPACES: "models,more"}
    assert lease["metadata"]["labels"] == {labels.MANAGED_BY: "baton"}


OWN = versioned(new("own", "operator", "me", TIME), 3)


@pytest.mark.parametrize(
    ("first", "second", "after_s", "answer"),
    [
        ([OWN], None, 0, True),
        ([OWN, versioned(released(HELD), 2)], None, 0, True),
        ([OWN, HELD], [OWN, HELD], 2, False),
        ([OWN, HELD], [OWN, versioned(HELD, 2)], 2, True),
        ([OWN, HELD], [OWN, HELD], DURATION_S + 1, True),
        ([OWN, HELD], [OWN, versioned(released(HELD), 2)], 2, True),
        ([OWN], [versioned(OWN, 4)], 2, True),
    ],
    ids=["alone", "released", "not known", "alive", "dead", "gone since", "ourselves"],
)
def test_rival_is_alive_once_seen_to_renew(
    first: list[dict[str, Any]], second: list[dict[str, Any]] | None, after_s: float, answer: bool
) -> None:
    """It returns the Lease of the rival that is alive, or whether it is certain that no rival is."""
    rivals = OtherLeases("own", "operator", 100)
    rival = rivals.look(first, 100)
    if second is not None:
        rival = rivals.look(second, 100 + after_s)
    assert bool(rival) == answer
    assert (rival is not True and answer) == (second is not None and second[1:] == [versioned(HELD, 2)])


def test_lease_random_faults_never_give_two_holders() -> None:
    """Three operators whose clocks differ, an API server that fails, answers late, and keeps versions."""
    led = set()
    for seed in range(200):
        rng = random.Random(seed)
        offsets = [rng.uniform(-1000, 1000) for _ in range(3)]
        views = [LeaseView(f"operator-{number}") for number in range(3)]
        lease, version, now = versioned(HELD, 1), 1, 0.0
        for _ in range(400):
            now += rng.uniform(0.05, 1.5)
            holders = [view.me for view, off in zip(views, offsets, strict=True) if view.holds(now + off)]
            assert len(holders) <= 1, (seed, holders)
            led |= set(holders)
            one = rng.randrange(3)
            if rng.random() < 0.3:
                continue  # it could not read
            read_at = now + offsets[one]
            views[one] = views[one].seen(lease, read_at)
            if not views[one].may_take(lease, read_at) or rng.random() < 0.1:
                continue  # not its turn, or it could not write
            version += 1
            lease = versioned(taken(lease, views[one].me, TIME), version)
            now += rng.uniform(0, 2)  # the answer to the write arrives only now
            if rng.random() < 0.8:  # else the answer is lost
                views[one] = views[one].wrote(lease, read_at)
    assert len(led) == 3
