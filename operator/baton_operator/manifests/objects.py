"""
A manifest: labels and owner, its difference from what exists, and the conditions of its status.

An annotation holds the hash of the manifest that an object was created from. Without it, a field that is no
longer desired would look like one that another client added. The operator restores desired fields that
others changed.

A condition has a reason, one word for programs, and a message for people. Its transition time changes only
with its status.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from baton_operator import names
from baton_operator.crd import GROUP, VERSION
from baton_operator.kinds.part import MESSAGE_LIMIT, amount

Manifest = dict[str, Any]

ObjectName = tuple[str, str]
"""Namespace and name."""

Key = tuple[str, str, str]
"""apiVersion, kind and name of an object in the service's namespace."""


def key(manifest: Manifest) -> Key:
    return manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"]


@dataclass(frozen=True, slots=True)
class Owner:
    """The InferenceService that everything belongs to."""

    name: str
    namespace: str
    uid: str

    @property
    def reference(self) -> Manifest:
        """Return the owner reference with which Kubernetes deletes the objects of a deleted service."""
        return {
            "apiVersion": f"{GROUP}/{VERSION}",
            "kind": "InferenceService",
            "name": self.name,
            "uid": self.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }


def owned(
    owner: Owner,
    api: str,
    kind: str,
    name: str,
    body: Mapping[str, Any],
    labels: names.Labels | None = None,
    annotations: names.Labels | None = None,
) -> Manifest:
    """Return an object that the service owns: metadata and `body`."""
    return {
        "apiVersion": api,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": owner.namespace,
            "labels": labels or names.of_service(owner.name),
            **({"annotations": annotations} if annotations else {}),
            "ownerReferences": [owner.reference],
        },
        **body,
    }


def given(**fields: Any) -> Manifest:
    """Those fields that have a value: an empty one means something else to Kubernetes than none."""
    return {name: value for name, value in fields.items() if value not in (None, "", [], {}, ())}


def merged(base: Manifest, over: Mapping[str, Any] | None) -> Manifest:
    """
    `base` with `over` merged into it: objects by field, lists of named things by name, all else replaced.

    >>> merged({"c": [{"name": "main", "tty": False}]}, {"c": [{"name": "main", "tty": True}, {"name": "x"}]})
    {'c': [{'name': 'main', 'tty': True}, {'name': 'x'}]}
    """
    result = dict(base)
    for key, value in (over or {}).items():
        before = result.get(key)
        if isinstance(before, dict) and isinstance(value, Mapping):
            result[key] = merged(before, value)
        elif isinstance(before, list) and _named(before) and _named(value):
            result[key] = _merged_by_name(before, value)
        else:
            result[key] = value
    return result


def _named(value: object) -> bool:
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(one, dict) and "name" in one for one in value)


def _merged_by_name(base: list[Manifest], over: list[Manifest]) -> list[Manifest]:
    overlays = {overlay["name"]: overlay for overlay in over}
    kept = [merged(one, overlays.pop(one["name"], None)) for one in base]
    return [*kept, *(overlay for overlay in over if overlay["name"] in overlays)]


def digest(value: Any) -> str:
    """Return 16 hexadecimal digits, equal for equal values of JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def seconds(time: str) -> float:
    """
    Unix seconds of a time as Kubernetes writes it.

    >>> seconds("1970-01-01T00:01:00Z")
    60.0
    """
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def timestamp(time: float) -> str:
    """
    A time as Kubernetes writes it, in whole seconds.

    >>> timestamp(60.7)
    '1970-01-01T00:01:00Z'
    """
    return datetime.fromtimestamp(int(time), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


Condition = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Fact:
    """A condition as determined now."""

    type: str
    true: bool | None
    """None: unknown."""
    reason: str
    message: str = ""

    @property
    def status(self) -> str:
        return "Unknown" if self.true is None else str(self.true)


@dataclass(frozen=True, slots=True)
class Transition:
    """A condition whose status changed, which becomes an Event."""

    fact: Fact
    warning: bool


ReportTransition = Callable[[Manifest, Transition], None]
"""Reports a transition of an object as an Event and in metrics. Does not wait and never raises."""

GOOD = frozenset(
    {
        *("Ready", "Available", "ModelReady", "PrefillReady", "DecodeReady", "RouterReady", "SpecSupported"),
        *("ExposureReady", "UpToDate", "Active"),
    }
)
"""Conditions that are true in a healthy service or adapter."""

BAD = frozenset({"Degraded", "Failed"})
"""Conditions that are false in a healthy service."""

QUIET = frozenset({"Available"})
"""Conditions without Events: Ready changes with them."""


def written(
    facts: Iterable[Fact], before: Sequence[Mapping[str, Any]], generation: int, now: float
) -> tuple[list[Condition], list[Transition]]:
    """Return the conditions for status, and the changes since `before`. Other types are not in them."""
    before_by_type = {condition["type"]: condition for condition in before}
    conditions: list[Condition] = []
    transitions: list[Transition] = []
    for fact in facts:
        old = before_by_type.get(fact.type)
        same = old is not None and old["status"] == fact.status
        conditions.append(
            {
                "type": fact.type,
                "status": fact.status,
                "reason": fact.reason,
                "message": fact.message[:MESSAGE_LIMIT],
                "observedGeneration": generation,
                "lastTransitionTime": old["lastTransitionTime"] if same and old else timestamp(now),
            }
        )
        if fact.type in QUIET:
            continue
        if not same and fact.true is not None and (old is not None or fact.true):
            bad = fact.true if fact.type in BAD else not fact.true and fact.type in GOOD
            transitions.append(Transition(fact, bad))
    return conditions, transitions


def by_type(manifest: Mapping[str, Any] | None) -> dict[str, Condition]:
    """Return the conditions in the status of an object by their types; empty without an object."""
    return {
        condition["type"]: condition
        for condition in (manifest or {}).get("status", {}).get("conditions") or ()
    }


def updated(before: Sequence[Condition], conditions: Sequence[Condition]) -> list[Condition]:
    """Return `before` with `conditions` in place of those of the same type. Others are another writer's."""
    ours = {condition["type"]: condition for condition in conditions}
    return [*(ours.pop(condition["type"], condition) for condition in before), *ours.values()]


ANNOTATION = "baton.dev/applied"

TEMPLATE = "baton.dev/template"
"""Hash of the rendered selector and pod template of a Deployment or LeaderWorkerSet of workers."""

TEMPLATE_FIELDS = ("selector", "template", "leaderWorkerTemplate")
"""Fields of Deployments and LeaderWorkerSets whose change replaces pods."""


def with_hash(desired: Manifest) -> Manifest:
    """Return the manifest with an annotation of its hash."""
    metadata = desired["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION: digest(desired)}
    return {**desired, "metadata": {**metadata, "annotations": annotations}}


def keep_template(existing: Manifest | None, desired: Manifest) -> Manifest:
    """
    Return the workload `desired`, with the pod template of `existing` if another operator rendered that one.

    Another template would restart the pods in place. So a hash in the Deployment says which one was
    rendered for it. If this operator renders the same, what others have changed is put back. If not, the
    pods keep what they were started with.
    """
    fields = [name for name in TEMPLATE_FIELDS if name in desired["spec"]]
    rendered = digest({name: desired["spec"][name] for name in fields})
    before = (existing or {}).get("metadata", {}).get("annotations", {}).get(TEMPLATE)
    metadata = desired["metadata"]
    annotations = metadata.get("annotations", {})
    if existing is None or before == rendered:
        return {**desired, "metadata": {**metadata, "annotations": {**annotations, TEMPLATE: rendered}}}
    kept = {name: existing["spec"][name] for name in fields}
    # Without a hash, the workload is from an operator that wrote none. It gets none: with that of this
    # rendering, the next reconciliation would take its template for edited, and replace it.
    if before is not None:
        annotations = {**annotations, TEMPLATE: before}
    return {
        **desired,
        "metadata": {**metadata, "annotations": annotations},
        "spec": {**desired["spec"], **kept},
    }


def is_current(existing: Manifest | None, desired: Manifest) -> bool:
    """Return whether the existing object was created from this manifest and still contains all of it."""
    return existing is not None and contains(existing, desired)


def contains(existing: Any, desired: Any) -> bool:
    """
    Return whether `existing` contains everything in `desired`.

    >>> contains({"cpu": "1", "added": 1}, {"cpu": "1000m"}), contains([1, 2], [1])
    (True, False)
    """
    if existing == desired:
        return True
    if isinstance(desired, dict):
        if not isinstance(existing, dict):
            return not desired and existing is None
        return all(contains(existing.get(name), value) for name, value in desired.items())
    if isinstance(desired, list):
        if not isinstance(existing, list):
            return not desired and existing is None
        return len(existing) == len(desired) and all(map(contains, existing, desired))
    return _same_quantity(existing, desired)


def _same_quantity(existing: object, desired: object) -> bool:
    """Compare quantities: the API server normalizes them."""
    if not isinstance(existing, str) or not isinstance(desired, str):
        return False
    try:
        return amount(existing) == amount(desired)
    except ValueError:
        return False


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the patch from `before` to `after`. A removed field has the value null; lists are replaced.

    >>> merge_patch({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1}, "d": 3, "e": [4]})
    {'a': {'c': None}, 'e': [4]}
    """
    patch: dict[str, Any] = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        existing = before.get(name)
        if isinstance(value, Mapping) and isinstance(existing, Mapping):
            if inner := merge_patch(existing, value):
                patch[name] = inner
        elif name not in before or existing != value:
            patch[name] = value
    return patch
