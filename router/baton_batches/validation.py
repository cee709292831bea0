"""
Validation of an input file: read once, line by line, never held in memory as a whole.

The report names all invalid lines up to a limit. Valid lines that can have no answer get their error here,
so that runners send only lines that are worth a try.

The search for repeated `custom_id`s takes eight bytes per name: the first pass keeps a hash of each name.
Only if two hashes are equal, a second pass compares the names themselves.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import xxhash

from baton_batches import input_file
from baton_batches.values import VALIDATION_LIMIT, LineError, LineResult

BUCKETS = 256
"""Hashes are sorted in so many parts, because a sorted part is a list, which takes several times its size."""


class CustomIds:
    """A set of name hashes, which finds the names that may occur twice."""

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


def repeated(names: Iterable[tuple[int, str]], suspects: set[int]) -> Iterator[tuple[int, str]]:
    """Of numbered names, those that came before. Only names with a suspect hash are remembered."""
    seen: set[str] = set()
    for number, name in names:
        if xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogatepass")) in suspects:
            if name in seen:
                yield number, name
            seen.add(name)


RESULTS_PER_WRITE = 200


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits of one input file."""

    bytes: int
    lines: int
    line: int


@dataclass(frozen=True, slots=True)
class ValidationResult:
    """`errors` if the file is invalid; else the number of its requests, and the model of the first one."""

    total: int
    model: str | None
    errors: tuple[LineError, ...] = ()


def validate(
    read: Callable[[], Iterator[bytes]],
    size: int,
    endpoint: str,
    bounds: FileLimits,
    keep: Callable[[list[LineResult]], object],
) -> ValidationResult:
    """`read` begins at the file's first byte each time; `keep` takes results that lines have already."""
    if size > bounds.bytes:
        message = f"The file has {size} bytes; a batch may have {bounds.bytes}."
        return ValidationResult(0, None, (LineError("file_too_large", message),))
    validation = _Validation(endpoint, bounds, keep)
    try:
        validation.run(input_file.split_lines(read(), bounds.line, bounds.lines))
    except input_file.TooManyBlankLines as fault:
        message = f"The file has more than {bounds.lines} blank lines. Later lines were not read."
        validation.errors.append(LineError("too_many_lines", message, None, fault.args[0]))
    except input_file.LineTooLong as fault:
        message = f"The line is over the limit of {bounds.line} bytes. Later lines were not read."
        validation.errors.append(LineError("line_too_long", message, None, fault.args[0]))
    if not validation.total and not validation.errors:
        validation.errors.append(LineError("empty_file", "The file has no requests."))
    if suspects := validation.names.suspects():
        validation.errors += _duplicates(input_file.split_lines(read(), bounds.line), suspects, endpoint)
    errors = sorted(validation.errors, key=lambda error: error.line or 0)
    return ValidationResult(validation.total, validation.model, tuple(errors[:VALIDATION_LIMIT]))


class _Validation:
    """The state of one validation."""

    def __init__(self, endpoint: str, bounds: FileLimits, keep: Callable[[list[LineResult]], object]) -> None:
        self.total = 0
        self.model: str | None = None
        self.errors: list[LineError] = []
        self.names = CustomIds()
        self._endpoint = endpoint
        self._bounds = bounds
        self._keep = keep

    def run(self, numbered: Iterable[tuple[int, bytes]]) -> None:
        refused: list[LineResult] = []
        for number, text in numbered:
            self.total += 1
            if self.total > self._bounds.lines:
                message = f"The file has more than {self._bounds.lines} requests. Later lines were not read."
                self.errors.append(LineError("too_many_lines", message, None, number))
                return
            line = input_file.parse_line(number, text, self._endpoint)
            if isinstance(line, LineError):
                self.errors.append(line)
                if len(self.errors) >= VALIDATION_LIMIT:
                    return
                continue
            self.names.add(line.custom_id)
            if self.model is None and isinstance(line.body.model, str):
                self.model = line.body.model
            if (result := input_file.rejected_result(number, line)) is not None:
                refused.append(result)
                if len(refused) >= RESULTS_PER_WRITE:
                    self._keep(refused)
                    refused = []
        if refused:
            self._keep(refused)


def _duplicates(
    numbered: Iterable[tuple[int, bytes]], suspects: set[int], endpoint: str
) -> Iterator[LineError]:
    def names() -> Iterator[tuple[int, str]]:
        for number, text in numbered:
            line = input_file.parse_line(number, text, endpoint)
            if not isinstance(line, LineError):
                yield number, line.custom_id

    count = 0
    try:
        for number, name in repeated(names(), suspects):
            message = f"The custom_id {name[:100]!r} came before."
            yield LineError("duplicate_custom_id", message, "custom_id", number)
            count += 1
            if count >= VALIDATION_LIMIT:
                return
    except input_file.LineTooLong:
        return  # the first pass has reported it
