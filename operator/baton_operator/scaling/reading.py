"""
One measured number, or the knowledge that there is none: nothing, zero and unknown are three things.

A scaler that takes a missing series for a zero shrinks a service whose load it merely cannot see. So what is
unknown is a value of its own here, says why, and compares with nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reading:
    """What one question to the metrics gave."""

    value: float | None
    """None: unknown."""
    why: str = ""
    """Why it is unknown."""

    @classmethod
    def of(cls, value: float) -> Reading:
        """
        A number that was seen; one that is no number is unknown.

        >>> Reading.of(0.0).zero, Reading.of(math.nan).known
        (True, False)
        """
        return cls(value) if math.isfinite(value) else cls(None, "it is not a number")

    @property
    def known(self) -> bool:
        return self.value is not None

    @property
    def zero(self) -> bool:
        """Whether nothing was seen, by somebody who looked."""
        return self.value == 0

    def above(self, limit: float) -> bool:
        """Whether it is surely more; what is unknown is not."""
        return self.value is not None and self.value > limit

    def below(self, limit: float) -> bool:
        """Whether it is surely less; what is unknown is not."""
        return self.value is not None and self.value < limit


ZERO = Reading(0.0)


def unknown(why: str) -> Reading:
    return Reading(None, why)
