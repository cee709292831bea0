"""
The share of requests that each revision gets, from flags and from a file that may change at any time.

The file is a key of a mounted ConfigMap that the operator updates during a rollout. An invalid file is
logged, and the weights stay as they were. Among revisions, requests are spread evenly by weight.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from baton_api.errors import SetupError
from baton_api.watched import WatchedFile
from baton_router.settings import parse_weight

log = logging.getLogger(__name__)


class RevisionWeights:
    """Current weights by revision. Without weights, revisions compete by predicted time."""

    def __init__(
        self, flags: Iterable[str] = (), file: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """A weight in the file overrides the one in `flags`. Raises SetupError if the file cannot be read."""
        self._from_flags = dict(map(parse_weight, flags))
        self._file = WatchedFile(file, clock) if file else None
        self._weights = (
            self._from_flags if self._file is None else {**self._from_flags, **read_weights(self._file.path)}
        )

    def __call__(self) -> Mapping[str, float]:
        if self._file is not None and self._file.changed():
            self._read_again(self._file.path)
        return self._weights

    def _read_again(self, path: Path) -> None:
        try:
            self._weights = {**self._from_flags, **read_weights(path)}
        except SetupError as error:
            log.error("%s The weights stay as they were.", error.message)
        else:
            text = ", ".join(f"{revision} {weight:g}" for revision, weight in self._weights.items())
            log.info("%s was read again: %s", path, text or "no weights")


def read_weights(path: Path) -> Mapping[str, float]:
    """A weight to a line. Raises SetupError, which names the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SetupError(f"--revision-weights-file {path} cannot be read: {error}.") from error
    weights: dict[str, float] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            revision, weight = parse_weight(line)
        except ValueError as error:
            raise SetupError(f"--revision-weights-file {path}, line {number}: {error}.") from error
        weights[revision] = weight
    return weights


AHEAD_LIMIT = 8.0
"""Requests by which a revision may be ahead of its share because it holds the prefix."""

REVISIONS_LIMIT = 64


class RevisionShares:
    """Belongs to one thread."""

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}
        """Credit of each revision, in requests; the sum is 0."""

    def __len__(self) -> int:
        """Number of revisions with a credit."""
        return len(self._credit)

    def choose(self, weights: Mapping[str, float], preferred: str) -> str:
        """Choose a revision that has a weight; at least one has. `preferred` may have none."""
        credit = self._credit
        if preferred in weights and credit.get(preferred, 0.0) > -AHEAD_LIMIT:
            return preferred
        total = sum(weights.values())
        return max(weights, key=lambda revision: credit.get(revision, 0.0) + weights[revision] / total)

    def sent(self, weights: Mapping[str, float], chosen: str) -> None:
        """A request went to `chosen`, when these were those with a weight."""
        credit = self._credit
        if len(credit) > REVISIONS_LIMIT:  # drop the credit of revisions that are long gone
            credit.clear()
        total = sum(weights.values())
        for revision, weight in weights.items():
            credit[revision] = credit.get(revision, 0.0) + weight / total
        credit[chosen] = credit.get(chosen, 0.0) - 1.0
