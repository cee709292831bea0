"""
What the operator knows of the cluster: all watched objects, in memory. Reconcilers read from here.

Each kind has a store, which a reflector keeps up to date. The answers of the operator's own writes go into
the store at once, so that a reconciler never sees a state from before its last write. Versions decide which
of two states is newer: Kubernetes defines that resource versions of one kind are comparable numbers.

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
from baton_operator.manifests.objects import Key, Manifest

DROPPED = frozenset({"managedFields", "resourceVersion", "selfLink"})
"""Fields of metadata that are not kept; the version is kept apart."""

LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""A copy of the whole object in an annotation."""

ObjectName = tuple[str, str]
"""Namespace and name."""


@dataclass(frozen=True, slots=True)
class CachedObject:
    """One object, as it is kept."""

    version: int
    uid: str
    service: str
    """Name of the InferenceService that it belongs to; empty if it belongs to none."""
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
    """Name of the BatchJob that it belongs to; empty if it belongs to none."""
    respecified: bool = True
    """Whether its spec changed: false if only status or metadata did."""
    routes: tuple[ObjectName, ...] = ()
    """For a Gateway: the InferenceServices whose HTTPRoute names it."""


Listener = Callable[[ObjectChange], None]


def cached_object(resource: ApiResource, manifest: Manifest) -> CachedObject:
    """An object as it came from the API server."""
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
    found: str
    if resource.kind == "InferenceService":
        found = manifest["metadata"]["name"]
    elif resource.custom:
        found = manifest.get("spec", {}).get("serviceName", "")
    else:
        found = manifest["metadata"].get("labels", {}).get(labels.SERVICE, "")
    return found


class ObjectStore:
    """Objects of one kind, of one namespace or of all (`namespace` is empty)."""

    def __init__(self, resource: ApiResource, namespace: str, listener: Listener) -> None:
        self.resource = resource
        self.namespace = namespace
        self.version = 0
        """Up to which the watch has delivered all changes."""
        self.synced = False
        """Whether all objects have been listed once."""
        self.served = True
        """Whether the cluster has this kind."""
        self._listener = listener
        self._entries: dict[ObjectName, CachedObject] = {}
        self._of_service: dict[ObjectName, set[str]] = {}
        self._deleted: dict[ObjectName, str] = {}
        """Uids of objects that the operator deleted, until the watch delivers their deletion."""

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, namespace: str, name: str) -> Manifest | None:
        found = self._entries.get((namespace, name))
        return None if found is None else self._manifest(found)

    def of_service(self, namespace: str, service: str) -> list[Manifest]:
        """All that belong to the service, by name."""
        found = self._of_service.get((namespace, service), ())
        return [self._manifest(self._entries[namespace, name]) for name in sorted(found)]

    def names(self) -> list[ObjectName]:
        return sorted(self._entries)

    def replace(self, listed: Mapping[ObjectName, CachedObject], version: int) -> None:
        """All objects there were at that version, as a list has given them."""
        # A server that was restored from a backup counts from an older version on.
        restored = version < self.version
        for name in [name for name in self._entries if name not in listed]:
            if restored or self._entries[name].version <= version:
                self._remove(name)
        self._deleted = {
            name: uid for name, uid in self._deleted.items() if name in listed and listed[name].uid == uid
        }
        for name, found in listed.items():
            there = self._entries.get(name)
            if restored or there is None or there.version < found.version:
                self._put(name, found)
        self.version = version
        self.synced = self.served = True

    def absent(self) -> None:
        """The cluster does not serve this kind."""
        for name in list(self._entries):
            self._remove(name)
        self._deleted.clear()
        self.version, self.synced, self.served = 0, True, False

    def happened(self, event: str, manifest: Manifest) -> None:
        """One event of a watch: ADDED, MODIFIED, DELETED or BOOKMARK."""
        version = int(manifest["metadata"]["resourceVersion"])
        self.version = max(self.version, version)
        if event == "BOOKMARK":
            return
        name = manifest["metadata"].get("namespace", ""), manifest["metadata"]["name"]
        there = self._entries.get(name)
        if event == "DELETED":
            if self._deleted.get(name) == manifest["metadata"].get("uid", ""):
                del self._deleted[name]
            if there is not None and there.version <= version:
                self._remove(name)
        elif there is None or there.version < version:
            self._put(name, cached_object(self.resource, manifest))

    def wrote(self, manifest: Manifest) -> None:
        """The answer of a write: kept until the watch delivers this state or a newer one."""
        found = cached_object(self.resource, manifest)
        # What the watch has passed already is in the store, or was deleted since.
        if not self.synced or not self.served or found.version <= self.version:
            return
        name = manifest["metadata"].get("namespace", ""), manifest["metadata"]["name"]
        there = self._entries.get(name)
        if there is None or there.version < found.version:
            self._put(name, found)

    def deleted(self, namespace: str, name: str, uid: str) -> None:
        """The operator has deleted this object; events of before do not bring it back."""
        there = self._entries.get((namespace, name))
        if there is not None and there.uid == uid:
            self._deleted[namespace, name] = uid
            self._remove((namespace, name))

    def _put(self, name: ObjectName, new: CachedObject) -> None:
        if self._deleted.get(name) == new.uid:
            return
        old = self._entries.get(name)
        if old is not None and old.service != new.service:
            self._unlink(name, old)
        self._entries[name] = new
        self._of_service.setdefault((name[0], new.service), set()).add(name[1])
        if old is None or old.text != new.text:
            respecified = old is None or (old.uid, old.generation) != (new.uid, new.generation)
            made = self._manifest(new)
            self._listener(ObjectChange(self.resource, *name, new.service, made, new.batch_job, respecified))

    def _remove(self, name: ObjectName) -> None:
        old = self._entries.pop(name)
        self._unlink(name, old)
        self._listener(ObjectChange(self.resource, *name, old.service, None, old.batch_job))

    def _unlink(self, name: ObjectName, old: CachedObject) -> None:
        names = self._of_service[name[0], old.service]
        names.discard(name[1])
        if not names:
            del self._of_service[name[0], old.service]

    def _manifest(self, found: CachedObject) -> Manifest:
        made: dict[str, Any] = msgspec.json.decode(found.text)
        made["metadata"]["resourceVersion"] = str(found.version)
        return {"apiVersion": self.resource.api, "kind": self.resource.kind, **made}


class ObjectCache:
    """All stores. `namespaces`: those that are watched; all of the cluster if there are none."""

    def __init__(self, namespaces: Sequence[str], listener: Listener) -> None:
        self._listener = listener
        self._numbers = itertools.count(1)
        self._changes: dict[ObjectName, int] = {}
        self._routes: dict[ObjectName, set[ObjectName]] = {}
        """InferenceServices by the Gateways that their HTTPRoutes name."""
        self._stores = {
            (one.kind, namespace): ObjectStore(one, namespace, self._changed)
            for one in WATCHED
            for namespace in namespaces or ("",)
        }
        self._everywhere = not namespaces

    @property
    def stores(self) -> Sequence[ObjectStore]:
        return tuple(self._stores.values())

    @property
    def unsynced(self) -> list[str]:
        """Plurals of kinds that have not been listed yet."""
        return sorted({one.resource.plural for one in self.stores if not one.synced})

    @property
    def apis(self) -> frozenset[str]:
        """Optional APIs that the cluster serves."""
        optional = [one for one in self.stores if one.resource.optional and one.resource.owned]
        return frozenset(one.resource.api for one in optional if one.served)

    def store(self, kind: str, namespace: str) -> ObjectStore | None:
        """None if the kind, or this namespace, is not watched."""
        return self._stores.get((kind, "" if self._everywhere else namespace))

    def get(self, kind: str, namespace: str, name: str) -> Manifest | None:
        """None if there is no such object."""
        store = self.store(kind, namespace)
        return None if store is None else store.get(namespace, name)

    def of_service(self, namespace: str, service: str, *kinds: str) -> Iterator[Manifest]:
        """Objects of these kinds that belong to the service; of all kinds if none are named."""
        for kind in kinds or [one.kind for one in WATCHED]:
            store = self.store(kind, namespace)
            if store is not None:
                yield from store.of_service(namespace, service)

    def services(self) -> list[ObjectName]:
        """All InferenceServices."""
        stores = [one for one in self.stores if one.resource.kind == "InferenceService"]
        return [name for one in stores for name in one.names()]

    def changed(self, namespace: str, service: str) -> int:
        """A number that grows whenever an object of the service changes; 0 if none ever did."""
        return self._changes.get((namespace, service), 0)

    def wrote(self, manifest: Manifest) -> None:
        """The API server's answer to a write of the operator's."""
        metadata = manifest["metadata"]
        store = self.store(manifest["kind"], metadata.get("namespace", ""))
        if store is None or store.resource.api != manifest["apiVersion"]:
            return
        if not store.resource.owned or metadata.get("labels", {}).get(labels.MANAGED_BY) == labels.OPERATOR:
            store.wrote(manifest)

    def deleted(self, key: Key, namespace: str, uid: str) -> None:
        """The API server has carried out a deletion of the operator's."""
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
        for gateway in [one for one, routes in self._routes.items() if service in routes]:
            self._routes[gateway].discard(service)
            if not self._routes[gateway]:
                del self._routes[gateway]
        for gateway in named:
            self._routes.setdefault(gateway, set()).add(service)
