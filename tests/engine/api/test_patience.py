"""A header marks patient requests; other requests go before them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from baton_api.headers import CLASS
from tests.engine.api.api import MODEL, USER, Api, eventually, open_api

LONG, SHORT = 300, 4

PATHS: dict[str, Callable[[int], dict[str, Any]]] = {
    "/v1/chat/completions": lambda tokens: {"messages": USER, "max_tokens": tokens},
    "/v1/completions": lambda tokens: {"prompt": "Hi", "max_tokens": tokens},
    "/v1/responses": lambda tokens: {"input": "Hi", "max_output_tokens": tokens},
}


async def ask(api: Api, path: str, tokens: int, kind: str) -> httpx.Response:
    body = {"model": MODEL, "temperature": 0, **PATHS[path](tokens)}
    return (await api.http.post(path, json=body, headers={CLASS: kind})).raise_for_status()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("kind", "gives_way"), [("batch", True), ("default", False)])
async def test_patient_request_gives_its_place_to_others(path: str, kind: str, gives_way: bool) -> None:
    async with open_api(max_running=1) as api:
        api.model.go.clear()
        first = asyncio.create_task(ask(api, path, LONG, kind))
        await asyncio.to_thread(api.model.inside.wait)
        second = asyncio.create_task(ask(api, path, SHORT, "default"))
        await eventually(lambda: api.served.computing.snapshot().queued == 1)
        # A pass per token: the engine stops when one of them has ended, and the other one has not.
        api.model.stops_at = (SHORT if gives_way else LONG) + 3
        api.model.go.set()
        early, late = (second, first) if gives_way else (first, second)
        await early
        assert not late.done()
        api.model.resume()
        await second
        answer = (await first).json()
        usage = answer["usage"]
        assert usage.get("completion_tokens", usage.get("output_tokens")) == LONG
        assert (api.served.computing.snapshot().totals.retractions > 0) == gives_way
        api.assert_all_blocks_back()
