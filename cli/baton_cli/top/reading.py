"""One look at a service: its router is asked who there is, and all are asked for their metrics at once."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from baton_api.errors import SetupError
from baton_cli.top.looks import Look
from baton_cli.top.series import Exposed

ANSWER_S = 3.0
AT_ONCE = 32


class Reader:
    """Keeps its connections from look to look."""

    def __init__(self, url: str, api_key: str) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_keepalive_connections=AT_ONCE * 4)
        self._router = httpx.Client(headers=headers, trust_env=False, timeout=ANSWER_S, limits=limits)
        self._workers = httpx.Client(trust_env=False, timeout=ANSWER_S, limits=limits)
        """Without the key: metrics are for all, and a worker's address may be anybody's by now."""
        self._pool = ThreadPoolExecutor(AT_ONCE)

    def look(self) -> Look:
        """Raises SetupError if the router gives no answer, or none to make sense of."""
        rows = self._rows()
        at_s = time.monotonic()
        router = self._pool.submit(self._read, self._router, self.url)
        asked = {row["worker"]: self._pool.submit(self._read, self._workers, _url(row)) for row in rows}
        found = {name: answer.result() for name, answer in asked.items()}
        exposed = {name: one for name, one in found.items() if one is not None}
        return Look(at_s, rows, router.result() or Exposed({}), exposed)

    def close(self) -> None:
        self._pool.shutdown()
        self._router.close()
        self._workers.close()

    def _rows(self) -> list[dict[str, Any]]:
        way_out = "Give the address of a Baton router with --url."
        try:
            answer = self._router.get(f"{self.url}/workers")
        except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            reason = str(error) or type(error).__name__
            raise SetupError(f"{self.url} does not answer: {reason}. {way_out}") from error
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise SetupError(
                f"{self.url} wants an API key that is allowed to: give it with --api-key or BATON_API_KEY."
            )
        try:
            rows: list[dict[str, Any]] = answer.raise_for_status().json()["data"]
        except (httpx.HTTPStatusError, ValueError, KeyError, TypeError) as error:
            raise SetupError(
                f"{self.url} lists no workers (status {answer.status_code}). {way_out}"
            ) from error
        return rows

    def _read(self, client: httpx.Client, url: str) -> Exposed | None:
        """None for who does not answer: a worker in a cluster, seen from outside."""
        try:
            return Exposed.parse(client.get(f"{url}/metrics").raise_for_status().text)
        except (httpx.HTTPError, httpx.InvalidURL, ValueError):
            return None


def _url(row: dict[str, Any]) -> str:
    return f"http://{row['worker']}"
