"""Create a batch from a file exactly once: after a crash, its metadata identify it."""

from __future__ import annotations

import asyncio
import random
from urllib.parse import quote

import msgspec

from baton_api import batch_jobs
from baton_api.completion_windows import DAY, window_fields
from baton_api.errors import NotReady, WorkerLost
from baton_batches import retries
from baton_batches.runner_gateway import OK, REPLY_LIMIT, REQUEST_TIMEOUT_S, upstream_of
from baton_http.http_client import fetch

BATCHES = "/v1/batches"
PAGE = 100

RETRY_STATUSES = frozenset({408, 429, *range(500, 600)})
"""Answers after which the same request may get another one."""


class SubmissionRejected(Exception):
    """The router rejects the request, and a retry is useless; the text has the reason."""


class _SubmittedBatch(msgspec.Struct):
    id: str
    metadata: dict[str, str] | None = None


class _BatchPage(msgspec.Struct):
    data: list[_SubmittedBatch]
    has_more: bool


class BatchSubmission:
    """The requests to a router for one BatchJob."""

    def __init__(
        self,
        url: str,
        key: str,
        file: str,
        endpoint: str,
        job: str,
        window: str = DAY,
        rng: random.Random | None = None,
    ) -> None:
        """`job` is the BatchJob's name and uid, as `name/uid`. Raises SetupError for an invalid `url`."""
        self._upstream = upstream_of(url)
        self._key = key
        self._file = file
        self._endpoint = endpoint
        self._job = job
        self._window = window
        self._rng = rng or random.Random()

    async def batch(self) -> str:
        """Return the id of the batch, after creating it if needed. Raises SubmissionRejected."""
        try:
            return await self._find() or await self._make()
        finally:
            self._upstream.close()

    async def _find(self) -> str:
        after = ""
        while True:
            more = f"&after={quote(after, safe='')}" if after else ""
            page = msgspec.json.decode(await self._request("GET", f"?limit={PAGE}{more}"), type=_BatchPage)
            for one in page.data:
                if (one.metadata or {}).get(batch_jobs.METADATA) == self._job:
                    return one.id
            if not page.has_more:
                return ""
            after = page.data[-1].id

    async def _make(self) -> str:
        body = {
            "input_file_id": self._file,
            "endpoint": self._endpoint,
            "metadata": {batch_jobs.METADATA: self._job},
            **window_fields(self._window),
        }
        return msgspec.json.decode(
            await self._request("POST", "", msgspec.json.encode(body)), type=_SubmittedBatch
        ).id

    async def _request(self, method: str, query: str, body: bytes = b"") -> bytes:
        """Repeat the request until the router answers. Raises SubmissionRejected."""
        headers = [("content-type", "application/json")]
        headers += [("authorization", f"Bearer {self._key}")] if self._key else []
        attempts = 0
        while True:
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    target = f"{BATCHES}{query}"
                    reply = await fetch(self._upstream, method, target, headers, body, limit=REPLY_LIMIT)
            except (WorkerLost, NotReady, TimeoutError):
                pass
            else:
                if reply.status == OK:
                    return reply.body
                if reply.status not in RETRY_STATUSES:
                    raise SubmissionRejected(reply.body.decode(errors="replace"))
            await asyncio.sleep(retries.backoff_s(attempts, self._rng) / 5)
            attempts += 1
            if body and (id := await self._find()):  # the batch was created, but the reply was lost
                return msgspec.json.encode({"id": id})
