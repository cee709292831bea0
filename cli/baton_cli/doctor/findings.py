"""What a check says: what was looked at, what was found, what it should be, and the way out."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    GOOD = "good"
    NOTE = "note"
    """Worth knowing; nothing has to be done."""
    WARNING = "warning"
    """It works, and slowly, or not for much."""
    ERROR = "error"
    """Something will not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    check: str
    """In a word or two, such as `open files`."""
    level: Level
    measured: str
    """What was found, with its unit."""
    limit: str = ""
    """What it should be."""
    why: str = ""
    """What it leads to; a sentence."""
    way_out: str = ""
    """What to do; a sentence. Empty only for what is good, or a note."""


def good(check: str, measured: str) -> Finding:
    return Finding(check, Level.GOOD, measured)


def note(check: str, measured: str, why: str) -> Finding:
    return Finding(check, Level.NOTE, measured, why=why)
