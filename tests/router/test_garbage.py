"""Requests leave nothing for the garbage collector, whose pauses delay all clients."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from baton_http.protocol import RequestCycle
from baton_router.engines.engine_request import EngineRequest
from baton_router.requests.inference_request import InferenceRequest
from tests.router.fake_worker import FakeWorker
from tests.router.running import QUESTION, STREAM, running_router, until

REQUESTS = 20


def alive(*kinds: type) -> set[int]:
    """The objects of these classes, by their `id`."""
    return {id(one) for one in gc.get_objects() if isinstance(one, kinds)}


@pytest.mark.parametrize("body", [QUESTION, STREAM], ids=["whole", "stream"])
async def test_request_is_freed_without_the_collector(body: dict[str, Any]) -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        gc.collect()
        before = alive(EngineRequest, InferenceRequest, RequestCycle)
        gc.disable()
        try:
            for _ in range(REQUESTS):
                assert (await router.post(body)).status_code == 200
            await until(lambda: not alive(EngineRequest, InferenceRequest) - before)
            # Each connection keeps its last request, and a client that was idle for long opens another one.
            assert len(alive(RequestCycle) - before) < REQUESTS / 2
        finally:
            gc.enable()
