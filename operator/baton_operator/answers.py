"""
Answers over HTTP from servers that users of a service choose: its pods, and the Prometheus that it names.

An answer has a bounded size, is not compressed, and leads to no other address. Callers bound its time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

LIMIT = 4 * 1024 * 1024
"""Default maximum bytes of an answer."""

METRICS_S = 3.0
"""Default time limit in seconds for the metrics of a pod."""

LINES_LIMIT = 4096
"""Maximum samples that are read from the metrics of a pod."""


def session(**options: Any) -> aiohttp.ClientSession:
    """Return a session for `fetch`. `options`: of aiohttp."""
    return aiohttp.ClientSession(trust_env=False, auto_decompress=False, **options)


async def fetch(
    session: aiohttp.ClientSession, method: str, url: str, *, limit: int = LIMIT, **options: Any
) -> tuple[int, bytes]:
    """Return status and body. Raises aiohttp.ClientError, OSError, TimeoutError, and ValueError for a body
    that is compressed or has more than `limit` bytes.
    """
    headers = {"Accept-Encoding": "identity", **options.pop("headers", {})}
    request = session.request(method, url, headers=headers, allow_redirects=False, **options)
    async with request as answer:
        if answer.headers.get("Content-Encoding", "identity") != "identity":
            raise ValueError("the answer is compressed")
        body = bytearray()
        async for chunk in answer.content.iter_any():
            body += chunk
            if len(body) > limit:
                raise ValueError(f"the answer has more than {limit} bytes")
        return answer.status, bytes(body)


def bearer(file: str) -> dict[str, str]:
    """Return the header with the token in a file; empty without a file. Raises OSError."""
    return {"Authorization": f"Bearer {Path(file).read_text(encoding='utf-8').strip()}"} if file else {}


async def pod_metrics(url: str, limit_s: float = METRICS_S) -> str:
    """Return the metrics of a pod as text. Raises like `fetch`, also for an error status."""
    async with session(timeout=aiohttp.ClientTimeout(total=limit_s)) as asking:
        status, body = await fetch(asking, "GET", url)
    if status != 200:
        raise ValueError(f"status {status}")
    return body.decode()


def samples(text: str, *names: str) -> list[Sample]:
    """
    Return the samples of the metrics whose names start with one of `names`, in Prometheus' text format.

    Raises ValueError if the format is invalid, or for more than LINES_LIMIT samples.

    >>> [(one.name, one.value) for one in samples("a 1\\nb 2\\n", "b")]
    [('b', 2)]
    """
    lines = [line for line in text.split("\n") if line.startswith(names)]
    if len(lines) > LINES_LIMIT:
        raise ValueError(f"the metrics have {len(lines)} samples; the limit is {LINES_LIMIT}")
    families = text_string_to_metric_families("\n".join([*lines, ""]))
    return [sample for family in families for sample in family.samples]
