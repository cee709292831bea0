"""
Comparison of desired objects with existing ones, so that the operator writes only what differs.

An annotation holds the hash of the manifest that an object was created from. Without it, a field that is no
longer desired would look like one that somebody else added. The operator restores desired fields that
others changed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from baton_operator.manifests.objects import Manifest

ANNOTATION = "baton.dev/applied"

TEMPLATE = "baton.dev/template"
"""Hash of the selector and the pod template that were rendered for a Deployment of workers."""

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?")
_UNITS = {
    None: Decimal(1), "m": Decimal("0.001"),
    "k": Decimal(10**3), "M": Decimal(10**6), "G": Decimal(10**9),
    "T": Decimal(10**12), "P": Decimal(10**15), "E": Decimal(10**18),
    "Ki": Decimal(2**10), "Mi": Decimal(2**20), "Gi": Decimal(2**30),
    "Ti": Decimal(2**40), "Pi": Decimal(2**50), "Ei": Decimal(2**60),
}  # fmt: skip


def with_hash(wished: Manifest) -> Manifest:
    """The same with the hash of what it is made from."""
    metadata = wished["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION: _hash(wished)}
    return {**wished, "metadata": {**metadata, "annotations": annotations}}


def keep_template(there: Manifest | None, wished: Manifest) -> Manifest:
    """
    Return the Deployment `wished`, with the pod template of `there` if another operator rendered that one.

    Another template would restart the pods in place. So a hash in the Deployment says which one was
    rendered for it. If this operator renders the same, what others have changed is put back. If not, the
    pods keep what they were started with. 0.1.0 wrote no hash.
    """
    digest = _hash({name: wished["spec"][name] for name in ("selector", "template")})
    before = (there or {}).get("metadata", {}).get("annotations", {}).get(TEMPLATE)
    metadata = wished["metadata"]
    annotations = metadata.get("annotations", {})
    if there is None or before == digest:
        return {**wished, "metadata": {**metadata, "annotations": {**annotations, TEMPLATE: digest}}}
    kept = {name: there["spec"][name] for name in ("selector", "template")}
    if before is not None:
        annotations = {**annotations, TEMPLATE: before}
    return {
        **wished,
        "metadata": {**metadata, "annotations": annotations},
        "spec": {**wished["spec"], **kept},
    }


def is_current(there: Manifest | None, marked: Manifest) -> bool:
    """Whether the object was made from the same, and still has all of it; what others added stays theirs."""
    return there is not None and contains(there, marked)


def contains(there: Any, wished: Any) -> bool:
    """
    Whether `there` has all that is wished.

    >>> contains({"cpu": "1", "added": 1}, {"cpu": "1000m"}), contains([1, 2], [1])
    (True, False)
    """
    if isinstance(wished, dict):
        if not isinstance(there, dict):
            return not wished and there is None
        return all(contains(there.get(name), value) for name, value in wished.items())
    if isinstance(wished, list):
        if not isinstance(there, list):
            return not wished and there is None
        return len(there) == len(wished) and all(map(contains, there, wished))
    return bool(there == wished) or _same_quantity(there, wished)


def _hash(made_from: Any) -> str:
    text = json.dumps(made_from, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _same_quantity(there: object, wished: object) -> bool:
    """The API server writes numbers with units in a way of its own."""
    if not isinstance(there, str) or not isinstance(wished, str):
        return False
    if _QUANTITY.fullmatch(there) is None or _QUANTITY.fullmatch(wished) is None:
        return False
    return amount(there) == amount(wished)


def amount(quantity: str) -> Decimal:
    """
    A number with a unit, as a number. Raises ValueError.

    >>> amount("1Gi") == 1024 * amount("1Mi"), amount("500m")
    (True, Decimal('0.500'))
    """
    match = _QUANTITY.fullmatch(quantity)
    if match is None:
        raise ValueError(f"{quantity!r} is no quantity: expected a number with a unit, such as 20Gi.")
    return Decimal(match[1]) * _UNITS[match[2]]


def merge_patch(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """
    What makes `after` of `before`. A field that vanishes is None; a list is written whole.

    >>> merge_patch({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1}, "d": 3, "e": [4]})
    {'a': {'c': None}, 'e': [4]}
    """
    patch: dict[str, Any] = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        there = before.get(name)
        if isinstance(value, Mapping) and isinstance(there, Mapping):
            if inner := merge_patch(there, value):
                patch[name] = inner
        elif name not in before or there != value:
            patch[name] = value
    return patch
