"""Seeds of laws: a few random schedules in `make test`, and the rest of them in `make test-all`."""

from __future__ import annotations

from typing import Any

import pytest


def seeds(count: int, quick: int) -> list[Any]:
    """Return `count` seeds for `parametrize`. Those from `quick` on are slow: each is one more schedule."""
    return [*range(quick), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(quick, count))]
