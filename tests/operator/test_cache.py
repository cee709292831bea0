"""The cache: which of two states is kept, and that it ends equal to the API server whatever happens."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from baton_api import batch_jobs, labels
from baton_operator import work_queue
from baton_operator.cluster import api_server
from baton_operator.cluster.api_resources import API, WATCHED
from baton_operator.cluster.api_server import ApiServer
from baton_operator.cluster.cache import (
    LAST_APPLIED,
    CachedObject,
    ObjectCache,
    ObjectChange,
    ObjectStore,
    cached_object,
)
from baton_operator.cluster.reflector import Reflectors
from baton_operator.manifests.objects import Manifest
from tests.operator.fake_api import FakeApi
from tests.operator.real_cluster import until

BY_KIND = {one.kind: one for one in WATCHED}
MAPS = BY_KIND["ConfigMap"]
OURS = {labels.MANAGED_BY: labels.OPERATOR, labels.SERVICE: "chat"}


def config_map(name: str, version: int, uid: str = "a", **metadata: Any) -> Manifest:
    made = {"name": name, "namespace": "models", "uid": uid, "labels": OURS, **metadata}
    return {"metadata": {**made, "resourceVersion": str(version)}, "data": {"version": str(version)}}


def store(*listed: Manifest, version: int = 10) -> ObjectStore:
    made = ObjectStore(MAPS, "", lambda change: None)
    made.replace(entries(*listed), version)
    return made


def entries(*listed: Manifest) -> dict[tuple[str, str], CachedObject]:
    return {("models", one["metadata"]["name"]): cached_object(MAPS, one) for one in listed}


def kept(made: ObjectStore, name: str = "one") -> str | None:
    """The version that readers see."""
    found = made.get("models", name)
    return None if found is None else found["metadata"]["resourceVersion"]


class TestReadYourOwnWrites:
    def test_write_not_yet_watched_is_read(self) -> None:
        made = store(config_map("one", 5))
        made.wrote(config_map("one", 12))
        assert kept(made) == "12"

    def test_older_event_after_write_is_ignored(self) -> None:
        made = store(config_map("one", 5))
        made.wrote(config_map("one", 12))
        made.happened("MODIFIED", config_map("one", 11))
        assert kept(made) == "12"
        made.happened("MODIFIED", config_map("one", 13))
        assert kept(made) == "13"

    def test_late_answer_after_deletion_is_ignored(self) -> None:
        """The watch was faster than the answer: what it has passed, it has also seen deleted."""
        made = store()
        made.happened("ADDED", config_map("one", 12))
        made.happened("DELETED", config_map("one", 14))
        made.wrote(config_map("one", 12))
        assert kept(made) is None

    def test_deleted_object_does_not_come_back_by_old_event(self) -> None:
        made = store(config_map("one", 5))
        made.deleted("models", "one", "a")
        made.happened("MODIFIED", config_map("one", 11))
        assert kept(made) is None
        made.happened("DELETED", config_map("one", 12))
        made.happened("ADDED", config_map("one", 13, uid="b"))
        assert kept(made) == "13"

    def test_object_made_anew_survives_its_forerunners_deletion(self) -> None:
        made = store(config_map("one", 5))
        made.deleted("models", "one", "a")
        made.wrote(config_map("one", 13, uid="b"))
        made.happened("DELETED", config_map("one", 12))
        assert kept(made) == "13"

    def test_older_list_keeps_newer_write_and_deletion(self) -> None:
        made = store(config_map("one", 5), config_map("two", 6))
        made.wrote(config_map("new", 15))
        made.wrote(config_map("one", 16))
        made.deleted("models", "two", "a")
        made.replace(entries(config_map("one", 5), config_map("two", 6)), 14)
        assert (kept(made, "new"), kept(made, "one"), kept(made, "two")) == ("15", "16", None)

    def test_write_without_our_label_is_not_kept(self) -> None:
        made = ObjectCache([], lambda change: None)
        for one in made.stores:
            one.replace({}, 10)
        theirs = {"apiVersion": "v1", "kind": "ConfigMap", **config_map("one", 12, labels={})}
        made.wrote(theirs)
        assert made.get("ConfigMap", "models", "one") is None
        made.wrote({**theirs, **config_map("one", 13)})
        assert made.get("ConfigMap", "models", "one") is not None


def test_relist_after_410_removes_what_is_gone() -> None:
    made = store(config_map("one", 5), config_map("two", 6))
    made.replace(entries(config_map("two", 6)), 20)
    assert (kept(made, "one"), kept(made, "two")) == (None, "6")


def test_relist_of_restored_server_replaces_everything() -> None:
    """A server that was restored from a backup counts from an older version on."""
    made = store(config_map("one", 50), config_map("two", 60), version=70)
    made.replace(entries(config_map("one", 5)), 40)
    assert (kept(made, "one"), kept(made, "two")) == ("5", None)
    made.happened("MODIFIED", config_map("one", 41))
    assert kept(made, "one") == "41"


def test_kind_that_vanishes_leaves_nothing() -> None:
    made = store(config_map("one", 5))
    made.absent()
    assert (len(made), made.synced, made.served) == (0, True, False)


def test_fields_that_nothing_reads_are_not_kept() -> None:
    fields: dict[str, Any] = {
        "managedFields": [{"manager": "baton"}],
        "annotations": {LAST_APPLIED: "x" * 1000, "a": "b"},
    }
    found = store(config_map("one", 5, **fields)).get("models", "one")
    assert found is not None
    assert "managedFields" not in found["metadata"]
    assert found["metadata"]["annotations"] == {"a": "b"}
    pods = ObjectStore(BY_KIND["Pod"], "", lambda change: None)
    pod = {**config_map("pod", 6, **fields), "spec": {"containers": []}, "status": {"podIP": "10.0.0.1"}}
    pods.replace({("models", "pod"): cached_object(BY_KIND["Pod"], pod)}, 10)
    made = pods.get("models", "pod")
    assert made is not None and made.keys() == {"apiVersion", "kind", "metadata", "status"}
    assert "annotations" not in made["metadata"]


def woken(resource: str, manifest: Manifest, before: Manifest | None = None) -> list[tuple[str, str, bool]]:
    """Kind and name of each key that the event wakes, and whether at once."""
    changes: list[ObjectChange] = []
    made = ObjectStore(BY_KIND[resource], "", changes.append)
    made.replace({} if before is None else {("models", "one"): cached_object(BY_KIND[resource], before)}, 10)
    changes.clear()
    made.happened("MODIFIED", manifest)
    return [
        (*key[::2], after == 0) for change in changes for key, after in work_queue.keys_to_reconcile(change)
    ]


OF_BATCH = {batch_jobs.LABEL: "night", labels.SERVICE: "chat"}
SERVED: Manifest = {"metadata": config_map("one", 5, generation=1)["metadata"], "spec": {}}
COUNTED = {"status": {"phase": "in_progress", "observedGeneration": 1}}
SCALER = {"metadata": config_map("one", 12)["metadata"], "spec": {"serviceName": "chat", "role": "decode"}}


@pytest.mark.parametrize(
    ("kind", "before", "manifest", "keys"),
    [
        ("ConfigMap", None, config_map("one", 12), [("InferenceService", "chat", False)]),
        ("ConfigMap", config_map("one", 5), {**config_map("one", 12), "data": {"version": "5"}}, []),
        ("Job", None, config_map("one", 12, labels=OF_BATCH), [("BatchJob", "night", False)]),
        ("Pod", None, config_map("one", 12, labels={}), []),
        ("RoleScaler", None, SCALER, [("InferenceService", "chat", False)]),
        (
            "InferenceService",
            SERVED,
            {**SERVED, "metadata": {**SERVED["metadata"], "resourceVersion": "12", "generation": 2}},
            [("InferenceService", "one", True), ("Scaling", "one", True)],
        ),
        (
            "InferenceService",
            SERVED,
            {**SERVED, "metadata": {**SERVED["metadata"], "resourceVersion": "12"}, "status": {"url": "x"}},
            [("InferenceService", "one", False)],
        ),
        ("LoraAdapter", None, {**SCALER}, [("LoraAdapter", "one", False)]),
        ("BatchJob", None, {**SCALER, **COUNTED}, [("BatchJob", "one", False)]),
    ],
    ids=["owned", "same", "batch job", "stranger", "scaler", "spec", "status", "adapter", "batch"],
)  # fmt: skip
def test_change_wakes_the_keys_it_is_about(
    kind: str, before: Manifest | None, manifest: Manifest, keys: list[tuple[str, str, bool]]
) -> None:
    assert woken(kind, manifest, before) == keys


class TestGatewayChanges:
    """A change of a Gateway wakes the services whose HTTPRoute names it, and no others."""

    def woken(self, *events: tuple[str, Manifest]) -> list[str]:
        """Services that the last event wakes."""
        changes: list[ObjectChange] = []
        cache = ObjectCache((), changes.append)
        for kind in ("InferenceService", "Gateway"):
            found = cache.store(kind, "models")
            assert found is not None
            found.replace({}, 10)
        for kind, manifest in events:
            changes.clear()
            found = cache.store(kind, "models")
            assert found is not None
            deleted = "deletionTimestamp" in manifest["metadata"]
            found.happened("DELETED" if deleted else "MODIFIED", manifest)
        return [key[2] for change in changes for key, _ in work_queue.keys_to_reconcile(change)]

    def service(self, name: str, version: int, *gateways: str) -> tuple[str, Manifest]:
        exposure = {"type": "HTTPRoute", "gatewayRefs": [{"name": one} for one in gateways]}
        spec = {"exposure": exposure} if gateways else {}
        metadata = config_map(name, version, f"uid-{name}", generation=version)["metadata"]
        return "InferenceService", {"metadata": metadata, "spec": spec}

    def gateway(self, version: int, generation: int = 1, **more: Any) -> tuple[str, Manifest]:
        metadata = config_map("front", version, "uid-front", generation=generation, **more)["metadata"]
        return "Gateway", {"metadata": metadata, "spec": {"listeners": []}, "status": {"seen": version}}

    def test_new_gateway_wakes_services_that_name_it(self) -> None:
        services = (self.service("a", 11, "front"), self.service("b", 12, "other"), self.service("c", 13))
        assert self.woken(*services, self.gateway(14)) == ["a"]

    def test_changed_listener_wakes_and_status_does_not(self) -> None:
        before = (self.service("a", 11, "front"), self.gateway(12))
        assert self.woken(*before, self.gateway(13)) == []
        assert self.woken(*before, self.gateway(13, generation=2)) == ["a"]

    def test_deleted_gateway_wakes_services_that_named_it(self) -> None:
        before = (self.service("a", 11, "front"), self.service("b", 12, "front"), self.gateway(13))
        assert self.woken(*before, self.gateway(14, deletionTimestamp="now")) == ["a", "b"]

    def test_service_that_no_longer_names_it_is_left_alone(self) -> None:
        before = (self.service("a", 11, "front"), self.service("a", 12, "other"))
        assert self.woken(*before, self.gateway(13)) == []


class World:
    """A server with a log of changes, and a store that hears of them late and in pieces."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.version = 10
        self.objects: dict[str, Manifest] = {}
        self.log: list[tuple[str, Manifest]] = []
        self.delivered = 0
        self.answers: list[Manifest] = []
        self.mirror: dict[str, str] = {}
        self.store = ObjectStore(MAPS, "", self._changed)
        self.store.replace({}, self.version)
        self.least: dict[str, int] = {}
        """Own writes that were answered: the version below which nothing may be read."""
        self.gone: set[str] = set()
        """Uids of own deletions that were answered."""

    def _changed(self, change: ObjectChange) -> None:
        if change.manifest is None:
            del self.mirror[change.name]
        else:
            self.mirror[change.name] = change.manifest["data"]["version"]

    def step(self) -> None:
        choices = [self.write, self.write, self.delete, self.deliver, self.deliver, self.answer, self.relist]
        self.rng.choice(choices)()
        for name in "abc":
            found = self.store.get("models", name)
            if found is not None:
                assert int(found["metadata"]["resourceVersion"]) >= self.least.get(name, 0)
                assert found["metadata"]["uid"] not in self.gone

    def write(self) -> None:
        name = self.rng.choice("abc")
        self.version += 1
        there = self.objects.get(name)
        uid = there["metadata"]["uid"] if there else f"uid-{self.version}"
        self.objects[name] = config_map(name, self.version, uid)
        self.log.append(("MODIFIED" if there else "ADDED", self.objects[name]))
        if self.rng.random() < 0.5:
            self.answers.append(self.objects[name])

    def delete(self) -> None:
        if not self.objects:
            return
        there = self.objects.pop(self.rng.choice(sorted(self.objects)))
        name, uid = there["metadata"]["name"], there["metadata"]["uid"]
        self.version += 1
        self.log.append(("DELETED", config_map(name, self.version, uid)))
        seen = self.store.get("models", name)
        # The operator deletes what it has read, by its uid.
        if seen is not None and seen["metadata"]["uid"] == uid and self.rng.random() < 0.7:
            self.answers = [one for one in self.answers if one["metadata"]["uid"] != uid]
            self.store.deleted("models", name, uid)
            self.gone.add(uid)

    def answer(self) -> None:
        """One of the operator's writes is answered, perhaps long after its event."""
        if self.answers:
            made = self.answers.pop(self.rng.randrange(len(self.answers)))
            self.store.wrote(made)
            name = made["metadata"]["name"]
            self.least[name] = max(self.least.get(name, 0), int(made["metadata"]["resourceVersion"]))

    def deliver(self) -> None:
        for event in self.log[self.delivered : self.delivered + self.rng.randint(1, 3)]:
            self.store.happened(*event)
            self.delivered += 1

    def relist(self) -> None:
        """The watch has expired; writes are answered while the list is under way."""
        snapshot, version, delivered = entries(*self.objects.values()), self.version, len(self.log)
        for _ in range(self.rng.randint(0, 3)):
            self.rng.choice([self.write, self.delete, self.answer])()
        self.store.replace(snapshot, version)
        self.delivered = delivered


@pytest.mark.parametrize("seed", range(200))
def test_store_ends_equal_to_server_whatever_the_order(seed: int) -> None:
    """And on the way, no reader sees a state from before an answered write or deletion."""
    world = World(random.Random(seed))
    for _ in range(80):
        world.step()
    while world.answers:
        world.answer()
    while world.delivered < len(world.log):
        world.deliver()
    wanted = {name: one["metadata"]["resourceVersion"] for name, one in world.objects.items()}
    assert {name: kept(world.store, name) for _, name in world.store.names()} == wanted
    assert world.mirror == wanted, "whoever listens has heard of every change"
    assert [one["metadata"]["name"] for one in world.store.of_service("models", "chat")] == sorted(wanted)


@asynccontextmanager
async def following(
    api: FakeApi,
    namespaces: tuple[str, ...] = (),
    silence_s: float = 70.0,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[tuple[ObjectCache, Reflectors]]:
    client = await api_server.connect(str(api.kubeconfig))
    cache = ObjectCache(namespaces, lambda change: None)
    server = ApiServer(client, lambda: None, lambda method, code: None)
    made = Reflectors(server, cache, clock, random.Random(seed), silence_s)
    tasks = made.run()
    try:
        yield cache, made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()


def seen_by(cache: ObjectCache) -> dict[tuple[str, str, str], Any]:
    return {
        (one.resource.kind, *name): one.get(*name)["metadata"]["resourceVersion"]  # type: ignore[index]
        for one in cache.stores
        for name in one.names()
    }


def there(api: FakeApi, namespaces: tuple[str, ...]) -> dict[tuple[str, str, str], Any]:
    """What a cache should hold: all that users write, and of the rest what has the operator's label."""
    return {
        (one["kind"], namespace, name): one["metadata"]["resourceVersion"]
        for (_, _, namespace, name), one in api.objects.items()
        if (not namespaces or namespace in namespaces)
        and (one["apiVersion"] == API or one["metadata"]["labels"].get(labels.MANAGED_BY) == labels.OPERATOR)
    }


@pytest.mark.parametrize("seed", range(12))
async def test_cache_ends_equal_to_server_through_faults(tmp_path: Path, seed: int) -> None:
    """Through watches that end, expire and fail, lists by page that expire, and errors to any request."""
    rng = random.Random(seed)
    namespaces = ("models", "others") if seed % 3 == 0 else ()
    async with FakeApi(tmp_path) as api:
        api.page = rng.choice([1, 2, 5])

        async def change() -> None:
            kind = rng.choice(["ConfigMap", "Deployment", "InferenceService"])
            where = BY_KIND[kind].api, kind
            namespace, name = rng.choice(["models", "others", "elsewhere"]), rng.choice("abcdefgh")
            place = (where[0], BY_KIND[kind].plural, namespace, name)
            if place in api.objects and rng.random() < 0.4:
                await api.remove(*where, namespace, name)
                return
            said = OURS if rng.random() < 0.7 else {labels.SERVICE: "chat"}
            spec = {"number": rng.random()}
            await api.store(
                *where, {"metadata": {"name": name, "namespace": namespace, "labels": said}, "spec": spec}
            )

        async def refuse() -> None:
            api.answers = [rng.choice([403, 410, 429, 500, 503]) for _ in range(rng.randint(1, 4))]

        async def fail() -> None:
            await api.fail_watches(rng.choice([500, 504]))

        for _ in range(10):
            await change()
        faults = [api.cut, api.expire, api.bookmark, refuse, fail]
        async with following(api, namespaces, seed=seed) as (cache, reflectors):
            for _ in range(60):
                await rng.choice([change, change, change, change, *faults])()
                if rng.random() < 0.5:
                    await asyncio.sleep(0.002 * rng.random())
            await until(lambda: seen_by(cache) == there(api, namespaces))
            await reflectors.synced()
            assert reflectors.unsynced == []


async def test_watch_that_stalls_is_begun_anew(tmp_path: Path) -> None:
    """A connection that is open and brings nothing, as behind a load balancer that has forgotten it."""
    async with FakeApi(tmp_path) as api, following(api, silence_s=0.5) as (cache, reflectors):
        await reflectors.synced()
        api.silent = True
        await api.put({})
        before = api.watches["inferenceservices"]
        await until(lambda: api.watches["inferenceservices"] > before)
        assert cache.services() == []
        api.silent = False
        await until(lambda: cache.services() == [("models", "chat")])


async def test_quiet_kind_is_watched_without_pauses(tmp_path: Path) -> None:
    """
    No bookmark comes for a kind of which nothing has ever changed, so each of its watches ends by silence.

    That is no failure: after ten of them in a row, a pause that doubles would be minutes.
    """
    ticks = itertools.count(step=10)
    async with FakeApi(tmp_path) as api:
        api.silent = True
        async with following(api, silence_s=0.02, clock=lambda: float(next(ticks))):
            await until(lambda: min(api.watches.values(), default=0) > 12, 30)


async def test_kinds_that_cannot_be_listed_are_named(tmp_path: Path) -> None:
    """Nothing is reconciled meanwhile, and nothing is waited for that the cluster does not serve."""
    async with FakeApi(tmp_path) as api:
        api.refused = "pods"
        async with following(api) as (cache, reflectors):
            await until(lambda: reflectors.unsynced == ["pods"])
            assert cache.apis == frozenset()
            assert reflectors.stale(1000.0) == []
            assert reflectors.stale(-1.0)
            api.refused = ""
            await reflectors.synced()
            assert reflectors.unsynced == []
