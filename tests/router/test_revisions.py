"""Several revisions of workers behind one router: pairs, weights, and the change from one to the next."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from baton_api.workers import Load, Role
from baton_http.upstream import Upstream
from baton_router.cache.prompt_chunks import PromptChunks, chunk_text
from baton_router.requests.picker import PickRequest
from baton_router.scheduling.placement import Placement
from baton_router.scheduling.placement_planner import PlacementPlanner
from baton_router.scheduling.revision_weights import AHEAD_LIMIT
from baton_router.workers.discovery.listed import ListedStatus
from baton_router.workers.worker import Worker
from baton_router.workers.worker_list import Workers


def worker(role: Role, port: int, revision: str, **load: Any) -> Worker:
    placement = Worker(Upstream("127.0.0.1", port, 1.0), role, revision)
    report = {"model": "tiny", "total_blocks": 10_000, "free_blocks": 10_000, "epoch": "1", **load}
    control = "x:1" if role is Role.PREFILL else ""
    placement.answered(Load(role=role, control=control, compatibility="same", **report))
    return placement


class Cluster:
    """Revisions `old` and `new`, each with two decode and two prefill workers."""

    def __init__(self, **weights: float) -> None:
        self.weights: Mapping[str, float] = weights
        ports = iter(range(8100, 8200))
        self.workers = Workers()
        for revision in ("old", "new"):
            for role in (Role.DECODE, Role.DECODE, Role.PREFILL, Role.PREFILL):
                self.workers.add(worker(role, next(ports), revision))
        self.planner = PlacementPlanner(self.workers, random.Random(0), 512, lambda: self.weights)
        self.now = 0.0

    def serve(self, prompt: PromptChunks, *excluded: str) -> Placement:
        placement = self.planner.plan(PickRequest(model="tiny", prompt=prompt, excluded=excluded), self.now)
        assert placement is not None
        self.planner.book(placement, self.now)
        self.now += 0.1
        self.planner.began(placement, None, self.now)
        self.planner.release(placement, self.now, complete=True)
        return placement

    def generations(self, count: int, seed: int = 0) -> Counter[str]:
        rng = random.Random(seed)
        return Counter(self.serve(text(rng)).pair.decode.revision for _ in range(count))

    def of(self, revision: str) -> list[Worker]:
        return [one for one in self.workers.listed if one.revision == revision]


def text(rng: random.Random, size: int = 20_000) -> PromptChunks:
    return chunk_text(rng.randbytes(size), 7)


@pytest.mark.parametrize("weights", [{}, {"old": 50.0, "new": 50.0}])
def test_pair_never_mixes_revisions(weights: dict[str, float]) -> None:
    cluster, rng = Cluster(**weights), random.Random(1)
    pairs = [cluster.serve(text(rng)).pair for _ in range(100)]
    assert all(pair.prefill is not None and pair.prefill.revision == pair.decode.revision for pair in pairs)
    assert {pair.decode.revision for pair in pairs} == {"old", "new"}


def test_revision_gets_its_weight() -> None:
    cluster = Cluster(old=90.0, new=10.0)
    assert cluster.generations(100) == {"old": 90, "new": 10}
    cluster.weights = {"old": 50.0, "new": 50.0}
    counts = cluster.generations(100, seed=1)
    assert abs(counts["new"] - 50) <= 1
    cluster.weights = {"old": 0.0, "new": 100.0}
    assert cluster.generations(20, seed=2) == {"new": 20}


def test_conversation_stays_in_its_revision_within_the_weights() -> None:
    cluster, rng = Cluster(old=80.0, new=20.0), random.Random(0)
    talks = [rng.randbytes(20_000) for _ in range(20)]
    counts, moved, before = Counter[str](), 0, dict[int, str]()
    for _ in range(600):
        turn = rng.randrange(len(talks))
        talks[turn] += rng.randbytes(600)
        revision = cluster.serve(chunk_text(talks[turn], 7)).pair.decode.revision
        counts[revision] += 1
        moved += before.setdefault(turn, revision) != revision
        before[turn] = revision
    assert abs(counts["new"] - 120) <= AHEAD_LIMIT + 1
    assert moved <= 30  # one turn in twenty; by chance it would be one in three


def test_revision_without_weight_serves_if_no_other_can() -> None:
    cluster = Cluster(new=100.0)
    assert cluster.generations(20) == {"new": 20}
    for one in cluster.of("new"):
        one.discovery_status = ListedStatus.UNREADY
    assert cluster.generations(20) == {"old": 20}  # better one without a weight than none


def test_request_tried_everywhere_goes_to_the_next_revision() -> None:
    cluster, rng = Cluster(new=100.0), random.Random(0)
    prompt = text(rng)
    excluded: list[str] = []
    for revision in ("new", "new", "old", "old"):
        placement = cluster.serve(prompt, *excluded)
        assert placement.pair.decode.revision == revision
        excluded.append(placement.pair.decode.name)


def test_draining_revision_gets_no_new_requests() -> None:
    cluster = Cluster(old=50.0, new=50.0)
    for one in cluster.of("old"):
        one.discovery_status = ListedStatus.TERMINATING
    assert cluster.generations(20) == {"new": 20}
