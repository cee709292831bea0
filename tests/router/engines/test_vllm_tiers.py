"""The whole way of a tier: a vLLM worker's events over ZMQ, the decision, and what the router says of it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from baton_api import metrics
from baton_api.kv_events import sequence_bytes
from tests.router.engines.fake_engine import render
from tests.router.engines.fake_vllm import FakeVllm
from tests.router.engines.test_vllm import PAIRS_ALWAYS
from tests.router.running import CONNECT_S, running_router, until

MESSAGES = [{"role": "user", "content": " ".join(f"word{number}" for number in range(1_000))}]
CHAT = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}


class SlowVllm(FakeVllm):
    """Computing a prompt takes longer than restoring it would."""

    async def take(self, body: dict[str, Any]) -> None:
        await asyncio.sleep(0.3)
        await super().take(body)


class Events:
    """What one worker publishes."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self.socket = socket
        self.port = socket.bind_to_random_port("tcp://127.0.0.1")
        self.sent = 0

    async def publish(self, *events: dict[str, Any]) -> None:
        frames = [b"", sequence_bytes(self.sent), msgspec.msgpack.encode([0.0, events, None])]
        await self.socket.send_multipart(frames)
        self.sent += 1


async def test_prompt_is_restored_by_the_worker_that_has_it_in_memory() -> None:
    """Its accelerator has lost the prompt; the other prefill worker never had it."""
    tokens, size = render(MESSAGES), 4
    blocks = list(range(1, len(tokens) // size + 1))
    stored: dict[str, Any] = {"type": "BlockStored", "block_hashes": blocks, "parent_block_hash": None}
    stored |= {"token_ids": tokens, "block_size": size, "lora_id": None, "lora_name": None, "group_idx": 0}
    shared: dict[str, list[int]] = {}
    context = zmq.asyncio.Context()
    with context, context.socket(zmq.PUB) as left, context.socket(zmq.PUB) as right:
        async with FakeVllm(shared) as decode, SlowVllm(shared) as one, SlowVllm(shared) as two:
            events = {one.name: Events(left), two.name: Events(right)}
            for worker in (one, two):
                endpoint = f"tcp://127.0.0.1:{events[worker.name].port}"
                worker.event_sources = {"0": {"enable_kv_cache_events": True, "endpoint": endpoint}}
            async with running_router([decode], [one, two], **PAIRS_ALWAYS) as router:
                scheduler = router.router.scheduler
                feeds = scheduler.kv_subscribers.subscribers
                async with asyncio.timeout(CONNECT_S):
                    while len(feeds) < 2 or not all(feed.feed.whole for feed in feeds.values()):
                        for each in events.values():
                            await each.publish()
                        await asyncio.sleep(0.02)
                assert (await router.post(CHAT)).status_code == 200
                (first,) = (worker for worker in (one, two) if worker.computed)
                publish = events[first.name].publish
                await publish(stored | {"medium": "GPU"}, stored | {"medium": "CPU"})
                removed = {"type": "BlockRemoved", "block_hashes": blocks[::-1], "group_idx": 0}
                await publish(removed | {"medium": "GPU"})
                await until(lambda: feeds[first.name].feed.next == events[first.name].sent)
                tiers = metrics.ROUTER_INDEX_TIER_CHUNKS.name
                assert router.metric(tiers, tier="memory") > 0
                assert (await router.post(CHAT)).status_code == 200
                assert first.computed == 2
                decision = (await router.client.get("/debug/decisions")).json()["data"][0]
                restored = decision["restored"]["memory"]
                assert decision["prefill"] == first.name
                assert decision["reachable"] == {"memory": restored}
                assert restored == decision["cached"] >= 0.99 * decision["tokens"]
                assert router.metric(metrics.ROUTER_RESTORED_TOKENS.name, tier="memory") == restored
