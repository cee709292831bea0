"""
The cache: all watched objects in memory. Reconcilers read from it.

Each kind has a store, which a reflector keeps current; events of custom resources come from kopf. Responses
to the operator's own writes go into the store immediately, so a reconciler never sees a state from before its
last write. Versions decide which of two states is newer: in Kubernetes, resource versions of one kind are
comparable numbers.

Objects are kept as JSON and parsed at each read. That takes a fifth of the memory of parsed objects, and a
reader may change what it gets. Fields that nothing reads are dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from baton_api import batch_jobs, labels
from baton_operator.cluster.api_resources import WATCHED, ApiResource
from baton_operator.manifests import exposure
from baton_operator.manifests.objects import Key, Manifest, ObjectName

DROPPED = frozenset({"managedFields", "resourceVersion", "selfLink"})
"""Fields of metadata that are not stored; the version is stored separately."""

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""Annotation with a copy of the whole object."""


@dataclass(frozen=True, slots=True)
class CachedObject:
    """One stored object."""

    version: int
    uid: str
    service: str
    """Name of its InferenceService, or empty."""
    batch_job: str
    generation: int
    text: bytes


@dataclass(frozen=True, slots=True)
class ObjectChange:
    """An object was created, changed or deleted."""

    resource: ApiResource
    namespace: str
    name: str
    service: str
    manifest: Manifest | None
    """None once it is deleted."""
    batch_job: str = ""
    """Name of its BatchJob, or empty."""
    spec_changed: bool = True
    """Whether the spec changed, and not only status or metadata."""
    routes: tuple[ObjectName, ...] = ()
    """For a Gateway: the InferenceServices whose HTTPRoute names it."""
    by_others: bool = False
    """Whether the object is gone and the operator did not delete it."""


Listener = Callable[[ObjectChange], None]


def cached_object(resource: ApiResource, manifest: Manifest) -> CachedObject:
    """Return the stored form of an object from the API server."""
    metadata = {name: value for name, value in manifest["metadata"].items() if name not in DROPPED}
    if resource.kind == "Pod":
        metadata.pop("annotations", None)
        kept = {"metadata": metadata, "status": manifest.get("status", {})}
    else:
        if LAST_APPLIED in metadata.get("annotations", {}):
            others = {name: text for name, text in metadata["annotations"].items() if name != LAST_APPLIED}
            metadata["annotations"] = others
        others = {name: value for name, value in manifest.items() if name not in ("apiVersion", "kind")}
        kept = {**others, "metadata": metadata}
    return CachedObject(
        version=int(manifest["metadata"]["resourceVersion"]),
        uid=metadata.get("uid", ""),
        service=_service(resource, manifest),
        batch_job=metadata.get("labels", {}).get(batch_jobs.LABEL, ""),
        generation=metadata.get("generation", 0),
        text=msgspec.json.encode(kept),
    )


def _service(resource: ApiResource, manifest: Manifest) -> str:
    service: str
    if resource.kind == "InferenceService":
        service = manifest["metadata"]["name"]
    elif resource.custom:
        service = manifest.get("spec", {}).get("serviceName", "")
    else:
        service = manifest["metadata"].get("labels", {}).get(labels.SERVICE, "")
    return service


class ObjectStore:
    """Objects of one kind, of one namespace or of all (`namespace` is empty)."""

    def __init__(self, resource: ApiResource, namespace: str, listener: Listener) -> None:
        self.resource = resource
        self.namespace = namespace
        self.version = 0
        """Version up to which the list or watch has delivered all changes."""
        self.synced = False
        """Whether the objects have been listed."""
        self.served = True
        """Whether the cluster serves this kind."""
        self._listener = listener
        self._entries: dict[ObjectName, CachedObject] = {}
        self._of_service: dict[ObjectName, set[str]] = {}
        self._deleted: dict[ObjectName, str] = {}
        """UIDs of objects that the operator deleted, until the watch delivers the deletion."""
        self._gone: dict[ObjectName, int] = {}
        """Versions of deletions since the last list. Kopf's events of different objects, and responses to
        writes, arrive in any order."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, namespace: str, name: str) -> Manifest | None:
        stored = self._entries.get((namespace, name))
        return None if stored is None else self._manifest(stored)

    def of_service(self, namespace: str, service: str) -> list[Manifest]:
        """Return the objects of the service, sorted by name."""
        stored = self._of_service.get((namespace, service), ())
        return [self._manifest(self._entries[namespace, name]) for name in sorted(stored)]

    def names(self) -> list[ObjectName]:
        return sorted(self._entries)

    def replace(self, listed: Mapping[ObjectName, CachedObject], version: int) -> None:
        """Replace all objects by a list of that version."""
        # A server that was restored from a backup continues from an older version.
        restored = version < self.version
        self._gone = {} if restored else {name: at for name, at in self._gone.items() if at > version}
        for name in [name for name in self._entries if name not in listed]:
            if restored or self._entries[name].version <= version:
                self._remove(name, by_others=True)
        self._deleted = {
            name: uid for name, uid in self._deleted.items() if name in listed and listed[name].uid == uid
        }
        for name, stored in listed.items():
            existing = self._entries.get(name)
            if restored or existing is None or existing.version < stored.version:
                self._put(name, stored)
        self.version = version
        self.synced = self.served = True

    def absent(self) -> None:
        """Empty the store: the cluster does not serve this kind."""
        for name in list(self._entries):
            self._remove(name)
        self._deleted.clear()
        self.version, self.synced, self.served = 0, True, False

    def happened(self, event: str, manifest: Manifest) -> None:
        """Apply an event of the watch: ADDED, MODIFIED, DELETED or BOOKMARK."""
        version = int(manifest["metadata"]["resourceVersion"])
        if not self.resource.custom:
            self.version = max(self.version, version)
        if event == "BOOKMARK":
            return
        name = manifest["metadata"].get("namespace", ""), manifest["metadata"]["name"]
        existing = self._entries.get(name)
        if event == "DELETED":
            if self._deleted.get(name) == manifest["metadata"].get("uid", ""):
                del self._deleted[name]
            self._is_gone(name, version)
            if existing is not None and existing.version <= version:
                self._remove(name, by_others=True)
            return
        # A list of a kind that kopf watches may be ahead of its events: what is missing there is gone.
        missing = self.version if self.resource.custom else 0
        if version > (missing if existing is None else existing.version):
            self._put(name, cached_object(self.resource, manifest))

    def wrote(self, manifest: Manifest) -> None:
        """Store the response to a write, until the watch delivers this version or a newer one."""
        stored = cached_object(self.resource, manifest)
        # The watch has delivered this version already, or a deletion after it.
        if not self.synced or not self.served or stored.version <= self.version:
            return
        name = manifest["metadata"].get("namespace", ""), manifest["metadata"]["name"]
        existing = self._entries.get(name)
        if existing is None or existing.version < stored.version:
            self._put(name, stored)

    def deleted(self, namespace: str, name: str, uid: str) -> None:
        """Remove an object that the operator deleted. Older events do not restore it."""
        existing = self._entries.get((namespace, name))
        if existing is not None and existing.uid == uid:
            self._deleted[namespace, name] = uid
            self._is_gone((namespace, name), existing.version)
            self._remove((namespace, name))

    def _is_gone(self, name: ObjectName, version: int) -> None:
        if self.resource.custom:
            self._gone[name] = max(version, self._gone.get(name, 0))

    def _put(self, name: ObjectName, new: CachedObject) -> None:
        if self._deleted.get(name) == new.uid or new.version <= self._gone.get(name, 0):
            return
        old = self._entries.get(name)
        if old is not None and old.service != new.service:
            self._unlink(name, old)
        self._entries[name] = new
        self._of_service.setdefault((name[0], new.service), set()).add(name[1])
        if old is None or old.text != new.text:
            spec_changed = old is None or (old.uid, old.generation) != (new.uid, new.generation)
            manifest = self._manifest(new)
            self._listener(
                ObjectChange(self.resource, *name, new.service, manifest, new.batch_job, spec_changed)
            )

    def _remove(self, name: ObjectName, *, by_others: bool = False) -> None:
        old = self._entries.pop(name)
        self._unlink(name, old)
        change = ObjectChange(self.resource, *name, old.service, None, old.batch_job, by_others=by_others)
        self._listener(change)

    def _unlink(self, name: ObjectName, old: CachedObject) -> None:
        names = self._of_service[name[0], old.service]
        names.discard(name[1])
        if not names:
            del self._of_service[name[0], old.service]

    def _manifest(self, stored: CachedObject) -> Manifest:
        manifest: dict[str, Any] = msgspec.json.decode(stored.text)
        manifest["metadata"]["resourceVersion"] = str(stored.version)
        return {"apiVersion": self.resource.api, "kind": self.resource.kind, **manifest}


class ObjectCache:
    """The stores of all kinds. `namespaces`: the watched ones; empty means all."""

    def __init__(self, namespaces: Sequence[str], listener: Listener) -> None:
        self._listener = listener
        self._numbers = itertools.count(1)
        self._changes: dict[ObjectName, int] = {}
        self._routes: dict[ObjectName, set[ObjectName]] = {}
        """InferenceServices by the Gateways that their HTTPRoutes name."""
        self._stores = {
            (resource.kind, namespace): ObjectStore(resource, namespace, self._changed)
            for resource in WATCHED
            for namespace in namespaces or ("",)
        }
        self._everywhere = not namespaces

    @property
    def stores(self) -> Sequence[ObjectStore]:
        return tuple(self._stores.values())

    @property
    def unsynced(self) -> list[str]:
        """Plurals of kinds that have not been listed yet."""
        return sorted({store.resource.plural for store in self.stores if not store.synced})

    @property
    def apis(self) -> frozenset[str]:
        """Optional APIs that the cluster serves."""
        optional = [store for store in self.stores if store.resource.optional and store.resource.owned]
        return frozenset(one.resource.api for one in optional if one.served)

    def store(self, kind: str, namespace: str) -> ObjectStore | None:
        """Return the store, or None if the kind or namespace is not watched."""
        return self._stores.get((kind, "" if self._everywhere else namespace))

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """Return the object, or None if it does not exist."""
        store = self.store(kind, namespace)
        return None if store is None else store.get(namespace, name)

    def service(self, namespace: str, name: str) -> Manifest | None:
        """Return the InferenceService; None if it does not exist or is being deleted."""
        service = self.get("InferenceService", namespace, name)
        return None if service is None or "deletionTimestamp" in service["metadata"] else service

    def of_service(self, namespace: str, service: str, *kinds: str) -> Iterator[Manifest]:
        """Yield the objects of the service of these kinds; without kinds, of all."""
        for kind in kinds or [resource.kind for resource in WATCHED]:
            store = self.store(kind, namespace)
            if store is not None:
                yield from store.of_service(namespace, service)

    def services(self) -> list[ObjectName]:
        """All InferenceServices."""
        stores = [store for store in self.stores if store.resource.kind == "InferenceService"]
        return [name for store in stores for name in store.names()]

    def changed(self, namespace: str, service: str) -> int:
        """Return a number that grows with each change of an object of the service; 0 without changes."""
        return self._changes.get((namespace, service), 0)

    def wrote(self, manifest: Manifest) -> None:
        """Store the response to a write of the operator."""
        metadata = manifest["metadata"]
        store = self.store(manifest["kind"], metadata.get("namespace", ""))
        if store is None or store.resource.api != manifest["apiVersion"]:
            return
        if not store.resource.owned or metadata.get("labels", {}).get(labels.MANAGED_BY) == labels.OPERATOR:
            store.wrote(manifest)

    def deleted(self, key: Key, namespace: str, uid: str) -> None:
        """Remove an object that the operator deleted."""
        store = self.store(key[1], namespace)
        if store is not None:
            store.deleted(namespace, key[2], uid)

    def _changed(self, change: ObjectChange) -> None:
        service = change.namespace, change.service
        if change.resource.kind == "InferenceService":
            self._route(service, change.manifest)
        elif change.resource.kind == "Gateway":
            routes = self._routes.get((change.namespace, change.name), ())
            change = replace(change, routes=tuple(sorted(routes)))
        if change.resource.kind == "InferenceService" and change.manifest is None:
            self._changes.pop(service, None)
        else:
            self._changes[service] = next(self._numbers)
        self._listener(change)

    def _route(self, service: ObjectName, manifest: Manifest | None) -> None:
        """Index a service by the Gateways that its HTTPRoute names."""
        named = () if manifest is None else exposure.gateways(manifest)
        for gateway in [name for name, routes in self._routes.items() if service in routes]:
            self._routes[gateway].discard(service)
            if not self._routes[gateway]:
                del self._routes[gateway]
        for gateway in named:
            self._routes.setdefault(gateway, set()).add(service)
