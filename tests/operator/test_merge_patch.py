"""Differences as merge patches: the law is that applying one gives what was wanted."""

from __future__ import annotations

import random
from typing import Any

from baton_operator.manifests.objects import merge_patch


def applied(target: Any, patch: Any) -> Any:
    """RFC 7396, as an API server does it."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(target) if isinstance(target, dict) else {}
    for name, value in patch.items():
        if value is None:
            merged.pop(name, None)
        else:
            merged[name] = applied(merged.get(name), value)
    return merged


def anything(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.choice(["text", "number", "list", "object"] if depth < 3 else ["text", "number"])
    if kind == "object":
        return {name: anything(rng, depth + 1) for name in "abcd" if rng.random() < 0.5}
    if kind == "list":
        return [anything(rng, depth + 2) for _ in range(rng.randrange(3))]
    return rng.randrange(2) if kind == "number" else rng.choice("xy")


def test_merge_patch_random_objects_give_the_wanted_object() -> None:
    for seed in range(2000):
        rng = random.Random(seed)
        before = {"top": anything(rng), "more": anything(rng)}
        after = {"top": anything(rng), **({"other": anything(rng)} if rng.random() < 0.5 else {})}
        assert applied(before, merge_patch(before, after)) == after
        assert merge_patch(after, after) == {}
