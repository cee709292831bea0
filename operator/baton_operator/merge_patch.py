"""The difference between two objects as a JSON merge patch (RFC 7396): nothing where nothing differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """
    What makes `after` of `before`. A field that vanishes is None; a list is written whole.

    >>> difference({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 1}, "d": 3, "e": [4]})
    {'a': {'c': None}, 'e': [4]}
    """
    patch: dict[str, Any] = dict.fromkeys(before.keys() - after.keys())
    for name, value in after.items():
        there = before.get(name)
        if isinstance(value, Mapping) and isinstance(there, Mapping):
            if inner := difference(there, value):
                patch[name] = inner
        elif name not in before or there != value:
            patch[name] = value
    return patch
