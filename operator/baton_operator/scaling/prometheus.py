"""
Prometheus, asked by HTTP within a time: it answers with numbers, or nobody knows anything.

Whatever goes wrong is one error that says what: no connection, no answer in time, a refusal, an answer that
is none. The token is sent to the server that the operator was given it for and to no other, since a service
may name any.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import aiohttp

TIMEOUT_S = 5.0
LARGEST = 4 * 1024 * 1024
"""Bytes of an answer."""


class MetricsLost(Exception):
    """Prometheus has not said anything that could be relied on."""


class Metrics(Protocol):
    """Answers queries in PromQL."""

    async def ask(self, url: str, query: str, label: str) -> Mapping[str, float]:
        """The samples of a query's answer, by the value of a label. Raises MetricsLost."""


class Prometheus:
    """Any server with Prometheus' HTTP API. Close it at the end."""

    def __init__(self, own_url: str = "", token_file: str = "", ca_file: str = "") -> None:
        """`token_file`: what to show at `own_url`, read for each question; `ca_file`: who vouches for it."""
        self._own_url = own_url
        self._token_file = token_file
        self._tls = ssl.create_default_context(cafile=ca_file) if ca_file else None
        self._session: aiohttp.ClientSession | None = None

    async def ask(self, url: str, query: str, label: str) -> Mapping[str, float]:
        if not url:
            raise MetricsLost("no Prometheus is named: spec.autoscaling.prometheus.url, or --prometheus-url")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, body = await self._post(url, {"query": query, "timeout": f"{TIMEOUT_S:g}s"})
        except TimeoutError as error:
            raise MetricsLost(f"{url} does not answer within {TIMEOUT_S:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise MetricsLost(f"{url} cannot be asked: {type(error).__name__}: {error}") from error
        return _samples(url, status, body, label)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _post(self, url: str, form: Mapping[str, str]) -> tuple[int, bytes]:
        if self._session is None:
            self._session = aiohttp.ClientSession(auto_decompress=True, trust_env=False)
        own = url == self._own_url
        headers = {}
        if own and self._token_file:
            headers["Authorization"] = f"Bearer {_token(self._token_file)}"
        asked = self._session.post(
            f"{url.rstrip('/')}/api/v1/query",
            data=form,
            headers=headers,
            ssl=self._tls if own and self._tls else True,
            allow_redirects=False,
        )
        async with asked as answer:
            return answer.status, await answer.content.read(LARGEST)


def _token(file: str) -> str:
    return Path(file).read_text(encoding="utf-8").strip()


def _samples(url: str, status: int, body: bytes, label: str) -> dict[str, float]:
    try:
        answer: dict[str, Any] = json.loads(body)
        if status != 200 or answer["status"] != "success":
            raise MetricsLost(f"{url} refuses: {status} {str(answer.get('error', ''))[:300]}")
        found = answer["data"]["result"]
        return {one["metric"].get(label, ""): float(one["value"][1]) for one in found}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise MetricsLost(f"{url} answers {status} with something that is no answer") from error
