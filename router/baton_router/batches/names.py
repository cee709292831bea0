"""
Whether names come twice, among a million of them, in eight bytes each.

A first pass keeps a hash of each name. Only if two hashes are the same, a second pass looks at those names
themselves: so the answer is exact, and a file without duplicates, which is the rule, is read once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import pairwise

import xxhash

BUCKETS = 256
"""Hashes are sorted in so many parts, because a sorted part is a list, which takes several times its size."""


class Names:
    """A set of names that can only tell which of them may have come twice."""

    def __init__(self) -> None:
        self._buckets = [array("Q") for _ in range(BUCKETS)]

    def add(self, name: str) -> None:
        number = xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))
        self._buckets[number % BUCKETS].append(number)

    def suspects(self) -> set[int]:
        """Hashes that more than one of the names have."""
        return {
            one for bucket in self._buckets for one, other in pairwise(sorted(bucket)) if one == other
        }  # fmt: skip


def repeated(named: Iterable[tuple[int, str]], suspects: set[int]) -> Iterator[tuple[int, str]]:
    """Of numbered names, those that came before. Only names with a suspect hash are remembered."""
    seen: set[str] = set()
    for number, name in named:
        if xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) in suspects:
            if name in seen:
                yield number, name
            seen.add(name)
