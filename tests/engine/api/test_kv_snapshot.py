"""All blocks at once, for a subscriber that has missed changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import msgspec
import pytest
import torch

from baton_api import headers
from baton_api.hashing import block_hashes, root_hash
from baton_api.kv_events import FRAME_ENTRIES, Frames, SnapshotFrame, block_number
from baton_api.workers import Load, Role
from baton_engine.api import operations
from baton_engine.client import AsyncEngine
from baton_engine.kv.cache import KVCache
from baton_engine.kv.events import Change, KvEvents, KvSnapshot
from baton_engine.scheduling.limits import EngineLimits
from tests.engine.api.api import BLOCK_SIZE, CONTEXT, MODEL, TOKENIZER, Api, TalkingModel, open_api


class Silent:
    """Takes changes and keeps count."""

    def __init__(self) -> None:
        self.last = -1

    def publish(self, changes: Sequence[Change]) -> None:
        self.last += 1


@pytest.fixture
async def silent() -> Silent:
    return Silent()


@pytest.fixture
async def api(silent: Silent) -> AsyncIterator[Api]:
    """An API with an engine that publishes its cache events."""
    model = TalkingModel()
    cache = KVCache(model.spec, 512, torch.float32, torch.device("cpu"), BLOCK_SIZE)
    engine = AsyncEngine(model, cache, EngineLimits(max_model_len=CONTEXT), kv_events=KvEvents(silent))
    load = Load(role=Role.BOTH, model=MODEL, epoch="first", block_size=BLOCK_SIZE)
    engine.start()
    async with open_api(engine=engine, load=lambda: load) as api:
        yield api
    await engine.close()


async def frames(api: Api) -> list[SnapshotFrame]:
    answer = await api.http.get("/kv/snapshot")
    assert answer.status_code == 200
    return [msgspec.msgpack.decode(one, type=SnapshotFrame) for one in Frames().push(answer.content)]


async def test_kv_snapshot_of_empty_cache_is_one_frame(api: Api) -> None:
    assert await frames(api) == [SnapshotFrame("first", -1, BLOCK_SIZE, [], True)]


async def test_kv_snapshot_has_a_prompts_blocks_with_their_parents(api: Api, silent: Silent) -> None:
    prompt = "A prompt of some length."
    answer = await api.complete(prompt=prompt, max_tokens=1)
    assert answer.status_code == 200
    (frame,) = await frames(api)
    chain = [block_number(name) for name in block_hashes(TOKENIZER.encode(prompt), BLOCK_SIZE, root_hash())]
    assert dict(frame.blocks) == dict(zip(chain, [None, *chain], strict=False))
    assert frame.seq == silent.last >= 0


async def test_answer_header_names_the_prompts_last_block(api: Api) -> None:
    answer = await api.complete(prompt="A prompt of some length.", max_tokens=1)
    chain = block_hashes(TOKENIZER.encode("A prompt of some length."), BLOCK_SIZE, root_hash())
    assert f"tail={block_number(chain[-1]):016x}" in answer.headers[headers.PROMPT]


async def test_kv_snapshot_of_large_cache_comes_in_parts() -> None:
    names = [number.to_bytes(16) for number in range(FRAME_ENTRIES + 1)]
    taken = KvSnapshot(7, {name: index for index, name in enumerate(names)}, names[-1:] + names[:-1])
    body = b"".join([part async for part in operations.frames(taken, "first", 16)])
    first, last = (msgspec.msgpack.decode(one, type=SnapshotFrame) for one in Frames().push(body))
    assert (len(first.blocks), len(last.blocks), first.last, last.last) == (FRAME_ENTRIES, 1, False, True)
    assert last.blocks == [(FRAME_ENTRIES, FRAME_ENTRIES - 1)] and last.seq == 7


async def test_kv_snapshot_without_events_names_the_flag() -> None:
    async with open_api() as api:
        answer = await api.http.get("/kv/snapshot")
    assert answer.status_code == 503
    assert "--kv-events" in answer.json()["error"]["message"]


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_are_decoded_however_the_body_is_cut(size: int) -> None:
    messages = [bytes([number]) * number for number in range(20)]
    body = b"".join(len(one).to_bytes(4) + one for one in messages)
    frames = Frames()
    decoded = [one for at in range(0, len(body), size) for one in frames.push(body[at : at + size])]
    assert decoded == messages
