"""A manifest, and what all manifests of a service have in common: its labels, and their owner."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from baton_operator import names
from baton_operator.crd import GROUP, VERSION

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
    overlays = {one["name"]: one for one in over}
    kept = [merged(one, overlays.pop(one["name"], None)) for one in base]
    return [*kept, *(one for one in over if one["name"] in overlays)]


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
