"""How long a batch may take, as clients write it: OpenAI's `24h`, or another time, up to a month."""

from __future__ import annotations

import re

DAY = "24h"
"""OpenAI's one value."""

LEAST_S, MOST_S = 60, 30 * 86_400

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def seconds(window: str) -> int | None:
    """
    None for what is none.

    >>> seconds("24h"), seconds("90s"), seconds("30d"), seconds("59s"), seconds("soon")
    (86400, 90, 2592000, None, None)
    """
    found = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", window)
    if found is None:
        return None
    whole = int(found[1]) * _UNITS[found[2]]
    return whole if LEAST_S <= whole <= MOST_S else None
