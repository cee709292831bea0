"""
Whether an input file is a batch: read once, line by line, and never held whole.

All bad lines are named, up to a number that somebody would still read. Lines that are sound but can have no
answer are answered here and now, so that whoever runs the batch meets only requests that may be tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from baton_router.batches import lines, names
from baton_router.batches.values import VALIDATION_LIMIT, LineError, Result

RESULTS_AT_ONCE = 200


@dataclass(frozen=True, slots=True)
class Bounds:
    """What one batch may bring."""

    bytes: int
    lines: int
    line: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """`errors` if the file is no batch; else how many requests it has, and the first one's model."""

    total: int
    model: str | None
    errors: tuple[LineError, ...] = ()


def examine(
    read: Callable[[], Iterator[bytes]],
    size: int,
    endpoint: str,
    bounds: Bounds,
    keep: Callable[[list[Result]], object],
) -> Verdict:
    """`read` begins at the file's first byte each time; `keep` takes results that lines have already."""
    if size > bounds.bytes:
        told = f"The file has {size} bytes; a batch may have {bounds.bytes}."
        return Verdict(0, None, (LineError("file_too_large", told),))
    examined = _Examined(endpoint, bounds, keep)
    try:
        examined.run(lines.split(read(), bounds.line))
    except lines.TooLong as fault:
        told = f"The line is over the limit of {bounds.line} bytes; what follows it was not read."
        examined.errors.append(LineError("line_too_long", told, None, fault.args[0]))
    if not examined.total and not examined.errors:
        examined.errors.append(LineError("empty_file", "The file has no requests."))
    if suspects := examined.names.suspects():
        examined.errors += _duplicates(lines.split(read(), bounds.line), suspects, endpoint)
    errors = sorted(examined.errors, key=lambda error: error.line or 0)
    return Verdict(examined.total, examined.model, tuple(errors[:VALIDATION_LIMIT]))


class _Examined:
    """What is known of a file so far."""

    def __init__(self, endpoint: str, bounds: Bounds, keep: Callable[[list[Result]], object]) -> None:
        self.total = 0
        self.model: str | None = None
        self.errors: list[LineError] = []
        self.names = names.Names()
        self._endpoint = endpoint
        self._bounds = bounds
        self._keep = keep

    def run(self, numbered: Iterable[tuple[int, bytes]]) -> None:
        refused: list[Result] = []
        for number, text in numbered:
            self.total += 1
            if self.total > self._bounds.lines:
                told = f"The file has more than {self._bounds.lines} requests; what follows was not read."
                self.errors.append(LineError("too_many_lines", told, None, number))
                return
            line = lines.read(number, text, self._endpoint)
            if isinstance(line, LineError):
                self.errors.append(line)
                if len(self.errors) >= VALIDATION_LIMIT:
                    return
                continue
            self.names.add(line.custom_id)
            if self.model is None and isinstance(line.body.model, str):
                self.model = line.body.model
            if (result := lines.refused(number, line)) is not None:
                refused.append(result)
                if len(refused) >= RESULTS_AT_ONCE:
                    self._keep(refused)
                    refused = []
        if refused:
            self._keep(refused)


def _duplicates(
    numbered: Iterable[tuple[int, bytes]], suspects: set[int], endpoint: str
) -> Iterator[LineError]:
    def named() -> Iterator[tuple[int, str]]:
        for number, text in numbered:
            line = lines.read(number, text, endpoint)
            if not isinstance(line, LineError):
                yield number, line.custom_id

    found = 0
    try:
        for number, name in names.repeated(named(), suspects):
            told = f"The custom_id {name[:100]!r} came before."
            yield LineError("duplicate_custom_id", told, "custom_id", number)
            found += 1
            if found >= VALIDATION_LIMIT:
                return
    except lines.TooLong:
        return  # said already, by the pass before
