"""Lists of workers: what they say together, and what has changed between two."""

from __future__ import annotations

import random

import msgspec
import pytest

from baton_api import labels
from baton_api.workers import Role
from baton_router.workers.discovery.kubernetes import Slice, workers_in
from baton_router.workers.discovery.listed import Changes, Listed, Standing, changes, merged

A, B, C = (Listed(f"10.0.0.{last}", 8000, Role.DECODE, "r1") for last in (1, 2, 3))
PREFILL = Listed("10.0.0.1", 8000, Role.PREFILL, "r1")
NEXT = Listed("10.0.0.1", 8000, Role.DECODE, "r2")
ENDING = Listed("10.0.0.1", 8000, Role.DECODE, "r1", Standing.TERMINATING)
UNREADY = Listed("10.0.0.1", 8000, Role.DECODE, "r1", Standing.UNREADY)

TOGETHER: dict[str, tuple[list[Listed], list[Listed]]] = {
    "nobody": ([], []),
    "each once": ([A, B, A], [A, B]),
    "who ends for one ends": ([A, ENDING, A], [ENDING]),
    "who is unready for one is unready": ([UNREADY, A], [UNREADY]),
    "who ends is not unready as well": ([UNREADY, ENDING], [ENDING]),
    "the one who knows the revision is right": ([Listed("10.0.0.1", 8000, Role.DECODE), A], [A]),
    "an address has one role": ([PREFILL, A], [A]),
}


@pytest.mark.parametrize(("said", "together"), TOGETHER.values(), ids=TOGETHER.keys())
def test_what_several_say_is_one_list(said: list[Listed], together: list[Listed]) -> None:
    assert merged(said) == {one.name: one for one in together}


STEPS: dict[str, tuple[list[Listed], list[Listed], Changes]] = {
    "the same": ([A, B], [B, A], Changes()),
    "one comes": ([A], [A, B], Changes(came=(B,))),
    "one goes": ([A, B], [B], Changes(gone=(A.name,))),
    "all go": ([A, B], [], Changes(gone=(A.name, B.name))),
    "one takes another's place": ([A, B], [C, B], Changes(came=(C,), gone=(A.name,))),
    "one is about to end": ([A, B], [ENDING, B], Changes(stand=(ENDING,))),
    "one is well again": ([UNREADY], [A], Changes(stand=(A,))),
    "an address is given to the next generation": ([A], [NEXT], Changes(came=(NEXT,), gone=(A.name,))),
    "an address is given to the other role": ([A], [PREFILL], Changes(came=(PREFILL,), gone=(A.name,))),
}


@pytest.mark.parametrize(("before", "after", "change"), STEPS.values(), ids=STEPS.keys())
def test_from_one_list_to_the_next(before: list[Listed], after: list[Listed], change: Changes) -> None:
    assert changes(merged(before), merged(after)) == change
    assert bool(change) == (change != Changes())


def anybody(rng: random.Random) -> Listed:
    role = rng.choice((Role.DECODE, Role.PREFILL))
    return Listed(
        f"10.0.0.{rng.randrange(4)}", 8000, role, rng.choice(("", "a", "b")), rng.choice(list(Standing))
    )


@pytest.mark.parametrize("seed", range(100))
def test_whatever_is_listed_the_order_does_not_matter_and_changes_lead_there_and_then_end(seed: int) -> None:
    rng = random.Random(seed)
    present: dict[str, Listed] = {}
    for _ in range(20):
        said = [anybody(rng) for _ in range(rng.randrange(8))]
        desired = merged(said)
        rng.shuffle(said)
        assert merged(said) == merged(said + said) == merged(merged(said).values()) == desired
        change = changes(present, desired)
        for name in change.gone:
            del present[name]
        for one in change.came:
            assert one.name not in present  # nobody takes a place that is not free
            present[one.name] = one
        for one in change.stand:
            assert present[one.name].same(one)
            present[one.name] = one
        assert present == desired
        assert not changes(present, desired)


def pieces(**kind: object) -> Slice:
    """A slice as Kubernetes writes it."""
    given = {
        "metadata": {"name": "workers-x1", "labels": kind.pop("labels", {})},
        "addressType": kind.pop("family", "IPv4"),
        "ports": kind.pop("ports", [{"name": "http", "port": 8000, "protocol": "TCP"}]),
        **kind,
    }
    return msgspec.convert(given, Slice)


def endpoint(address: str, pod: str = "", **conditions: bool) -> dict[str, object]:
    target = {"targetRef": {"kind": "Pod", "name": pod, "uid": pod}} if pod else {}
    return {"addresses": [address], "conditions": conditions, **target}


def worker(address: str, role: Role = Role.DECODE, revision: str = "", **more: object) -> Listed:
    return Listed(address, 8000, role, revision, **more)  # type: ignore[arg-type]


ONE = [endpoint("10.0.0.1")]
PORTS = [{"name": "metrics", "port": 9090}, {"name": "http", "port": 8000}]
SLICES: dict[str, tuple[list[Slice], list[Listed]]] = {
    "no slices": ([], []),
    "no endpoints": ([pieces(endpoints=None)], []),
    "one": ([pieces(endpoints=ONE)], [worker("10.0.0.1")]),
    "spread over slices": (
        [pieces(endpoints=ONE), pieces(endpoints=[endpoint("10.0.0.2")])],
        [worker("10.0.0.1"), worker("10.0.0.2")],
    ),
    "in two slices while it is moved": ([pieces(endpoints=ONE), pieces(endpoints=ONE)], [worker("10.0.0.1")]),
    "role and revision": (
        [pieces(endpoints=ONE, labels={labels.ROLE: "prefill", labels.REVISION: "abc"})],
        [worker("10.0.0.1", Role.PREFILL, "abc")],
    ),
    "role both": ([pieces(endpoints=ONE, labels={labels.ROLE: "both"})], [worker("10.0.0.1")]),
    "a router's": ([pieces(endpoints=ONE, labels={labels.ROLE: "router"})], []),
    "the port by its name": ([pieces(endpoints=ONE, ports=PORTS)], [worker("10.0.0.1")]),
    "the only port by any name": ([pieces(endpoints=ONE, ports=[{"port": 8000}])], [worker("10.0.0.1")]),
    "by TLS": (
        [pieces(endpoints=ONE, ports=[{"name": "http", "port": 8000, "appProtocol": "https"}])],
        [worker("10.0.0.1", secure=True)],
    ),
    "no such port": ([pieces(endpoints=ONE, ports=[{"name": "a", "port": 1}, {"name": "b", "port": 2}])], []),
    "no ports": ([pieces(endpoints=ONE, ports=None)], []),
    "not ready": (
        [pieces(endpoints=[endpoint("10.0.0.1", ready=False)])],
        [worker("10.0.0.1", standing=Standing.UNREADY)],
    ),
    "ready for a Service that publishes all, and not serving": (
        [pieces(endpoints=[endpoint("10.0.0.1", ready=True, serving=False)])],
        [worker("10.0.0.1", standing=Standing.UNREADY)],
    ),
    "terminating and serving": (
        [pieces(endpoints=[endpoint("10.0.0.1", ready=False, serving=True, terminating=True)])],
        [worker("10.0.0.1", standing=Standing.TERMINATING)],
    ),
    "a pod with two families is one worker": (
        [
            pieces(endpoints=[endpoint("fd00::1", "pod-1"), endpoint("fd00::2", "pod-2")], family="IPv6"),
            pieces(endpoints=[endpoint("10.0.0.1", "pod-1")]),
        ],
        [worker("10.0.0.1"), worker("fd00::2")],
    ),
    "host names are no addresses": ([pieces(endpoints=[endpoint("a.example.org")], family="FQDN")], []),
}


@pytest.mark.parametrize(("slices", "workers"), SLICES.values(), ids=SLICES.keys())
def test_workers_of_slices(slices: list[Slice], workers: list[Listed]) -> None:
    assert merged(workers_in(slices, "http")) == merged(workers)
    assert merged(workers_in(slices[::-1], "http")) == merged(workers)
