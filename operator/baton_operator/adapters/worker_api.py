"""
The client of the API for adapters, which Baton's and vLLM's workers have: list, load and unload.

vLLM loads in the process that computes, so a load may take as long as the current batch and, with a
repository of the Hub, as long as its download. A pod may answer anything: answers are bounded, and redirects
are not followed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from baton_operator import answers

READ_S = 4.0
"""Time limit of a list in seconds."""

LOAD_S = 300.0
"""Time limit of a load or unload in seconds."""

ANSWER_LIMIT = 1 << 20
"""Maximum bytes of an answer."""

MESSAGE_LIMIT = 600

KEY_HINT = "The worker requires an API key. Set the operator's --worker-api-key-file."
NO_PATHS_HINT = "The worker does not serve {path}. Its image may be too old, or of another engine."


class AdapterApiError(Exception):
    """A pod did not do what was requested. The message says why."""


class AdapterApi:
    """Client of the workers of all services. Close it at the end."""

    def __init__(self, key_file: str = "", load_s: float = LOAD_S, read_s: float = READ_S) -> None:
        """`key_file`: file with the API key of the workers, read for each request; empty: no key."""
        self._key_file = key_file
        self._load_s = load_s
        self._read_s = read_s
        self._session: aiohttp.ClientSession | None = None

    async def adapters(self, url: str) -> Mapping[str, str]:
        """Return the path of each loaded adapter by its name. Raises AdapterApiError."""
        body = await self._answer("GET", url, "/v1/models", None, self._read_s)
        try:
            listed = json.loads(body)["data"]
            return {str(one["id"]): str(one.get("root") or "") for one in listed if one.get("parent")}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AdapterApiError(f"{url}/v1/models returned an invalid list of models.") from error

    async def load(self, url: str, name: str, path: str) -> None:
        """Load an adapter. Raises AdapterApiError with the message of the worker."""
        body = {"lora_name": name, "lora_path": path}
        await self._answer("POST", url, "/v1/load_lora_adapter", body, self._load_s)

    async def unload(self, url: str, name: str) -> None:
        """Unload an adapter. Raises AdapterApiError with the message of the worker."""
        await self._answer("POST", url, "/v1/unload_lora_adapter", {"lora_name": name}, self._load_s)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _answer(
        self, method: str, url: str, path: str, body: Mapping[str, str] | None, limit_s: float
    ) -> bytes:
        try:
            async with asyncio.timeout(limit_s):
                status, content = await self._request(method, url + path, body)
        except TimeoutError as error:
            raise AdapterApiError(f"No answer from {url}{path} within {limit_s:g} s.") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise AdapterApiError(f"Cannot reach {url}{path}: {type(error).__name__}: {error}") from error
        if status == 200:
            return content
        raise AdapterApiError(_refusal(status, path, content))

    async def _request(self, method: str, url: str, body: Mapping[str, str] | None) -> tuple[int, bytes]:
        if self._session is None:
            # Each pod is asked rarely: connections would only go stale.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = answers.session(connector=connector)
        headers = answers.bearer(self._key_file)
        return await answers.fetch(self._session, method, url, limit=ANSWER_LIMIT, json=body, headers=headers)


def _refusal(status: int, path: str, content: bytes) -> str:
    """Return the message of an error in vLLM's shape, or what it means."""
    try:
        answer: Any = json.loads(content)
        error = answer.get("error")
        message = error.get("message", "") if isinstance(error, dict) else ""
    except (ValueError, AttributeError):
        message = ""
    if status in (401, 403) and not message:
        message = KEY_HINT
    if status == 404 and not message:
        message = NO_PATHS_HINT.format(path=path)
    text = " ".join(str(message).split()) or f"The worker answered {path} without a reason."
    return f"{status}: {text[:MESSAGE_LIMIT]}"
