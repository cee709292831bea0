"""Sizes in bytes as people write and read them: `512MiB`, `4 GB`, `92.9 MB`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

_UNITS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "kib": 2**10, "ki": 2**10,
    "m": 10**6, "mb": 10**6, "mib": 2**20, "mi": 2**20,
    "g": 10**9, "gb": 10**9, "gib": 2**30, "gi": 2**30,
    "t": 10**12, "tb": 10**12, "tib": 2**40, "ti": 2**40,
}  # fmt: skip

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)


def parse_size(text: object) -> object:
    """
    The bytes that `text` means; what is no text is left to the caller's own checks.

    >>> parse_size("512MiB"), parse_size("512Mi"), parse_size("1.5 GB"), parse_size("4096")
    (536870912, 536870912, 1500000000, 4096)
    """
    if not isinstance(text, str):
        return text
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a size. Expected a size such as 512MiB, 4GB or 1073741824")
    return round(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def show_size(count: float) -> str:
    """
    `count` bytes in the decimal unit that fits, with three digits.

    >>> show_size(512), show_size(92_871_040), show_size(4e9)
    ('512 B', '92.9 MB', '4.00 GB')
    """
    units = ["B", "kB", "MB", "GB", "TB"]
    power = 0
    while count >= 999.5 and power < len(units) - 1:
        count /= 1000
        power += 1
    digits = 0 if power == 0 or count >= 99.95 else 1 if count >= 9.995 else 2
    return f"{count:.{digits}f} {units[power]}"


Bytes = Annotated[int, BeforeValidator(parse_size)]
"""A setting in bytes that may be written with a unit."""
