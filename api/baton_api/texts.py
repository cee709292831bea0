"""Settings that people write as one text: names with commas between, origins, JSON objects."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator
from pydantic_settings import NoDecode


def split(value: object) -> tuple[str, ...]:
    """
    Several names that were written as one text, or as several.

    >>> split("a, b"), split(["a,b", "c"]), split('["a", "b"]')
    (('a', 'b'), ('a', 'b', 'c'), ('a', 'b'))
    """
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            return split(json.loads(value))
        return tuple(part.strip() for part in value.split(",") if part.strip())
    if not isinstance(value, Iterable):
        raise ValueError("a list of names is text with commas between them")
    return tuple(part for one in value for part in split(str(one)))


def _origin(origin: str) -> str:
    parts = urlsplit(origin)
    if origin != "*" and (parts.scheme not in ("http", "https") or not parts.hostname or parts.path):
        raise ValueError(f"{origin!r} is no origin; one looks like https://chat.example.org, or is *")
    return origin


def _object(value: object) -> object:
    return json.loads(value) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(split)]
"""Several names: repeated, or with commas between, or a JSON array."""

Origins = Annotated[tuple[Annotated[str, AfterValidator(_origin)], ...], NoDecode, BeforeValidator(split)]
"""Origins of web pages, written like `Names`."""

JsonObject = Annotated[dict[str, Any], NoDecode, BeforeValidator(_object)]
"""An object, or its JSON text."""
