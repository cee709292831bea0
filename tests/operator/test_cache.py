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
    metadata_fields = {"name": name, "namespace": "models", "uid": uid, "labels": OURS, **metadata}
    return {
        "metadata": {**metadata_fields, "resourceVersion": str(version)},
        "data": {"version": str(version)},
    }


def store(*listed: Manifest, version: int = 10) -> ObjectStore:
    listed_store = ObjectStore(MAPS, "", lambda change: None)
    listed_store.replace(entries(*listed), version)
    return listed_store


def entries(*listed: Manifest) -> dict[tuple[str, str], CachedObject]:
    return {("models", one["metadata"]["name"]): cached_object(MAPS, one) for one in listed}


def kept(cache: ObjectStore, name: str = "one") -> str | None:
    """The version that readers see."""
    manifest = cache.get("models", name)
    return None if manifest is None else manifest["metadata"]["resourceVersion"]


class TestReadYourOwnWrites:
    def test_write_not_yet_watched_is_read(self) -> None:
        maps = store(config_map("one", 5))
        maps.wrote(config_map("one", 12))
        assert kept(maps) == "12"

    def test_older_event_after_write_is_ignored(self) -> None:
        maps = store(config_map("one", 5))
        maps.wrote(config_map("one", 12))
        maps.happened("MODIFIED", config_map("one", 11))
        assert kept(maps) == "12"
        maps.happened("MODIFIED", config_map("one", 13))
        assert kept(maps) == "13"

    def test_late_answer_after_deletion_is_ignored(self) -> None:
        """The watch was faster than the answer: what it has passed, it has also seen deleted."""
        maps = store()
        maps.happened("ADDED", config_map("one", 12))
        maps.happened("DELETED", config_map("one", 14))
        maps.wrote(config_map("one", 12))
        assert kept(maps) is None

    def test_deleted_object_does_not_come_back_by_old_event(self) -> None:
        maps = store(config_map("one", 5))
        maps.deleted("models", "one", "a")
        maps.happened("MODIFIED", config_map("one", 11))
        assert kept(maps) is None
        maps.happened("DELETED", config_map("one", 12))
        maps.happened("ADDED", config_map("one", 13, uid="b"))
        assert kept(maps) == "13"

    def test_recreated_object_survives_late_deletion_event(self) -> None:
        maps = store(config_map("one", 5))
        maps.deleted("models", "one", "a")
        maps.wrote(config_map("one", 13, uid="b"))
        maps.happened("DELETED", config_map("one", 12))
        assert kept(maps) == "13"

    def test_older_list_keeps_newer_write_and_deletion(self) -> None:
        maps = store(config_map("one", 5), config_map("two", 6))
        maps.wrote(config_map("new", 15))
        maps.wrote(config_map("one", 16))
        maps.deleted("models", "two", "a")
        maps.replace(entries(config_map("one", 5), config_map("two", 6)), 14)
        assert (kept(maps, "new"), kept(maps, "one"), kept(maps, "two")) == ("15", "16", None)

    def test_write_without_our_label_is_not_kept(self) -> None:
        maps = ObjectCache([], lambda change: None)
        for one in maps.stores:
            one.replace({}, 10)
        theirs = {"apiVersion": "v1", "kind": "ConfigMap", **config_map("one", 12, labels={})}
        maps.wrote(theirs)
        assert maps.get("ConfigMap", "models", "one") is None
        maps.wrote({**theirs, **config_map("one", 13)})
        assert maps.get("ConfigMap", "models", "one") is not None


def test_relist_after_410_removes_deleted_objects() -> None:
    maps = store(config_map("one", 5), config_map("two", 6))
    maps.replace(entries(config_map("two", 6)), 20)
    assert (kept(maps, "one"), kept(maps, "two")) == (None, "6")


def test_relist_of_restored_server_replaces_everything() -> None:
    """A server that was restored from a backup counts from an older version on."""
    maps = store(config_map("one", 50), config_map("two", 60), version=70)
    maps.replace(entries(config_map("one", 5)), 40)
    assert (kept(maps, "one"), kept(maps, "two")) == ("5", None)
    maps.happened("MODIFIED", config_map("one", 41))
    assert kept(maps, "one") == "41"


def test_kind_that_vanishes_leaves_nothing() -> None:
    maps = store(config_map("one", 5))
    maps.absent()
    assert (len(maps), maps.synced, maps.served) == (0, True, False)


def test_fields_that_nothing_reads_are_not_kept() -> None:
    fields: dict[str, Any] = {
        "managedFields": [{"manager": "baton"}],
        "annotations": {LAST_APPLIED: "x" * 1000, "a": "b"},
    }
    stored = store(config_map("one", 5, **fields)).get("models", "one")
    assert stored is not None
    assert "managedFields" not in stored["metadata"]
    assert stored["metadata"]["annotations"] == {"a": "b"}
    pods = ObjectStore(BY_KIND["Pod"], "", lambda change: None)
    pod = {**config_map("pod", 6, **fields), "spec": {"containers": []}, "status": {"podIP": "10.0.0.1"}}
    pods.replace({("models", "pod"): cached_object(BY_KIND["Pod"], pod)}, 10)
    maps = pods.get("models", "pod")
    assert maps is not None and maps.keys() == {"apiVersion", "kind", "metadata", "status"}
    assert "annotations" not in maps["metadata"]


def woken(resource: str, manifest: Manifest, before: Manifest | None = None) -> list[tuple[str, str, bool]]:
    """Kind and name of each key that the event wakes, and whether at once."""
    changes: list[ObjectChange] = []
    watched = ObjectStore(BY_KIND[resource], "", changes.append)
    watched.replace(
        {} if before is None else {("models", "one"): cached_object(BY_KIND[resource], before)}, 10
    )
    changes.clear()
    watched.happened("MODIFIED", manifest)
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
            [("InferenceService", "one", True), ("Scaling", "one", True), ("Adapters", "one", False)],
        ),
        (
            "InferenceService",
            SERVED,
            {**SERVED, "metadata": {**SERVED["metadata"], "resourceVersion": "12"}, "status": {"url": "x"}},
            [("InferenceService", "one", False)],
        ),
        ("LoraAdapter", None, {**SCALER}, [("Adapters", "chat", False)]),
        (
            "Pod",
            None,
            config_map("one", 12),
            [("InferenceService", "chat", False), ("Adapters", "chat", False)],
        ),
        ("BatchJob", None, {**SCALER, **COUNTED}, [("BatchJob", "one", False)]),
    ],
    ids=["owned", "same", "batch job", "stranger", "scaler", "spec", "status", "adapter", "pod", "batch"],
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
            by_kind = cache.store(kind, "models")
            assert by_kind is not None
            by_kind.replace({}, 10)
        for kind, manifest in events:
            changes.clear()
            by_kind = cache.store(kind, "models")
            assert by_kind is not None
            deleted = "deletionTimestamp" in manifest["metadata"]
            by_kind.happened("DELETED" if deleted else "MODIFIED", manifest)
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
            seen = self.store.get("models", name)
            if seen is not None:
                assert int(seen["metadata"]["resourceVersion"]) >= self.least.get(name, 0)
                assert seen["metadata"]["uid"] not in self.gone

    def write(self) -> None:
        name = self.rng.choice("abc")
        self.version += 1
        existing = self.objects.get(name)
        uid = existing["metadata"]["uid"] if existing else f"uid-{self.version}"
        self.objects[name] = config_map(name, self.version, uid)
        self.log.append(("MODIFIED" if existing else "ADDED", self.objects[name]))
        if self.rng.random() < 0.5:
            self.answers.append(self.objects[name])

    def delete(self) -> None:
        if not self.objects:
            return
        removed = self.objects.pop(self.rng.choice(sorted(self.objects)))
        name, uid = removed["metadata"]["name"], removed["metadata"]["uid"]
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
            maps = self.answers.pop(self.rng.randrange(len(self.answers)))
            self.store.wrote(maps)
            name = maps["metadata"]["name"]
            self.least[name] = max(self.least.get(name, 0), int(maps["metadata"]["resourceVersion"]))

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


class KopfsWorld(World):
    """Kopf delivers the events of an object in order, and those of different objects in any order."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.store = ObjectStore(BY_KIND["RoleScaler"], "", self._changed)
        self.store.replace({}, self.version)

    def deliver(self) -> None:
        for _ in range(self.rng.randint(1, 3)):
            first = {event[1]["metadata"]["uid"]: event for event in reversed(self.log)}
            if first:
                event = first[self.rng.choice(sorted(first))]
                self.log.remove(event)
                self.store.happened(*event)

    def relist(self) -> None:
        """The operator lists by itself, or kopf has lost what happened and lists without comparing."""
        if self.rng.random() < 0.5:
            self.log = [("ADDED", one) for one in self.objects.values()]
            return
        snapshot, version = entries(*self.objects.values()), self.version
        for _ in range(self.rng.randint(0, 3)):
            self.rng.choice([self.write, self.delete, self.answer, self.deliver])()
        self.store.replace(snapshot, version)


@pytest.mark.parametrize("seed", range(200))
def test_store_of_kopfs_events_ends_equal_to_server(seed: int) -> None:
    world = KopfsWorld(random.Random(seed))
    for _ in range(80):
        world.step()
    while world.answers:
        world.answer()
    while world.log:
        world.deliver()
    world.store.replace(entries(*world.objects.values()), world.version)
    wanted = {name: one["metadata"]["resourceVersion"] for name, one in world.objects.items()}
    assert {name: kept(world.store, name) for _, name in world.store.names()} == wanted


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
async def reflecting(
    api: FakeApi,
    namespaces: tuple[str, ...] = (),
    silence_s: float = 70.0,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[tuple[ObjectCache, Reflectors]]:
    client = await api_server.connect(str(api.kubeconfig))
    cache = ObjectCache(namespaces, lambda change: None)
    server = ApiServer(client, lambda: None, lambda method, code: None)
    reflectors = Reflectors(server, cache, clock, random.Random(seed), silence_s)
    tasks = reflectors.run()
    try:
        yield cache, reflectors
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


def expected_objects(api: FakeApi, namespaces: tuple[str, ...]) -> dict[tuple[str, str, str], Any]:
    """Return what a cache should hold: all that users write, and other objects with the operator's label."""
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
            kind = rng.choice(["ConfigMap", "Deployment", "Pod"])
            where = BY_KIND[kind].api, kind
            namespace, name = rng.choice(["models", "others", "elsewhere"]), rng.choice("abcdefgh")
            place = (where[0], BY_KIND[kind].plural, namespace, name)
            if place in api.objects and rng.random() < 0.4:
                await api.remove(*where, namespace, name)
                return
            object_labels = OURS if rng.random() < 0.7 else {labels.SERVICE: "chat"}
            spec = {"number": rng.random()}
            await api.store(
                *where,
                {"metadata": {"name": name, "namespace": namespace, "labels": object_labels}, "spec": spec},
            )

        async def refuse() -> None:
            api.answers = [rng.choice([403, 410, 429, 500, 503]) for _ in range(rng.randint(1, 4))]

        async def fail() -> None:
            await api.fail_watches(rng.choice([500, 504]))

        for _ in range(10):
            await change()
        faults = [api.cut, api.expire, api.bookmark, refuse, fail]
        async with reflecting(api, namespaces, seed=seed) as (cache, reflectors):
            for _ in range(60):
                await rng.choice([change, change, change, change, *faults])()
                if rng.random() < 0.5:
                    await asyncio.sleep(0.002 * rng.random())
            await until(lambda: seen_by(cache) == expected_objects(api, namespaces))
            await reflectors.synced()
            assert reflectors.unsynced == []


async def test_reflector_stalled_watch_is_restarted(tmp_path: Path) -> None:
    """A connection that is open and brings nothing, as behind a load balancer that has forgotten it."""
    async with FakeApi(tmp_path) as api, reflecting(api, silence_s=0.5) as (cache, reflectors):
        await reflectors.synced()
        api.silent = True
        await api.store("v1", "ConfigMap", config_map("one", 0))
        before = api.watches["configmaps"]
        await until(lambda: api.watches["configmaps"] > before)
        assert cache.get("ConfigMap", "models", "one") is None
        api.silent = False
        await until(lambda: cache.get("ConfigMap", "models", "one") is not None)


async def test_kind_that_kopf_watches_is_listed_when_in_doubt(tmp_path: Path) -> None:
    async with FakeApi(tmp_path) as api, reflecting(api) as (cache, reflectors):
        await reflectors.synced()
        await api.put({})
        reflectors.doubt("Deployment")
        reflectors.doubt("InferenceService")
        await until(lambda: cache.services() == [("models", "chat")])
        await api.remove(API, "InferenceService", "models", "chat", lose=True)
        reflectors.doubt("InferenceService")
        await until(lambda: cache.services() == [])
        assert "inferenceservices" not in api.watches and api.watches["deployments"]


async def test_quiet_kind_is_watched_without_pauses(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """
    A kind that has never changed gets no bookmark, so each of its watches ends by silence.

    Such an end is not a failure: after ten of them in a row, a pause that doubles would be minutes. The
    second failure in a row is logged.
    """
    ticks = itertools.count(step=10)
    async with FakeApi(tmp_path) as api:
        api.silent = True
        async with reflecting(api, silence_s=0.5, clock=lambda: float(next(ticks))):
            await until(lambda: min(api.watches.values(), default=0) > 4)
    assert "Cannot watch" not in caplog.text


async def test_kinds_that_cannot_be_listed_are_named(tmp_path: Path) -> None:
    """Reconciles wait meanwhile; kinds that the cluster does not serve delay nothing."""
    async with FakeApi(tmp_path) as api:
        api.refused = "pods"
        async with reflecting(api) as (cache, reflectors):
            await until(lambda: reflectors.unsynced == ["pods"])
            assert cache.apis == frozenset()
            assert reflectors.stale(1000.0) == []
            assert reflectors.stale(-1.0)
            api.refused = ""
            await reflectors.synced()
            assert reflectors.unsynced == []
