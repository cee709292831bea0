"""More than there is room for: real statuses, spread waits, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import pytest

from baton_api.errors import RETRY_SPREAD_S, Overloaded
from tests.engine.api.api import MODEL, USER, Api, eventually, open_api

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": MODEL, "messages": USER, "max_tokens": 4},
    "/v1/completions": {"model": MODEL, "prompt": "Hi", "max_tokens": 4},
    "/v1/responses": {"model": MODEL, "input": "Hi", "max_output_tokens": 4},
    "/generate": {"text": "Hi", "sampling_params": {"max_new_tokens": 4}},
}


async def ask(api: Api, path: str, stream: bool) -> httpx.Response:
    return await api.http.post(path, json=BODIES[path] | {"stream": stream})


def assert_refused(response: httpx.Response) -> int:
    """The seconds after which to come back."""
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("server_error", None, Overloaded.code)
    return int(response.headers["retry-after"])


async def test_overload_of_fifty_requests_the_rest_get_retry_after() -> None:
    async with open_api(max_running=1, max_queued=2) as api:
        api.model.go.clear()  # the engine takes none of them up before all have come
        first = asyncio.create_task(ask(api, "/v1/chat/completions", stream=False))
        await asyncio.to_thread(api.model.inside.wait)
        chance = random.Random(1)
        ways = [(chance.choice(list(BODIES)), chance.random() < 0.5) for _ in range(50)]
        tasks = [asyncio.create_task(ask(api, path, stream)) for path, stream in ways]
        await eventually(lambda: sum(task.done() for task in tasks) == 48)
        done = [task for task in tasks if task.done()]
        waits = [assert_refused(task.result()) for task in done]
        assert set(waits) <= set(range(1, 2 + RETRY_SPREAD_S))
        assert len(set(waits)) > 2, "all would come back at once"
        api.model.go.set()
        served = [first, *(task for task in tasks if task not in done)]
        assert [response.status_code for response in await asyncio.gather(*served)] == [200, 200, 200]
        await eventually(lambda: not api.served.computing.snapshot().owned_blocks)
        api.assert_all_blocks_back()
        assert (await api.chat()).status_code == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_overload_retried_requests_are_served(path: str, stream: bool) -> None:
    async with open_api(max_running=1, max_queued=1) as api:

        async def insist() -> int:
            for attempt in range(100_000):
                response = await ask(api, path, stream)
                if response.status_code == 200:
                    return attempt
                assert_refused(response)
                await asyncio.sleep(0)  # the Retry-After time takes no time here
            raise AssertionError("it never was served")

        await asyncio.gather(*(insist() for _ in range(10)))
        await eventually(lambda: not api.served.computing.snapshot().owned_blocks)
        api.assert_all_blocks_back()
