"""
Comparison of desired objects with existing ones, so that the operator writes only what differs.

An annotation holds the hash of the manifest that an object was created from. Without it, a field that is no
longer desired would look like one that another client added. The operator restores desired fields that
others changed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from baton_operator.kinds.part import QUANTITY
from baton_operator.manifests.objects import Manifest

ANNOTATION = "baton.dev/applied"

TEMPLATE = "baton.dev/template"
"""Hash of the rendered selector and pod template of a Deployment or LeaderWorkerSet of workers."""

TEMPLATE_FIELDS = ("selector", "template", "leaderWorkerTemplate")
"""Fields of Deployments and LeaderWorkerSets whose change replaces pods."""

_QUANTITY = re.compile(QUANTITY)
_UNITS = {
    "n": Decimal("1e-9"), "u": Decimal("1e-6"), "m": Decimal("1e-3"),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
    "T": Decimal(10**12), "P": Decimal(10**15), "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30),
    "Ti": Decimal(2**40), "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip


def with_hash(desired: Manifest) -> Manifest:
    """Return the manifest with an annotation of its hash."""
    metadata = desired["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION: _hash(desired)}
    return {**desired, "metadata": {**metadata, "annotations": annotations}}


def keep_template(existing: Manifest | None, desired: Manifest) -> Manifest:
    """
    Return the workload `desired`, with the pod template of `existing` if another operator rendered that one.

    Another template would restart the pods in place. So a hash in the Deployment says which one was
    rendered for it. If this operator renders the same, what others have changed is put back. If not, the
    pods keep what they were started with.
    """
    fields = [name for name in TEMPLATE_FIELDS if name in desired["spec"]]
    digest = _hash({name: desired["spec"][name] for name in fields})
    before = (existing or {}).get("metadata", {}).get("annotations", {}).get(TEMPLATE)
    metadata = desired["metadata"]
    annotations = metadata.get("annotations", {})
    if existing is None or before == digest:
        return {**desired, "metadata": {**metadata, "annotations": {**annotations, TEMPLATE: digest}}}
    kept = {name: existing["spec"][name] for name in fields}
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


def _hash(made_from: Any) -> str:
    text = json.dumps(made_from, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _same_quantity(existing: object, desired: object) -> bool:
    """Compare quantities: the API server normalizes them."""
    if not isinstance(existing, str) or not isinstance(desired, str):
        return False
    if _QUANTITY.fullmatch(existing) is None or _QUANTITY.fullmatch(desired) is None:
        return False
    return amount(existing) == amount(desired)


def amount(quantity: str) -> Decimal:
    """
    Return a quantity as a number. Raises ValueError.

    >>> amount("1Gi") == 1024 * amount("1Mi"), amount("500m")
    (True, Decimal('0.500'))
    >>> amount("1e3") == amount("1k")
    True
    """
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        raise ValueError(f"Invalid quantity: {quantity!r}. Expected a number with a unit, such as 20Gi.")
    number, unit = match[1], match[2] or ""
    return Decimal(number) * _UNITS[unit] if unit in _UNITS else Decimal(number + unit)


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
