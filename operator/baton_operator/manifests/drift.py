"""
Comparison of desired objects with existing ones, so that the operator writes only what differs.

An annotation holds the hash of the manifest that an object was created from. Without it, a field that is no
longer desired would look like one that another client added. The operator restores desired fields that
others changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton_operator.kinds.part import amount
from baton_operator.manifests.objects import Manifest, digest

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
