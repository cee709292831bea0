"""Requests leave nothing for the garbage collector, whose pauses delay all clients."""

from __future__ import annotations

import gc
from typing import Any

import pytest

from baton_http.protocol import RequestCycle
from baton_router.proxy.attempt import Attempt
from baton_router.proxy.routed_request import RoutedRequest
from tests.router.fake_worker import FakeWorker
from tests.router.running import QUESTION, STREAM, running_router, until

PARTS = (Attempt, RequestCycle, RoutedRequest)


def alive() -> set[int]:
    """The parts of requests that exist, by their `id`."""
    return {id(one) for one in gc.get_objects() if isinstance(one, PARTS)}


@pytest.mark.parametrize("body", [QUESTION, STREAM], ids=["whole", "stream"])
async def test_request_is_freed_without_the_collector(body: dict[str, Any]) -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        gc.collect()
        before = alive()
        gc.disable()
        try:
            for _ in range(5):
                assert (await router.post(body)).status_code == 200
            # The client's connection keeps its last request until the next one.
            await until(lambda: len(alive() - before) <= 1)
        finally:
            gc.enable()
