"""
Public keys that sign tokens (RFC 7517), from a file or from their issuer's URL.

An issuer may change its keys at any time. An unknown key triggers a fetch, at most once a minute, so that
invalid tokens cannot flood the issuer. Keys are also fetched every few minutes, so that a revoked key stops
working. If the issuer does not respond, the keys stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import jwt
import msgspec

from baton_api.errors import NotReady, SetupError

log = logging.getLogger(__name__)

UNKNOWN_KEY_S = 60.0
"""Seconds between two fetches because of unknown keys."""

RETRY_S = 5.0
"""Seconds between two fetches while there is no key."""

REFRESH_S = 300.0
"""Age at which keys are fetched again."""

FETCH_TIMEOUT_S = 5.0
SIZE_LIMIT = 1024 * 1024

Fetch = Callable[[], Awaitable[bytes]]


class KeySet(msgspec.Struct):
    """A key set; each key is checked separately."""

    keys: list[dict[str, object]]


class IssuerKeys:
    """The keys of one issuer. Belongs to the event loop."""

    def __init__(self, fetch: Fetch, algorithms: frozenset[str], clock: Callable[[], float]) -> None:
        """Keys for other `algorithms` are ignored. `fetch` raises OSError."""
        self._fetch = fetch
        self._algorithms = algorithms
        self._clock = clock
        self._keys: Mapping[str, jwt.PyJWK] | None = None
        self._text = b""
        self._fetched_at = float("-inf")
        self._fetching: asyncio.Task[None] | None = None
        self.changes = 0
        """Number of changes; results of older keys must be checked again."""

    async def find(self, name: str) -> jwt.PyJWK | None:
        """
        The key of this name (`kid`); an empty name means the only key of the set.

        Raises NotReady if no keys could be fetched yet.
        """
        keys = self._cached(name)
        if keys is None and self._clock() - self._fetched_at >= (UNKNOWN_KEY_S if self._keys else RETRY_S):
            self._begin()
        if keys is None and self._fetching is not None:
            await asyncio.shield(self._fetching)
            keys = self._cached(name)
        if self._keys is None:
            raise NotReady("The keys that tokens are signed with cannot be had from their issuer.")
        return keys

    def refresh(self) -> None:
        """Fetch the keys in the background if they are old."""
        if self._clock() - self._fetched_at >= REFRESH_S:
            self._begin()

    async def close(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._fetching

    def _cached(self, name: str) -> jwt.PyJWK | None:
        keys = self._keys or {}
        if not name and len(keys) == 1:
            return next(iter(keys.values()))
        return keys.get(name)

    def _begin(self) -> None:
        if self._fetching is None:
            self._fetched_at = self._clock()
            self._fetching = asyncio.create_task(self._renew())
            self._fetching.add_done_callback(self._ended)

    def _ended(self, _: asyncio.Task[None]) -> None:
        self._fetching = None

    async def _renew(self) -> None:
        try:
            text = await self._fetch()
            keys = read_key_set(text, self._algorithms)
        except (OSError, SetupError) as error:
            log.error("Cannot read the keys that sign tokens: %s The previous keys stay.", error)
            return
        if self._keys is None or text != self._text:
            self._keys, self._text = keys, text
            self.changes += 1
            log.info("Tokens may be signed with these keys: %s", ", ".join(keys) or "none")


def read_key_set(text: bytes, algorithms: frozenset[str]) -> dict[str, jwt.PyJWK]:
    """
    The usable keys of a set by name. Raises SetupError if it is invalid.

    Keys for another purpose, of another type or for a disallowed algorithm are ignored, above all shared
    secrets.
    """
    try:
        listed = msgspec.json.decode(text, type=KeySet).keys
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SetupError(f"Invalid set of keys (JWKS): {error}.") from error
    keys: dict[str, jwt.PyJWK] = {}
    for body in listed:
        if body.get("use", "sig") != "sig" or body.get("kty") == "oct":
            continue
        if body.get("alg") not in (None, *algorithms):
            continue
        try:
            key = jwt.PyJWK(body)
        except jwt.PyJWTError:
            continue
        if key.algorithm_name in algorithms:
            keys[str(key.key_id or "")] = key
    return keys


def key_source(where: str) -> Fetch:
    """
    A function that fetches a key set from a URL or a file. Raises SetupError if the file does not exist.
    """
    if urlsplit(where).scheme in ("http", "https"):
        return lambda: asyncio.to_thread(_from_url, where)
    path = Path(where).expanduser()
    if not path.is_file():
        raise SetupError(f"--jwt-jwks {path} is neither an http address nor a file.")
    return lambda: asyncio.to_thread(path.read_bytes)


def _from_url(url: str) -> bytes:
    """Raises OSError; urllib's errors are subclasses."""
    request = urllib.request.Request(url, headers={"accept": "application/json"})
    with urllib.request.urlopen(request, timeout=FETCH_TIMEOUT_S) as answer:
        text: bytes = answer.read(SIZE_LIMIT + 1)
    if len(text) > SIZE_LIMIT:
        raise urllib.error.URLError(f"{url} has more than {SIZE_LIMIT} bytes.")
    return text
