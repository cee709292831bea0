"""The whole way of a Baton worker's tiers: its own events, the decision, and what comes after a restart."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from baton_engine.api.app import create_app
from baton_engine.api.http import HttpServer, RequestDrain
from baton_engine.service import served_of
from baton_engine.settings import WorkerSettings
from baton_engine.worker import Worker, open_worker
from tests.engine.models import make_model
from tests.router.running import RunningRouter, running_router, until

BLOCK_BYTES = 2 * 2 * 2 * 16 * 16 * 4
"""As in tests/engine/test_worker.py."""

POOL, MEMORY, DISK = 160, 140, 1000
"""Blocks of 16 tokens."""


class Address:
    def __init__(self, url: str) -> None:
        self.url = url


@contextlib.asynccontextmanager
async def serving(model: Path, folder: Path, port: int = 0) -> AsyncIterator[tuple[int, Worker]]:
    """A real worker with tiers, in this process, and its port."""
    settings = WorkerSettings.model_validate(
        {
            "model": str(model),
            "dtype": "float32",
            "threads": 1,
            "port": port,
            "kv_cache_memory": BLOCK_BYTES * (POOL + 1),
            "kv_memory_tier": BLOCK_BYTES * MEMORY,
            "kv_disk_tier": str(folder),
            "kv_disk_tier_size": (BLOCK_BYTES + 128) * DISK,
            "kv_events": "tcp://127.0.0.1:0",
        }
    )
    async with open_worker(settings) as worker:
        drain = RequestDrain()
        async with HttpServer(create_app(served_of(worker, drain=drain)), "127.0.0.1", port, drain) as http:
            yield http.port, worker


async def ask(router: RunningRouter, prompt: str) -> tuple[str, dict[str, Any]]:
    """The answer, and the decision for it."""
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    answer = await router.post(body, "/v1/completions")
    assert answer.status_code == 200, answer.text
    decisions = (await router.client.get("/debug/decisions")).json()["data"]
    return answer.json()["choices"][0]["text"], decisions[0]


def check_reachable(answer: str, decision: dict[str, Any], expected: str) -> None:
    assert answer == expected
    assert list(decision["reachable"]) == ["disk"]
    assert 0.8 * decision["tokens"] < decision["reachable"]["disk"] < decision["tokens"]


@pytest.mark.slow
async def test_blocks_of_a_baton_worker_on_its_disk_are_reachable_also_after_its_restart(
    tmp_path: Path,
) -> None:
    threads = torch.get_num_threads()
    model = make_model(tmp_path / "tiny", max_position_embeddings=4096)
    folder = tmp_path / "kv"
    prompts = ["".join(random.Random(seed).choices("abcdefgh", k=2_000)) for seed in range(4)]
    try:
        async with contextlib.AsyncExitStack() as stack:
            process = await stack.enter_async_context(contextlib.AsyncExitStack())
            port, worker = await process.enter_async_context(serving(model, folder))
            router = await stack.enter_async_context(running_router([Address(f"http://127.0.0.1:{port}")]))
            feeds = router.router.scheduler.kv_subscribers.subscribers

            def knows(worker: Worker) -> bool:
                """The router has applied all events."""
                return any(
                    each.state.epoch == worker.epoch
                    and each.feed.whole
                    and each.feed.next >= worker.kv_batches()
                    for each in feeds.values()
                )

            await until(lambda: knows(worker))
            answers, tokens = [], 0
            for prompt in prompts:  # neither the pool nor the memory has room for two of them
                answer, decision = await ask(router, prompt)
                assert decision["reachable"] == {}
                answers.append(answer)
                tokens += decision["actual_tokens"]
                await until(lambda: worker.engine.snapshot().tiers[1].blocks >= tokens // 16 - len(prompts))  # noqa: B023
            await until(lambda: knows(worker))
            for again, expected in zip(prompts[:2], answers, strict=False):
                check_reachable(*await ask(router, again), expected)

            (known,) = router.router.workers.all
            epoch = worker.epoch
            await process.aclose()
            _, worker = await process.enter_async_context(serving(model, folder, port))
            await until(lambda: known.health.load and known.health.load.epoch != epoch)
            assert router.router.scheduler.planner.worker_states.of(known).epoch == worker.epoch
            await until(lambda: knows(worker))
            for again, expected in zip(prompts[:2], answers, strict=False):
                check_reachable(*await ask(router, again), expected)
    finally:
        torch.set_num_threads(threads)
