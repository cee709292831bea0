"""
Routers asked themselves how many requests they hold: a service that sleeps is woken without Prometheus.

Only that is asked of them: whatever needs a rate needs somebody who remembers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from baton_api import metrics
from baton_operator.scaling.reading import Reading, unknown

TIMEOUT_S = 2.0


async def held(urls: Sequence[str]) -> Reading:
    """Requests that all of these routers hold for a worker; unknown if none of them answers."""
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:
        answers = await asyncio.gather(*(_held(session, url) for url in urls))
    known = [one for one in answers if one is not None]
    return Reading.of(sum(known)) if known else unknown("no router says what it holds")


async def _held(session: aiohttp.ClientSession, url: str) -> float | None:
    try:
        async with session.get(f"{url}/metrics") as answer:
            text = await answer.text()
        families = list(text_string_to_metric_families(text))
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
        return None
    values = [
        sample.value for one in families for sample in one.samples if one.name == metrics.ROUTER_HELD.name
    ]
    return sum(values) if values else None
