"""Types of settings that are written as text: names, origins, JSON objects, sizes in bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator
from pydantic_settings import NoDecode


def split(value: object) -> tuple[str, ...]:
    """
    Split names that are separated by commas, repeated, or in a JSON array.

    >>> split("a, b"), split(["a,b", "c"]), split('["a", "b"]')
    (('a', 'b'), ('a', 'b', 'c'), ('a', 'b'))
    """
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            return split(json.loads(value))
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if not isinstance(value, Iterable):
        raise ValueError("expected names separated by commas")
    return tuple(part for item in value for part in split(str(item)))


def _origin(origin: str) -> str:
    parts = urlsplit(origin)
    if origin != "*" and (parts.scheme not in ("http", "https") or not parts.hostname or parts.path):
        raise ValueError(
            f"{origin!r} is not an origin. Expected an origin such as https://chat.example.org, or *"
        )
    return origin


def _object(value: object) -> object:
    return json.loads(value) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split)]
"""Names: repeated, separated by commas, or a JSON array."""

Origins = Annotated[tuple[Annotated[str, AfterValidator(_origin)], ...], NoDecode, BeforeValidator(split)]
"""Origins of web pages, written like `Names`."""

JsonObject = Annotated[dict[str, Any], NoDecode, BeforeValidator(_object)]
"""A JSON object or its text."""


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
    Parse a size with an optional unit. Values other than strings pass unchanged.

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
    Format `count` bytes in a decimal unit, with three digits.

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
"""A size in bytes, with an optional unit."""
