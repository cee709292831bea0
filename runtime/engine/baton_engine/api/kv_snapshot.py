"""
`GET /kv/snapshot`: all blocks that the worker keeps, for a router that has missed what changed.

The engine only copies its tables; the answer is made of frames (`baton_api.kv_events`), each on another
thread, so that neither the engine nor the other requests wait for a large cache to be written out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import msgspec
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from baton_api.errors import NotReady
from baton_api.kv_events import FRAME_ENTRIES, SnapshotFrame, frame
from baton_engine.api.served import Served
from baton_engine.kv.events import KvSnapshot

PATIENCE_S = 30.0
"""Seconds until the engine is between two steps."""


def routes(served: Served) -> list[Route]:
    async def snapshot(request: Request) -> StreamingResponse:
        try:
            async with asyncio.timeout(PATIENCE_S):
                taken = await served.engine.kv_snapshot()
        except TimeoutError as error:
            raise NotReady(f"The engine has not ended its step within {PATIENCE_S:g} s.") from error
        load = served.load()
        return StreamingResponse(frames(taken, load.epoch, load.block_size), media_type="application/msgpack")

    return [Route("/kv/snapshot", snapshot)]


async def frames(taken: KvSnapshot, epoch: str, block_size: int) -> AsyncIterator[bytes]:
    def encoded(start: int) -> bytes:
        stop = start + FRAME_ENTRIES
        blocks = taken.part(start, stop)
        return msgspec.msgpack.encode(SnapshotFrame(epoch, taken.seq, block_size, blocks, stop >= len(taken)))

    for start in range(0, len(taken) or 1, FRAME_ENTRIES):
        yield frame(await asyncio.to_thread(encoded, start))
