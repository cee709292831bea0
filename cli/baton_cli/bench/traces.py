"""
Requests that somebody really had, in the form in which Mooncake published theirs.

A line is `{"timestamp": milliseconds, "input_length": tokens, "output_length": tokens, "hash_ids": [...]}`;
each id stands for 512 tokens, and prompts that begin with the same ids begin with the same text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from baton_api.errors import SetupError

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Row:
    """One request."""

    at_s: float
    """Since the trace began."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    """The ids of its beginning, 512 tokens each."""


def rows(path: Path, minutes: float) -> Iterator[Row]:
    """Those of the first `minutes`. Raises SetupError."""
    try:
        with path.open() as lines:
            for number, line in enumerate(lines, 1):
                row = _row(line, f"{path}, line {number}")
                if row.at_s >= minutes * 60:
                    return
                yield row
    except OSError as error:
        raise SetupError(f"The trace {path} cannot be read: {error.strerror}.") from error


def _row(line: str, where: str) -> Row:
    try:
        given = json.loads(line)
        blocks = tuple(int(one) for one in given["hash_ids"])
        return Row(given["timestamp"] / 1e3, int(given["input_length"]), int(given["output_length"]), blocks)
    except (ValueError, KeyError, TypeError) as error:
        raise SetupError(
            f"{where} is no line of a Mooncake trace: timestamp, input_length, output_length, hash_ids."
        ) from error
