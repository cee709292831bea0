"""Discovery by Kubernetes, with a fake API server that fails on command."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton_api.workers import Role
from baton_http.kubernetes import KubernetesAccess
from baton_router.workers.discovery.kubernetes import KubernetesWorkers
from baton_router.workers.discovery.listed import ListedStatus, ListedWorker
from tests.router.fake_kubernetes import SELECTOR, FakeKubernetes, a_slice
from tests.router.real_kubernetes import RealKubernetes
from tests.router.running import until

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"
LONG_S = 60.0


class Follower:
    """Records the lists of the source."""

    def __init__(self, source: KubernetesWorkers) -> None:
        self.source = source
        self.workers: frozenset[ListedWorker] = frozenset()
        self.notified = 0

    @property
    def addresses(self) -> set[str]:
        return {one.host for one in self.workers}

    async def sees(self, *addresses: str) -> None:
        await until(lambda: self.notified and self.addresses == set(addresses))

    def took(self, workers: frozenset[ListedWorker]) -> None:
        self.workers = workers
        self.notified += 1


@asynccontextmanager
async def followed(
    api: FakeKubernetes | RealKubernetes, list_every_s: float = LONG_S, list_s: float = LONG_S
) -> AsyncIterator[Follower]:
    access = KubernetesAccess(api.url, api.account)
    source = KubernetesWorkers(access, SELECTOR, "http", random.Random(0), list_every_s, 0.005, list_s)
    follower = Follower(source)
    task = asyncio.create_task(source.watch(follower.took))
    try:
        yield follower
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_workers_follow_the_watch(tmp_path: Path) -> None:
    async with FakeKubernetes(tmp_path) as api:
        api.put(a_slice("one", A))
        async with followed(api) as follower:
            await follower.sees(A)
            api.put(a_slice("two", B, role="prefill", revision="r2"))
            await follower.sees(A, B)
            assert ListedWorker(B, 8000, Role.PREFILL, "r2") in follower.workers
            api.put(a_slice("one", A, ready=False, serving=True, terminating=True))
            ending = ListedWorker(A, 8000, Role.DECODE, "r1", ListedStatus.TERMINATING)
            await until(lambda: ending in follower.workers)
            api.delete("one")
            await follower.sees(B)
            assert api.lists == 1


async def test_broken_watch_resumes_at_its_version(tmp_path: Path) -> None:
    async with FakeKubernetes(tmp_path) as api, followed(api) as follower:
        await until(lambda: len(api.watches) == 1)
        api.put(a_slice("one", A))
        await follower.sees(A)
        api.break_off()
        await until(lambda: len(api.watches) == 2)
        api.bookmark()
        api.put(a_slice("two", B))
        await follower.sees(A, B)
        assert (api.watches, api.lists) == (["100", "101"], 1)


async def test_bookmark_resumes_the_watch_without_a_list(tmp_path: Path) -> None:
    async with FakeKubernetes(tmp_path) as api:
        api.put(a_slice("one", A))
        async with followed(api) as follower:
            await follower.sees(A)
            for _ in range(5):
                api.bookmark()
            api.put(a_slice("two", B))
            await follower.sees(A, B)
            api.break_off()
            await until(lambda: len(api.watches) == 2)
            assert (api.watches, api.lists) == (["101", "107"], 1)


async def test_expired_version_is_listed_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeKubernetes(tmp_path) as api:
        api.put(a_slice("one", A))
        async with followed(api) as follower:
            await follower.sees(A)
            api.expire()  # reported in the watch
            api.put(a_slice("two", B))
            await follower.sees(A, B)
            api.break_off()
            api.expire()  # reported at the start of a watch
            api.delete("one")
            await follower.sees(B)
            assert api.lists == 3
    assert not caplog.records  # expiry is normal and not logged


async def test_full_list_repairs_a_lossy_watch(tmp_path: Path) -> None:
    async with FakeKubernetes(tmp_path) as api:
        api.put(a_slice("one", A, B))
        async with followed(api, list_every_s=0.1) as follower:
            await follower.sees(A, B)
            api.put(a_slice("one", A), lose=True)
            await follower.sees(A)
            api.delete("one", lose=True)
            await follower.sees()


FAILURES = {
    "it keeps silent": ({"silent": True}, "no answer in time"),
    "it forbids": ({"status": 403}, "may not list and watch endpointslices"),
    "it fails": ({"status": 500}, "status 500"),
    "it knows no such token": ({"token": "token-2"}, "the account's token is not accepted"),
}


@pytest.mark.parametrize(("failure", "reason"), FAILURES.values(), ids=FAILURES.keys())
async def test_known_workers_stay_while_lists_fail(
    tmp_path: Path,
    failure: dict[str, object],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with FakeKubernetes(tmp_path) as api:
        api.put(a_slice("one", A))
        async with followed(api, list_every_s=0.1, list_s=2.0) as follower:
            await follower.sees(A)
            for name, value in failure.items():
                setattr(api, name, value)
            api.break_off()
            await until(lambda: follower.source.trouble)
            assert reason in follower.source.trouble
            assert follower.addresses == {A}
            api.silent, api.status, api.token = False, 0, "token-1"
            api.put(a_slice("two", B))
            await follower.sees(A, B)
            assert not follower.source.trouble
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


async def test_replaced_token_is_used(tmp_path: Path) -> None:
    async with FakeKubernetes(tmp_path) as api, followed(api, list_every_s=0.05) as follower:
        api.put(a_slice("one", A))
        await follower.sees(A)
        api.token = "token-2"
        (api.account / "token").write_text("token-2")
        api.put(a_slice("two", B), lose=True)
        await follower.sees(A, B)


async def test_api_server_without_the_cluster_certificate_is_not_used(
    tmp_path: Path,
) -> None:
    (tmp_path / "other").mkdir()
    async with FakeKubernetes(tmp_path) as api, FakeKubernetes(tmp_path / "other") as other:
        api.put(a_slice("one", A))
        (other.account / "ca.crt").write_bytes((api.account / "ca.crt").read_bytes())
        async with followed(other) as follower:
            await until(lambda: "certificate verify failed" in follower.source.trouble)
            assert not other.lists


MISSING = {
    "token": "token cannot be read",
    "ca.crt": "ca.crt cannot be read",
    "namespace": "namespace cannot",
}


@pytest.mark.parametrize(("name", "reason"), MISSING.items())
async def test_missing_permissions_are_reported(tmp_path: Path, name: str, reason: str) -> None:
    async with FakeKubernetes(tmp_path) as api:
        kept = (api.account / name).read_bytes()
        (api.account / name).unlink()
        api.put(a_slice("one", A))
        async with followed(api) as follower:
            await until(lambda: reason in follower.source.trouble)
            (api.account / name).write_bytes(kept)
            await follower.sees(A)


@pytest.mark.parametrize("seed", range(8))
async def test_law_workers_follow_the_cluster_under_random_failures(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    names = ["one", "two", "three"]
    async with FakeKubernetes(tmp_path) as api, followed(api, list_every_s=0.15) as follower:
        existing: set[str] = set()
        for _ in range(40):
            name, lose = rng.choice(names), rng.random() < 0.2
            match rng.randrange(8):
                case 0 | 1 | 2 | 3:
                    api.put(a_slice(name, *rng.sample([A, B, C, "10.0.0.4"], rng.randrange(4))), lose=lose)
                    existing.add(name)
                case 4 | 5 if name in existing:
                    api.delete(name, lose=lose)
                    existing.discard(name)
                case 6:
                    api.break_off()
                case 7:
                    rng.choice([api.expire, api.bookmark])()
            await asyncio.sleep(rng.choice([0, 0, 0.002]))
        await follower.sees(*api.addresses)
        assert not follower.source.trouble
