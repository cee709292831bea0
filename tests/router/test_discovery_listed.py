"""Lists of workers: what they say together, and what has changed between two."""

from __future__ import annotations

import random

import msgspec
import pytest

from baton_api import labels
from baton_api.workers import Role
from baton_router.workers.discovery.kubernetes import EndpointSlice, workers_in
from baton_router.workers.discovery.listed import (
    ListChanges,
    ListedStatus,
    ListedWorker,
    list_changes,
    merge_lists,
)

A, B, C = (ListedWorker(f"10.0.0.{last}", 8000, Role.DECODE, "r1") for last in (1, 2, 3))
PREFILL = ListedWorker("10.0.0.1", 8000, Role.PREFILL, "r1")
NEXT = ListedWorker("10.0.0.1", 8000, Role.DECODE, "r2")
ENDING = ListedWorker("10.0.0.1", 8000, Role.DECODE, "r1", ListedStatus.TERMINATING)
UNREADY = ListedWorker("10.0.0.1", 8000, Role.DECODE, "r1", ListedStatus.UNREADY)

TOGETHER: dict[str, tuple[list[ListedWorker], list[ListedWorker]]] = {
    "nobody": ([], []),
    "each once": ([A, B, A], [A, B]),
    "who ends for one ends": ([A, ENDING, A], [ENDING]),
    "who is unready for one is unready": ([UNREADY, A], [UNREADY]),
    "who ends is not unready as well": ([UNREADY, ENDING], [ENDING]),
    "the one who knows the revision is right": ([ListedWorker("10.0.0.1", 8000, Role.DECODE), A], [A]),
    "an address has one role": ([PREFILL, A], [A]),
}


@pytest.mark.parametrize(("lists", "together"), TOGETHER.values(), ids=TOGETHER.keys())
def test_lists_of_several_sources_are_merged(lists: list[ListedWorker], together: list[ListedWorker]) -> None:
    assert merge_lists(lists) == {one.name: one for one in together}


STEPS: dict[str, tuple[list[ListedWorker], list[ListedWorker], ListChanges]] = {
    "the same": ([A, B], [B, A], ListChanges()),
    "one comes": ([A], [A, B], ListChanges(added=(B,))),
    "one goes": ([A, B], [B], ListChanges(removed=(A.name,))),
    "all go": ([A, B], [], ListChanges(removed=(A.name, B.name))),
    "one takes another's place": ([A, B], [C, B], ListChanges(added=(C,), removed=(A.name,))),
    "one is about to end": ([A, B], [ENDING, B], ListChanges(status_changed=(ENDING,))),
    "one is well again": ([UNREADY], [A], ListChanges(status_changed=(A,))),
    "an address is given to the next generation": (
        [A],
        [NEXT],
        ListChanges(added=(NEXT,), removed=(A.name,)),
    ),
    "an address is given to the other role": (
        [A],
        [PREFILL],
        ListChanges(added=(PREFILL,), removed=(A.name,)),
    ),
}


@pytest.mark.parametrize(("before", "after", "change"), STEPS.values(), ids=STEPS.keys())
def test_list_difference_gives_added_changed_and_removed(
    before: list[ListedWorker], after: list[ListedWorker], change: ListChanges
) -> None:
    assert list_changes(merge_lists(before), merge_lists(after)) == change
    assert bool(change) == (change != ListChanges())


def anybody(rng: random.Random) -> ListedWorker:
    role = rng.choice((Role.DECODE, Role.PREFILL))
    return ListedWorker(
        f"10.0.0.{rng.randrange(4)}", 8000, role, rng.choice(("", "a", "b")), rng.choice(list(ListedStatus))
    )


@pytest.mark.parametrize("seed", range(100))
def test_law_order_of_lists_does_not_matter_and_changes_converge(seed: int) -> None:
    rng = random.Random(seed)
    present: dict[str, ListedWorker] = {}
    for _ in range(20):
        lists = [anybody(rng) for _ in range(rng.randrange(8))]
        desired = merge_lists(lists)
        rng.shuffle(lists)
        assert (
            merge_lists(lists)
            == merge_lists(lists + lists)
            == merge_lists(merge_lists(lists).values())
            == desired
        )
        change = list_changes(present, desired)
        for name in change.removed:
            del present[name]
        for one in change.added:
            assert one.name not in present  # a name is added only if it is free
            present[one.name] = one
        for one in change.status_changed:
            assert present[one.name].same(one)
            present[one.name] = one
        assert present == desired
        assert not list_changes(present, desired)


def pieces(**kind: object) -> EndpointSlice:
    """A slice as Kubernetes writes it."""
    given = {
        "metadata": {"name": "workers-x1", "labels": kind.pop("labels", {})},
        "addressType": kind.pop("family", "IPv4"),
        "ports": kind.pop("ports", [{"name": "http", "port": 8000, "protocol": "TCP"}]),
        **kind,
    }
    return msgspec.convert(given, EndpointSlice)


def endpoint(address: str, pod: str = "", **conditions: bool) -> dict[str, object]:
    target = {"targetRef": {"kind": "Pod", "name": pod, "uid": pod}} if pod else {}
    return {"addresses": [address], "conditions": conditions, **target}


def worker(address: str, role: Role = Role.DECODE, revision: str = "", **more: object) -> ListedWorker:
    return ListedWorker(address, 8000, role, revision, **more)  # type: ignore[arg-type]


ONE = [endpoint("10.0.0.1")]
PORTS = [{"name": "metrics", "port": 9090}, {"name": "http", "port": 8000}]
SLICES: dict[str, tuple[list[EndpointSlice], list[ListedWorker]]] = {
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
        [worker("10.0.0.1", discovery_status=ListedStatus.UNREADY)],
    ),
    "ready for a Service that publishes all, and not serving": (
        [pieces(endpoints=[endpoint("10.0.0.1", ready=True, serving=False)])],
        [worker("10.0.0.1", discovery_status=ListedStatus.UNREADY)],
    ),
    "terminating and serving": (
        [pieces(endpoints=[endpoint("10.0.0.1", ready=False, serving=True, terminating=True)])],
        [worker("10.0.0.1", discovery_status=ListedStatus.TERMINATING)],
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
def test_workers_of_slices(slices: list[EndpointSlice], workers: list[ListedWorker]) -> None:
    assert merge_lists(workers_in(slices, "http")) == merge_lists(workers)
    assert merge_lists(workers_in(slices[::-1], "http")) == merge_lists(workers)
