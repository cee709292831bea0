"""How a generation takes over: a table of moments, then the law under every order of pods getting ready."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from baton_operator.cluster.rollout_health import FAILURES, RolloutHealth
from baton_operator.kinds.part import Duration
from baton_operator.kinds.service_policies import Canary, CanaryStep, Rollout
from baton_operator.rollout.decision import (
    ALL,
    CRASHES,
    HEALTH_CHECK_S,
    RevisionPlan,
    RevisionState,
    RoleName,
    RoleState,
    RolloutBounds,
    RolloutTarget,
    decide,
    seconds_until_change,
)


def role(text: str) -> RoleState:
    """`ready/replicas`."""
    ready, replicas = (int(one) for one in text.split("/"))
    return RoleState(replicas, ready, max(ready, replicas))


def revisions(text: str) -> RevisionState:
    """`name prefill decode [weight]`, such as `old 2/2 4/4 100`; `-` for no prefill, `!` for crashing."""
    name, prefill, decode, *weight = text.removesuffix("!").split()
    roles: dict[RoleName, RoleState] = {} if prefill == "-" else {"prefill": role(prefill)}
    roles["decode"] = role(decode)
    restarts = CRASHES if text.endswith("!") else 0
    created = float(ord(name[0]))
    return RevisionState(
        name, created, roles, int(weight[0]) if weight else 0, restarts=restarts, progressed=0.0
    )


def wanted(
    prefill: int = 2,
    decode: int = 4,
    surge: int = 1,
    unavailable: int = 0,
    held: bool = False,
    **policy: object,
) -> RolloutTarget:
    bounds = RolloutBounds(surge, unavailable)
    return RolloutTarget(
        revision="z",
        targets={"prefill": prefill, "decode": decode},
        bounds={"prefill": bounds, "decode": bounds},
        policy=Rollout.model_validate(policy),
        held=held,
    )


HELD = wanted(held=True)
CANARY = {"steps": [{"weight": 10, "pause": "1m"}, {"weight": 50, "pause": "1m"}]}


def shown(revision_plans: Mapping[str, RevisionPlan]) -> dict[str, str]:
    """`prefill decode weight phase` of each revision."""
    assert all(one.revision == name for name, one in revision_plans.items())
    return {
        name: f"{one.replicas.get('prefill', '-')} {one.replicas['decode']} {one.weight} {one.phase}"
        for name, one in revision_plans.items()
    }


CASES = [
    pytest.param(wanted(), ["z 0/0 0/0"], {"z": "2 4 100 Serving"}, id="the first generation comes whole"),
    pytest.param(
        wanted(), ["z 0/0 0/0", "a 2/2 4/4 100"],
        {"z": "1 1 0 Warming", "a": "2 4 100 Draining"}, id="a rollout begins with the surge",
    ),
    pytest.param(
        wanted(), ["z 1/1 0/1", "a 2/2 4/4 100"],
        {"z": "1 1 0 Warming", "a": "2 4 100 Draining"}, id="one ready role serves nobody",
    ),
    pytest.param(
        wanted(), ["z 1/1 1/1", "a 2/2 4/4 100"],
        {"z": "1 2 25 Warming", "a": "2 3 75 Draining"}, id="a quarter is taken over",
    ),
    pytest.param(
        wanted(), ["z 1/1 2/2", "a 2/2 3/3 75"],
        {"z": "2 3 50 Warming", "a": "1 2 50 Draining"}, id="half is taken over",
    ),
    pytest.param(
        wanted(), ["z 2/2 4/4", "a 1/1 1/1 25"],
        {"z": "2 4 100 Serving", "a": "0 0 0 Draining"}, id="the last one goes",
    ),
    pytest.param(
        wanted(), ["z 2/2 4/4 100", "a 0/0 0/0"],
        {"z": "2 4 100 Serving", "a": "0 0 0 Retired"}, id="nothing is left to do",
    ),
    pytest.param(
        wanted(surge=0, unavailable=1), ["z 0/0 0/0", "a 2/2 4/4 100"],
        {"z": "1 1 0 Warming", "a": "1 3 100 Draining"}, id="without room for more, one goes first",
    ),
    pytest.param(
        wanted(strategy="Recreate"), ["z 0/0 0/0", "a 2/2 4/4 100"],
        {"z": "0 0 0 Warming", "a": "0 0 0 Draining"}, id="to recreate, the old one ends first",
    ),
    pytest.param(
        wanted(strategy="Recreate"), ["z 0/0 0/0", "a 0/0 0/0 0"],
        {"z": "2 4 100 Serving", "a": "0 0 0 Retired"}, id="and then the new one comes whole",
    ),
    pytest.param(
        wanted(paused=True), ["z 0/0 0/0", "a 2/2 4/4 100"],
        {"z": "0 0 0 Retired", "a": "2 4 100 Serving"}, id="a pause changes nothing",
    ),
    pytest.param(
        wanted(), ["z 1/1 0/1!", "a 2/2 4/4 100"],
        {"z": "0 0 0 Failed", "a": "2 4 100 Serving"}, id="who crashes is taken back",
    ),
    pytest.param(
        wanted(), ["z 1/2 2/3!", "a 1/1 2/2 50"],
        {"z": "0 0 0 Failed", "a": "2 4 100 Serving"}, id="and the old one is whole again",
    ),
    pytest.param(
        wanted(), ["z 1/1 0/1!", "b 1/1 1/1 25", "a 2/2 3/3 75"],
        {"z": "0 0 0 Failed", "b": "1 1 25 Draining", "a": "2 4 75 Warming"},
        id="of two old ones neither goes before the other is whole",
    ),
    pytest.param(
        wanted(canary=CANARY), ["z 0/0 0/0", "b 1/1 1/1 25", "a 2/2 3/3 75"],
        {"z": "1 1 0 Warming", "b": "1 1 25 Draining", "a": "2 4 75 Warming"},
        id="nor beside a canary",
    ),
    pytest.param(
        wanted(canary=CANARY), ["z 2/2 4/4 100", "a 1/1 1/1"],
        {"z": "2 4 75 Warming", "a": "2 4 25 Serving"},
        id="a canary that serves alone is no smaller before another one is whole",
    ),
    pytest.param(
        wanted(), ["z 0/2 0/4!"], {"z": "2 4 100 Serving"}, id="without another one there is no way back",
    ),
    pytest.param(
        wanted(autoRollback=False), ["z 0/1 0/1!", "a 2/2 4/4 100"],
        {"z": "1 1 0 Warming", "a": "2 4 100 Draining"}, id="nor if nobody wants one",
    ),
    pytest.param(
        wanted(), ["z 0/0 0/0", "- - 4/4 100"],
        {"z": "1 1 0 Warming", "-": "- 4 100 Draining"}, id="prefill workers are added",
    ),
    pytest.param(
        wanted(), ["z 0/0 0/0", "b 1/1 1/1 25", "a 2/2 3/3 75"],
        {"z": "1 1 0 Warming", "b": "1 1 25 Draining", "a": "2 3 75 Draining"},
        id="a change amid a change",
    ),
    pytest.param(
        HELD, ["z 0/0 0/0", "a 2/2 4/4 100"],
        {"z": "0 0 0 Waiting", "a": "2 4 100 Serving"}, id="without its model the new one waits",
    ),
    pytest.param(
        HELD, ["z 0/0 0/0", "a 1/1 4/4 100"],
        {"z": "0 0 0 Waiting", "a": "2 4 100 Serving"}, id="and the old one is kept whole",
    ),
    pytest.param(
        HELD, ["z 0/0 0/0", "b 1/1 1/1 25", "a 2/2 3/3 75"],
        {"z": "0 0 0 Waiting", "b": "1 1 25 Draining", "a": "2 4 75 Warming"},
        id="two old ones go back to what serves most",
    ),
    pytest.param(
        HELD, ["z 0/1 0/1!", "a 2/2 4/4 100"],
        {"z": "0 0 0 Waiting", "a": "2 4 100 Serving"}, id="workers that find no model are taken away",
    ),
    pytest.param(HELD, ["z 0/0 0/0"], {"z": "0 0 0 Waiting"}, id="the first generation waits too"),
    pytest.param(
        replace(HELD, targets={"prefill": 3, "decode": 5}), ["z 0/2 0/4 100"],
        {"z": "2 4 100 Serving"}, id="a generation alone stays as it is",
    ),
    pytest.param(
        wanted(held=True, strategy="Recreate"), ["z 0/0 0/0", "a 2/2 4/4 100"],
        {"z": "0 0 0 Waiting", "a": "2 4 100 Serving"}, id="nothing ends for a model that is not there",
    ),
    pytest.param(
        wanted(held=True, paused=True), ["z 0/0 0/0", "a 2/2 4/4 100"],
        {"z": "0 0 0 Retired", "a": "2 4 100 Serving"}, id="a pause without a model changes nothing",
    ),
    pytest.param(
        wanted(prefill=0, decode=0), ["z 0/0 0/0", "a 0/0 0/0"],
        {"z": "0 0 100 Serving", "a": "0 0 0 Retired"}, id="a service of nobody changes at once",
    ),
    pytest.param(
        wanted(prefill=0, decode=0), ["z 0/0 0/0", "a 1/1 1/1 100"],
        {"z": "0 0 100 Serving", "a": "0 0 0 Draining"}, id="and its last workers go",
    ),
    pytest.param(
        wanted(), ["z 3/3 6/6", "a 1/1 1/1 25"],
        {"z": "2 4 100 Serving", "a": "0 0 0 Draining"}, id="more than the targets is no more than all",
    ),
    pytest.param(
        wanted(), ["z 0/2 0/4", "a 2/2 4/4 100"],
        {"z": "2 4 0 Warming", "a": "2 4 100 Draining"}, id="who was asked for is not sent away",
    ),
    pytest.param(
        wanted(surge=2, unavailable=1), ["z 0/0 0/0", "a 2/2 4/4 100"],
        {"z": "2 3 0 Warming", "a": "1 3 100 Draining"}, id="both bounds together are how far one goes ahead",
    ),
    pytest.param(
        wanted(surge=3), ["z 0/0 0/0", "b 1/1 1/1 25", "a 2/2 3/3 75"],
        {"z": "2 3 0 Warming", "b": "1 1 25 Draining", "a": "2 3 75 Draining"},
        id="all old ones count against the surge",
    ),
    pytest.param(
        wanted(), ["z 0/0 0/0", "a 1/2 4/4 100"],
        {"z": "1 1 0 Warming", "a": "2 4 100 Draining"}, id="who is not ready now may be again",
    ),
    pytest.param(
        wanted(), ["z 1/1 2/2 50", "b 1/1 2/2 10", "a 1/1 2/2 40"],
        {"z": "2 3 50 Warming", "b": "0 0 25 Draining", "a": "1 2 25 Draining"},
        id="who serves least gives up first",
    ),
    pytest.param(
        wanted(unavailable=1, surge=0), ["z 1/1 2/2 50", "- - 4/4 50"],
        {"z": "2 3 50 Warming", "-": "- 1 50 Draining"}, id="prefill workers that the old one has not",
    ),
    pytest.param(
        wanted(prefill=12, decode=12), ["z 4/4 4/4", "c 3/3 3/3", "b 3/3 3/3", "a 6/6 6/6"],
        {"z": "5 5 33 Warming", "c": "3 3 17 Draining", "b": "3 3 17 Draining", "a": "2 2 33 Draining"},
        id="what rounding leaves is the largest one's",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("want", "states", "revision_plans"), CASES)
def test_rollout_case_gives_plan_of_each_revision(
    want: RolloutTarget, states: list[str], revision_plans: dict[str, str]
) -> None:
    assert shown(decide(want, [revisions(one) for one in states], 1.0)) == revision_plans


def test_rollout_paused_every_revision_keeps_its_replicas() -> None:
    standing = replace(revisions("z 1/1 1/2 10"), step=1, step_since=5.0)
    failed = replace(revisions("b 0/0 0/0"), failed=True)
    states = [standing, failed, revisions("c 0/1 0/1"), revisions("d 0/0 0/0"), revisions("a 2/2 4/4 90")]
    revision_plans = decide(wanted(canary=CANARY, paused=True), states, 1.0)
    assert revision_plans["z"] == RevisionPlan("z", "Serving", {"prefill": 1, "decode": 2}, 10, 1, 5.0)
    assert shown(revision_plans) == {
        "z": "1 2 10 Serving",
        "b": "0 0 0 Failed",
        "c": "1 1 0 Warming",
        "d": "0 0 0 Retired",
        "a": "2 4 90 Serving",
    }


@pytest.mark.parametrize("held", [False, True])
def test_rollout_revision_that_failed_before_is_reported_failed(held: bool) -> None:
    """The wanted revision makes no difference, nor whether its model is fetched."""
    failed = replace(revisions("b 1/1 1/1"), failed=True, failure="it crashed")
    states = [revisions("z 0/0 0/0"), failed, revisions("a 2/2 4/4 100")]
    assert shown(decide(wanted(held=held), states, 1.0))["b"] == "0 0 0 Failed"
    assert decide(wanted(held=held), states, 1.0)["b"].failure == "it crashed"
    again = replace(wanted(held=held), revision="b")
    assert decide(again, states, 1.0)["b"].failure == "it crashed"
    assert shown(decide(wanted(held=held), [replace(states[0], failed=True), *states[1:]], 1.0)) == {
        "z": "0 0 0 Failed", "b": "0 0 0 Failed", "a": "2 4 100 Serving",
    }  # fmt: skip


def test_rollout_crashing_revision_reports_its_restarts() -> None:
    revision_plans = decide(wanted(), [revisions("z 1/1 0/1!"), revisions("a 2/2 4/4 100")], 1.0)
    assert revision_plans["z"].failure == f"a worker started {CRASHES + 1} times"


LAST = [
    pytest.param([("a", 60, "1/1 1/1"), ("b", 40, "2/2 4/4")], "a", id="most requests"),
    pytest.param([("b", 0, "1/1 1/1"), ("a", 0, "2/2 4/4")], "a", id="else most of the service"),
    pytest.param([("a", 0, "1/1 1/1"), ("b", 0, "1/1 1/1")], "b", id="else the newest"),
]


@pytest.mark.parametrize(("olds", "last"), LAST)
@pytest.mark.parametrize("policy", [{}, {"canary": CANARY}])
def test_rollout_of_old_revisions_the_one_that_serves_most_stays(
    olds: list[tuple[str, int, str]], last: str, policy: dict[str, Any]
) -> None:
    new = replace(revisions("z 0/0 0/0"), failed=not policy)
    old = [revisions(f"{name} {roles} {weight}") for name, weight, roles in olds]
    revision_plans = decide(wanted(**policy), [new, *old], 1.0)
    assert [name for name, _, _ in olds if revision_plans[name].phase != "Draining"] == [last]


def test_rollout_suspended_service_has_no_workers() -> None:
    want = replace(wanted(), suspended=True)
    revision_plans = decide(want, [revisions("z 1/1 1/1"), revisions("a 2/2 4/4 100")], 1.0)
    assert all(not any(one.replicas.values()) for one in revision_plans.values())


def test_rollout_progress_deadline_fails_and_is_scheduled() -> None:
    want, states = wanted(progressDeadline="10m"), [revisions("z 0/1 0/1"), revisions("a 2/2 4/4 100")]
    assert seconds_until_change(want, states, 100.0) == 500.0
    assert decide(want, states, 599.0)["z"].phase == "Warming"
    assert decide(want, states, 600.0)["z"].phase == "Warming"
    failed = decide(want, states, 601.0)["z"]
    assert (failed.phase, failed.failure) == ("Failed", "no progress for 10m")
    later = [replace(states[0], progressed=50.0), states[1]]
    assert (seconds_until_change(want, later, 100.0), seconds_until_change(want, later, 650.0)) == (
        550.0,
        0.0,
    )
    assert decide(want, later, 650.0)["z"].phase == "Warming"
    assert decide(want, later, 651.0)["z"].phase == "Failed"


def test_rollout_serving_revision_has_no_progress_deadline() -> None:
    """One worker more than the targets is not ready: the rollout does not wait for it."""
    want, states = wanted(progressDeadline="10m"), [revisions("z 2/2 4/5"), revisions("a 2/2 4/4 100")]
    assert seconds_until_change(want, states, 100.0) is None
    assert decide(want, states, 10_000.0)["z"].phase == "Serving"


FAILING = [
    pytest.param(RolloutHealth(100, 11), RolloutHealth(), True, id="more than may"),
    pytest.param(RolloutHealth(100, 10), RolloutHealth(), False, id="as many as may"),
    pytest.param(RolloutHealth(FAILURES, FAILURES), RolloutHealth(100, 0), True, id="all of the first ones"),
    pytest.param(
        RolloutHealth(FAILURES - 1, FAILURES - 1), RolloutHealth(), False, id="too few to say anything"
    ),
    pytest.param(RolloutHealth(100, 40), RolloutHealth(100, 40), False, id="not more than on the old one"),
    pytest.param(RolloutHealth(100, 40), RolloutHealth(900, 90), True, id="more than on the old one"),
    pytest.param(RolloutHealth(), RolloutHealth(), False, id="none yet"),
]


@pytest.mark.parametrize(("of_new", "of_old", "failed"), FAILING)
def test_rollout_failures_only_on_new_revision_roll_back(
    of_new: RolloutHealth, of_old: RolloutHealth, failed: bool
) -> None:
    new, old = revisions("z 1/1 1/1 25"), revisions("a 2/2 3/3 75")
    revision_plans = decide(wanted(), [replace(new, health=of_new), replace(old, health=of_old)], 1.0)
    assert (revision_plans["z"].phase == "Failed") == failed
    assert (
        not failed or revision_plans["z"].failure == f"{of_new.failed} of {of_new.requests} requests failed"
    )
    assert not failed or shown(revision_plans)["a"] == "2 4 100 Serving"


def test_rollout_max_failed_percent_sets_the_failure_limit() -> None:
    states = [replace(revisions("z 1/1 1/1 25"), health=RolloutHealth(100, 30)), revisions("a 2/2 3/3 75")]
    assert decide(wanted(maxFailedPercent=30), states, 1.0)["z"].phase == "Warming"
    assert decide(wanted(maxFailedPercent=29), states, 1.0)["z"].phase == "Failed"
    assert decide(wanted(maxFailedPercent=0, autoRollback=False), states, 1.0)["z"].phase == "Warming"


def streams(quick: int, slow: int) -> RolloutHealth:
    """Return the health of streams: `quick` had their first token within 2 s, `slow` within 4 s."""
    return RolloutHealth(quick + slow, 0, {2.0: quick, 4.0: quick + slow, math.inf: quick + slow})


SLOW = [
    pytest.param("2s", streams(94, 6), RolloutHealth(), True, id="more than may"),
    pytest.param("2s", streams(95, 5), RolloutHealth(), False, id="as many as may"),
    pytest.param("2s", streams(0, FAILURES), streams(100, 0), True, id="all of the first ones"),
    pytest.param("2s", streams(0, FAILURES - 1), RolloutHealth(), False, id="too few to say anything"),
    pytest.param("2s", streams(60, 40), streams(60, 40), False, id="not more than on the old one"),
    pytest.param("2s", streams(60, 40), streams(90, 10), True, id="more than on the old one"),
    pytest.param("1s", streams(60, 40), RolloutHealth(), True, id="slower than counts are exact"),
    pytest.param("3s", streams(0, 100), RolloutHealth(), False, id="perhaps not slower"),
    pytest.param("1h", streams(0, 100), RolloutHealth(), False, id="nothing is counted beyond"),
    pytest.param("2s", RolloutHealth(100, 0), RolloutHealth(), False, id="no streams"),
    pytest.param(None, streams(0, 100), RolloutHealth(), False, id="no limit"),
]


@pytest.mark.parametrize(("limit", "of_new", "of_old", "failed"), SLOW)
def test_rollout_slow_streams_only_on_new_revision_roll_back(
    limit: str | None, of_new: RolloutHealth, of_old: RolloutHealth, failed: bool
) -> None:
    new, old = (
        replace(revisions("z 1/1 1/1 25"), health=of_new),
        replace(revisions("a 2/2 3/3 75"), health=of_old),
    )
    revision_plans = decide(wanted(maxTimeToFirstToken=limit), [new, old], 1.0)
    assert (revision_plans["z"].phase == "Failed") == failed
    if failed:
        slow = of_new.slow(2.0)
        assert revision_plans["z"].failure == (
            f"{slow} of {of_new.streams} streams took longer than {limit} to their first token"
        )
        assert shown(revision_plans)["a"] == "2 4 100 Serving"
        without_rollback = decide(wanted(maxTimeToFirstToken=limit, autoRollback=False), [new, old], 1.0)
        assert without_rollback["z"].phase == "Warming"


@pytest.mark.parametrize("seed", range(50))
def test_rollout_revision_no_worse_than_old_one_is_kept(seed: int) -> None:
    """Nor is one that gets better by the same number of requests."""
    rng = random.Random(seed)
    policy: dict[str, Any] = {
        "maxTimeToFirstToken": rng.choice([None, "1s", "2s", "3s"]),
        "maxFailedPercent": rng.randrange(101),
    }
    quick, slow, failed = (rng.randrange(100) for _ in range(3))
    total = quick + slow + failed

    def health(better: int) -> RolloutHealth:
        less = min(better, slow)
        first_tokens = {2.0: quick + less, 4.0: quick + slow, math.inf: quick + slow}
        return RolloutHealth(total, max(0, failed - better), first_tokens)

    for better in (0, 1, rng.randrange(100)):
        new = replace(revisions("z 1/1 1/1 25"), health=health(better))
        old = replace(revisions("a 2/2 3/3 75"), health=health(0))
        assert decide(wanted(**policy), [new, old], 1.0)["z"].phase != "Failed"


def test_rollout_split_traffic_is_checked_often() -> None:
    want, new, old = wanted(), revisions("z 1/1 1/1 25"), revisions("a 2/2 3/3 75")
    assert seconds_until_change(want, [new, old], 0.0) == HEALTH_CHECK_S
    assert seconds_until_change(want, [replace(new, weight=0), old], 0.0) is None
    assert seconds_until_change(want, [revisions("z 2/2 4/4 100"), revisions("a 0/0 0/0")], 0.0) is None


def test_rollout_failed_revision_stays_failed() -> None:
    new = replace(revisions("z 0/0 0/0"), failed=True)
    revision_plans = decide(wanted(), [new, revisions("a 2/2 4/4 100")], 1.0)
    assert shown(revision_plans) == {"z": "0 0 0 Failed", "a": "2 4 100 Serving"}


def test_rollout_canary_follows_steps_and_old_revision_stays() -> None:
    want, old = wanted(canary=CANARY), revisions("a 2/2 4/4 100")
    assert Canary.model_validate(CANARY).steps[0] == CanaryStep(weight=10, pause=Duration("1m"))
    assert shown(decide(want, [revisions("z 0/0 0/0"), old], 0.0)) == {
        "z": "1 1 0 Warming",
        "a": "2 4 100 Serving",
    }
    ready = revisions("z 1/1 1/1")
    first_tokens = decide(want, [ready, old], 10.0)["z"]
    assert (first_tokens.weight, first_tokens.step, first_tokens.step_since) == (10, 0, 10.0)
    standing = replace(ready, step_since=10.0)
    assert seconds_until_change(want, [standing, old], 30.0) == 40.0
    assert decide(want, [standing, old], 69.0)["z"].step == 0
    further = decide(want, [standing, old], 70.0)
    assert shown(further) == {"z": "1 2 10 Warming", "a": "2 4 90 Serving"} and further["z"].step == 1
    second = replace(revisions("z 1/1 2/2"), step=1, step_since=80.0)
    assert shown(decide(want, [second, old], 100.0)) == {"z": "1 2 50 Warming", "a": "2 4 50 Serving"}
    over = decide(want, [second, old], 140.0)
    assert shown(over) == {"z": "2 3 50 Warming", "a": "1 2 50 Draining"}
    assert over["z"].step == 2
    assert seconds_until_change(want, [replace(standing, step=2), old], 30.0) is None, "it has gone all steps"
    assert seconds_until_change(want, [ready, old], 30.0) is None, "it does not stand on its step yet"
    lost = replace(standing, roles=revisions("z 1/1 0/1").roles)
    again = decide(want, [lost, old], 69.0)["z"]
    assert (again.weight, again.step, again.step_since) == (0, 0, None), "a step begins anew"


class Cluster:
    """Pods that get ready, and end, in a random order."""

    def __init__(self, rng: random.Random, want: RolloutTarget, generations: Sequence[RevisionState]) -> None:
        self.rng, self.want, self.seen = rng, want, list(generations)
        self.now = 0.0

    def turn(self) -> bool:
        """One decision and one thing that happens; whether anything is left to happen."""
        revision_plans = decide(self.want, self.seen, self.now)
        self.check(revision_plans)
        self.seen = [self._scaled(one, revision_plans[one.revision]) for one in self.seen]
        moves = [
            (number, name)
            for number, one in enumerate(self.seen)
            for name, state in one.roles.items()
            if state.ready != state.replicas or state.pods != state.replicas
        ]
        if moves:
            number, name = self.rng.choice(moves)
            self.seen[number] = self._moved(self.seen[number], name)
        self.now += 1.0
        return bool(moves) or decide(self.want, self.seen, self.now) != revision_plans

    def check(self, revision_plans: Mapping[str, RevisionPlan]) -> None:
        targets = self.want.targets
        weights = {name: one.weight for name, one in revision_plans.items()}
        assert sum(weights.values()) == ALL and min(weights.values()) >= 0, weights
        carried = sum(one.share(targets) for one in self.seen)
        for one in self.seen:
            if weights[one.revision] and carried:
                assert one.share(targets) > 0, "requests go only where both roles are ready"
        for name, target in targets.items():
            bounds = self.want.bounds[name]
            replicas = sum(one.replicas.get(name, 0) for one in revision_plans.values())
            most = target + max(1, bounds.surge) + (len(self.seen) > 2)
            assert replicas <= most, "no more than the surge, and the first worker of yet another generation"

    def kept_capacity(self) -> None:
        lost = max(
            (
                self.want.bounds[name].unavailable / target
                for name, target in self.want.targets.items()
                if target
            ),
            default=0.0,
        )
        carried = sum(one.share(self.want.targets) for one in self.seen)
        assert carried >= 1 - lost - 1e-9, "what serves is never less than what is allowed to be missing"

    def _scaled(self, one: RevisionState, fate: RevisionPlan) -> RevisionState:
        roles = {}
        for name, state in one.roles.items():
            replicas = fate.replicas[name]
            # Pods that are not ready end first.
            roles[name] = RoleState(replicas, min(state.ready, replicas), max(state.pods, replicas))
        return replace(one, roles=roles, weight=fate.weight)

    def _moved(self, one: RevisionState, name: RoleName) -> RevisionState:
        state = one.roles[name]
        if state.ready < state.replicas:
            moved = replace(state, ready=state.ready + 1)
            one = replace(one, progressed=self.now)
        else:
            moved = replace(state, pods=state.replicas)
        return replace(one, roles={**one.roles, name: moved})


def test_rollout_revision_with_terminating_pods_exists() -> None:
    """None of its workers is asked for any more, but requests finish on those that drain."""
    draining = replace(
        revisions("a 0/0 0/0"), roles={"prefill": RoleState(0, 0, 0), "decode": RoleState(0, 0, 1)}
    )
    assert draining.exists
    assert decide(wanted(), [revisions("z 2/2 4/4 100"), draining], 1.0)["a"].phase == "Draining"
    recreated = decide(wanted(strategy="Recreate"), [revisions("z 0/0 0/0"), draining], 1.0)
    assert shown(recreated)["z"] == "0 0 0 Warming", "nothing is started beside it"


def test_deadline_that_has_passed_is_not_looked_at_again() -> None:
    """A generation that has no other one to go back to is waited for, and not asked after without end."""
    assert seconds_until_change(wanted(progressDeadline="10m"), [revisions("z 0/1 0/1")], 601.0) is None


@pytest.mark.parametrize("seed", range(60))
def test_rollout_random_loses_no_capacity_keeps_bounds_and_ends(seed: int) -> None:
    rng = random.Random(seed)
    prefill, decode = rng.randint(1, 6), rng.randint(1, 6)
    surge, unavailable = rng.choice([(1, 0), (2, 0), (0, 1), (3, 1)])
    want = wanted(prefill, decode, surge, unavailable)
    old = RevisionState(
        "a",
        1.0,
        {"prefill": RoleState(prefill, prefill, prefill), "decode": RoleState(decode, decode, decode)},
        ALL,
    )
    new = RevisionState("z", 2.0, {"prefill": RoleState(), "decode": RoleState()})
    cluster = Cluster(rng, want, [new, old])
    for _ in range(500):
        cluster.kept_capacity()
        if not cluster.turn():
            break
    new, old = cluster.seen
    assert new.share(want.targets) == 1 and new.weight == ALL
    assert not old.exists


@pytest.mark.parametrize("seed", range(60))
def test_rollout_change_during_rollout_ends(seed: int) -> None:
    rng = random.Random(seed)
    want = wanted(rng.randint(1, 5), rng.randint(1, 5))
    whole = {name: RoleState(target, target, target) for name, target in want.targets.items()}
    none: dict[RoleName, RoleState] = {"prefill": RoleState(), "decode": RoleState()}
    first = replace(want, revision="m")
    cluster = Cluster(rng, first, [RevisionState("m", 2.0, none), RevisionState("a", 1.0, whole, ALL)])
    for _ in range(rng.randint(0, 15)):
        cluster.turn()
    cluster.want = want
    cluster.seen.insert(0, RevisionState("z", 3.0, none, progressed=cluster.now))
    for _ in range(500):
        cluster.kept_capacity()
        if not cluster.turn():
            break
    assert [one.exists for one in cluster.seen] == [True, False, False]
    assert math.isclose(cluster.seen[0].share(want.targets), 1.0)
