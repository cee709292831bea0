"""Blocks in a worker's pool and tiers, from an engine's events to what the router expects of each worker."""

from __future__ import annotations

import base64
import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton_api.kv_events import EventBatch
from baton_api.workers import EngineKind
from baton_router.cache import block_map
from baton_router.cache.block_map import BlockMap, WorkerBlocks
from baton_router.cache.kv_feed import KvEventFeed
from baton_router.cache.prefix_index import PrefixIndex
from baton_router.cache.prompt_chunks import PromptChunks
from baton_router.cache.tiers import Tier
from baton_router.cache.token_blocks import TokenBlockSink, prompt_tail
from baton_router.engines.registry import ENGINES

SIZE = 4
TOKENS = list(range(100, 116))
PROMPT = PromptChunks((1, 2, 3, 4), (512, 1024, 1536, 2048))
"""Four chunks, each of them a block of TOKENS."""

MEMORY, DISK, SHARED = Tier.MEMORY, Tier.DISK, Tier.SHARED
GPU: dict[str, Any] = {"medium": "GPU"}
CPU: dict[str, Any] = {"medium": "CPU"}
STORAGE: dict[str, Any] = {"medium": "STORAGE"}
REMOTE: dict[str, Any] = {"medium": "STORAGE", "locality": "REMOTE"}
PINNED: dict[str, Any] = {"medium": "CPU_PINNED"}

CLEARED: dict[str, Any] = {"type": "AllBlocksCleared"}


def stored(*blocks: int, tokens: Sequence[int] = TOKENS, **fields: Any) -> dict[str, Any]:
    """vLLM's event for blocks of the prompt, counted from 0; their names are 10, 11 and so on."""
    return {
        "type": "BlockStored",
        "block_hashes": [10 + block for block in blocks],
        "parent_block_hash": 9 + blocks[0] if blocks[0] else None,
        "token_ids": list(tokens[blocks[0] * SIZE : (blocks[-1] + 1) * SIZE]),
        "block_size": SIZE,
        "lora_id": None,
        "lora_name": None,
        **GPU,
        **fields,
    }


def removed(*blocks: int, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [10 + block for block in blocks], **GPU, **fields}


def placeholder(block: int, **fields: Any) -> dict[str, Any]:
    """What vLLM's connector publishes of a chunk that it cannot describe."""
    return stored(block, **fields) | {"parent_block_hash": None, "token_ids": [], "block_size": 0}


def batch(*events: dict[str, Any]) -> EventBatch:
    """As it comes over the wire, with what vLLM's events have besides."""
    told = [event | {"kv_cache_spec_kind": "full_attention", "session_id": None} for event in events]
    return msgspec.msgpack.decode(msgspec.msgpack.encode([0.0, told]), type=EventBatch)


class Router:
    """An index, a map, and the feeds of workers of one engine."""

    def __init__(self, *kinds: str, engine: EngineKind = EngineKind.VLLM) -> None:
        self.index = PrefixIndex()
        self.map = BlockMap(self.index)
        self.engine = engine
        self.workers: list[WorkerBlocks] = []
        self.feeds: list[KvEventFeed] = []
        self.numbers = Counter[int]()
        for slot, kind in enumerate(kinds or ("a",)):
            self.workers.append(self.map.open(slot, kind))
            self.feeds.append(self.feed(slot))
            self.index.register(slot, 10_000)

    def feed(self, slot: int) -> KvEventFeed:
        feed = KvEventFeed(
            TokenBlockSink(self.workers[slot], ENGINES[self.engine].cleared_tiers), 0.0, heartbeats=False
        )
        feed.snapshot(-1, {}, 0.0)
        return feed

    def restart(self, slot: int, kind: str = "a") -> None:
        """Another process of the worker."""
        self.workers[slot] = self.map.open(slot, kind)
        self.index.clear(slot)
        self.feeds[slot] = self.feed(slot)
        self.numbers[slot] = 0

    def tell(self, *events: dict[str, Any], slot: int = 0) -> None:
        self.feeds[slot].batch(self.numbers[slot], batch(*events).events, 0.0)
        self.numbers[slot] += 1

    def compute(self, slot: int = 0, **fields: Any) -> None:
        """The worker computes the prompt, and the router learns where its chunks are."""
        self.index.insert(slot, PROMPT.names)
        self.tell(stored(0, 1, 2, 3, **fields), slot=slot)
        extra = fields.get("extra_keys", [[""]])[0]
        self.map.place(PROMPT, int(prompt_tail(TOKENS, SIZE, extra[-1]), 16), 4, 0, [slot])

    def hot(self, slot: int = 0) -> int:
        return self.index.match(PROMPT.names).get(slot, 0)

    def reach(self, slot: int = 0) -> dict[Tier, int]:
        return dict(self.map.reach(PROMPT.names).get(slot, ()))


@pytest.mark.parametrize(
    ("events", "hot", "reach"),
    [
        pytest.param([], 4, {}, id="no tier"),
        pytest.param([stored(0, 1, 2, 3, **CPU)], 4, {MEMORY: 4}, id="in both"),
        pytest.param([stored(0, 1, 2, 3, **CPU), removed(3, 2, 1, 0)], 0, {MEMORY: 4}, id="evicted"),
        pytest.param([stored(0, 1, 2, 3, **CPU), removed(3, 2)], 2, {MEMORY: 4}, id="end evicted"),
        pytest.param([removed(3, 2, 1, 0), stored(0, 1, 2, 3, **CPU)], 0, {MEMORY: 4}, id="stored late"),
        pytest.param([stored(2, 3, **CPU), removed(3, 2)], 2, {MEMORY: 4}, id="continues the pool"),
        pytest.param([stored(2, 3, **CPU), removed(3, 2, 1)], 1, {MEMORY: 1}, id="gap"),
        pytest.param([stored(0, 1, 2, 3, **CPU), removed(2, 3, **CPU)], 4, {MEMORY: 4}, id="left the tier"),
        pytest.param(
            [stored(0, 1, **CPU), removed(1, **CPU), removed(3, 2, 1)], 1, {MEMORY: 1}, id="left both"
        ),
        pytest.param(
            [stored(0, 1, 2, 3, **CPU), stored(0, 1, 2, 3, **STORAGE), removed(3, 2), removed(3, **CPU)],
            2,
            {MEMORY: 3, DISK: 4},
            id="three media",
        ),
        pytest.param([stored(0, 1, 2, 3, medium="NVME"), removed(3)], 3, {DISK: 4}, id="unknown medium"),
        pytest.param([placeholder(0, **CPU), removed(0, **CPU)], 4, {}, id="placeholders"),
        pytest.param([stored(0, 1, 2, 3, **CPU), CLEARED], 0, {MEMORY: 4}, id="pool cleared"),
        pytest.param(
            [stored(0, 1, **CPU), stored(0, 1, **CPU), removed(0, 1, **CPU), removed(3, 2, 1, 0)],
            0,
            {MEMORY: 2},
            id="in two chunks, one evicted",
        ),
        pytest.param(
            [stored(0, 1, group_idx=1), removed(0, 1, group_idx=1)], 4, {}, id="left one group of layers"
        ),
        pytest.param(
            [stored(0, 1, 2, 3, **CPU), removed(3, 2, 1, 0), stored(0, 1, 2, 3)],
            4,
            {MEMORY: 4},
            id="restored",
        ),
    ],
)
def test_events_of_two_media(events: list[dict[str, Any]], hot: int, reach: dict[Tier, int]) -> None:
    """All in one batch, and each in one of its own."""
    for apart in (False, True):
        router = Router()
        router.compute()
        for one in [[event] for event in events] if apart else [events]:
            router.tell(*one)
        assert (router.hot(), router.reach()) == (hot, reach)


@pytest.mark.parametrize(
    ("events", "reach"),
    [
        ([stored(0, 1, 2, 3, **PINNED), removed(3, 2, 1, 0)], {MEMORY: 4}),
        ([stored(0, 1, 2, 3, **PINNED), CLEARED], {}),
        ([stored(0, 1, 2, 3, **PINNED), stored(0, 1, medium="DISK"), CLEARED], {DISK: 2}),
        ([stored(0, 1, 2, 3, medium="EXTERNAL"), removed(3, 2, 1, 0)], {SHARED: 4}),
    ],
    ids=["evicted", "cleared", "disk is not cleared", "shared pool"],
)
def test_sglang_clears_the_memory_of_its_host_with_the_pool(
    events: list[dict[str, Any]], reach: dict[Tier, int]
) -> None:
    router = Router(engine=EngineKind.SGLANG)
    router.compute()
    router.tell(*events)
    assert (router.hot(), router.reach()) == (0, reach)


@pytest.mark.parametrize("extra", [["salt"], ["adapter", "salt"]])
def test_block_with_a_salt_keeps_its_name_in_a_tier(extra: list[str]) -> None:
    """vLLM's events of tiers lack the salt."""
    router = Router()
    keys: list[list[str] | None] = [[*extra], *[extra[:-1] or None] * 3]
    tail = prompt_tail(TOKENS, SIZE, "salt", extra[0] if len(extra) > 1 else "")
    router.index.insert(0, PROMPT.names)
    router.tell(stored(0, 1, 2, 3, extra_keys=keys))
    router.map.place(PROMPT, int(tail, 16), 4, 0, [0])
    router.tell(removed(3, 2, 1, 0), stored(0, 1, 2, 3, **CPU))
    assert (router.hot(), router.reach()) == (0, {MEMORY: 4})


def test_pool_corrects_the_name_of_a_block_that_a_tier_named_first() -> None:
    """After a restart of the router, a tier's event can be the first one of a block with a salt."""
    router = Router()
    router.tell(stored(0, 1, 2, 3, **CPU))
    router.compute(extra_keys=[["salt"], None, None, None])
    router.tell(removed(3, 2, 1, 0))
    assert (router.hot(), router.reach()) == (0, {MEMORY: 4})
    router.tell(removed(3, 2, 1, 0, **CPU))
    assert router.reach() == {} and len(router.map) == 0


def test_lost_batch_is_applied_when_it_is_replayed() -> None:
    router = Router()
    router.compute()
    events = [batch(stored(0, 1, 2, 3, **CPU)), batch(removed(3, 2)), batch(removed(3, **CPU))]
    feed = router.feeds[0]
    feed.batch(2, events[1].events, 0.0)
    feed.batch(3, events[2].events, 0.0)
    assert (router.hot(), router.reach()) == (4, {})
    feed.batch(1, events[0].events, 0.0)
    assert (router.hot(), router.reach()) == (2, {MEMORY: 3})


def test_nothing_is_expected_after_a_batch_that_stays_lost() -> None:
    router = Router()
    router.compute()
    router.tell(stored(0, 1, 2, 3, **CPU))
    feed = router.feeds[0]
    feed.batch(9, batch(removed(3)).events, 0.0)
    feed.replay_ended(0.0)
    feed.restart(0.0)
    assert (router.hot(), router.reach()) == (0, {})
    feed.batch(10, batch(stored(0, 1, 2, 3, **CPU)).events, 0.0)
    assert (router.hot(), router.reach()) == (0, {MEMORY: 4})


def test_restarted_worker_has_no_tiers() -> None:
    router = Router()
    router.compute()
    router.tell(stored(0, 1, 2, 3, **CPU))
    before = router.workers[0]
    router.restart(0)
    assert (router.hot(), router.reach()) == (0, {}) and before.closed
    router.compute()
    assert (router.hot(), router.reach()) == (4, {})
    router.tell(stored(0, **CPU))
    assert router.reach() == {MEMORY: 4}


def test_shared_storage_is_one_place_for_workers_of_a_kind_that_use_it() -> None:
    router = Router("a", "a", "a", "b")
    router.compute()
    router.tell(stored(0, 1, 2, 3, **REMOTE))
    other = [token + 50 for token in TOKENS]
    for slot in (1, 3):
        router.tell(stored(0, tokens=other, **REMOTE), slot=slot)
    router.tell(stored(0, tokens=other, **CPU), slot=2)
    assert [router.reach(slot) for slot in range(4)] == [{SHARED: 4}, {SHARED: 4}, {}, {}]
    router.restart(0)  # what it stored stays
    assert router.reach(0) == {} and router.reach(1) == {SHARED: 4}
    router.tell(removed(3, **REMOTE), slot=1)
    assert router.reach(1) == {SHARED: 4}  # this worker has not stored it: it cannot know
    for slot in (0, 1, 2, 3):
        router.map.close(slot)
    assert len(router.map) == 0 and not any(router.map.tiers.values())


@pytest.mark.parametrize(("again", "left"), [(False, {}), (True, {SHARED: 4})])
def test_shared_storage_forgets_what_was_stored_first(
    again: bool, left: dict[Tier, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of workers that are gone, nobody says which blocks were deleted. What is stored again is new."""
    monkeypatch.setattr(block_map, "SHARED_BLOCKS", 8)
    router = Router("a", "a")
    router.compute()
    router.tell(stored(0, 1, 2, 3, **REMOTE))
    router.tell(stored(0, tokens=[1] * 4, **REMOTE) | {"block_hashes": [99]}, slot=1)
    assert router.reach(1) == {SHARED: 4}
    for number in range(2, 10):
        router.restart(0)
        router.tell(stored(0, tokens=[number] * 4, **REMOTE))
        if again and number == 6:
            router.tell(stored(0, 1, 2, 3, **REMOTE), slot=1)
        assert len(router.workers[1].tiers[SHARED].tree) <= 8
    assert router.reach(1) == left


def test_report_finds_blocks_that_tiers_have_already() -> None:
    """A prompt computed before this router began."""
    router = Router("a", "a")
    for slot, medium in enumerate((CPU, STORAGE)):
        router.tell(stored(0, 1, 2, 3), stored(0, 1, 2, **medium), removed(3, 2, 1, 0), slot=slot)
    router.compute(0)
    router.tell(removed(3, 2, 1, 0))
    assert [router.reach(slot) for slot in (0, 1)] == [{MEMORY: 3, DISK: 3}, {DISK: 3}]


def test_recorded_events_of_vllm_are_understood() -> None:
    """
    What vLLM 0.32's BlockPool, CPUOffloadingManager and OffloadingEventsTracker published for two prompts.

    Only the copies themselves were left out, as they take a GPU. The first prompt has a salt. The host's
    memory drops the beginning of a prompt first.
    """
    steps = json.loads((Path(__file__).parent / "vllm_tier_events.json").read_text())
    expected: dict[str, tuple[tuple[int, dict[Tier, int]], tuple[int, dict[Tier, int]]]] = {
        "the pool has a prompt of 4 blocks with a salt": ((4, {}), (0, {})),
        "the host's memory has it": ((4, {MEMORY: 4}), (0, {})),
        "the disk has it": ((4, {MEMORY: 4, DISK: 4}), (0, {})),
        "the pool evicts 2 blocks for another prompt": ((2, {MEMORY: 4, DISK: 4}), (4, {MEMORY: 4, DISK: 4})),
        "the host's memory evicts 2 blocks for it": ((2, {MEMORY: 4, DISK: 4}), (4, {MEMORY: 4, DISK: 4})),
        "the pool is cleared": ((0, {DISK: 4}), (0, {MEMORY: 4, DISK: 4})),
    }
    router = Router()
    prompts = [(PROMPT, list(range(100, 116)), "salt")]
    prompts.append((PromptChunks((5, 6, 7, 8), PROMPT.sizes), list(range(200, 216)), ""))
    for prompt, tokens, salt in prompts:
        router.map.place(prompt, int(prompt_tail(tokens, SIZE, salt), 16), 4, 0, [0])
    for number, step in enumerate(steps):
        message = base64.b64decode(step["batch"])
        router.feeds[0].batch(number, msgspec.msgpack.decode(message, type=EventBatch).events, 0.0)
        if "prompt" in step["step"]:
            # The engine has computed it, and the router assumes that until events say otherwise.
            router.index.insert(0, prompts[bool(number)][0].names)
        found = tuple(
            (router.index.match(one.names).get(0, 0), dict(router.map.reach(one.names).get(0, ())))
            for one, _, _ in prompts
        )
        assert found == expected[step["step"]], step["step"]


@pytest.mark.parametrize("seed", range(20))
def test_law_reach_is_what_the_events_say(seed: int) -> None:
    """
    Whatever comes, goes, is cleared, is evicted by the pool before a tier has it, or is named twice.

    Prompts are branches of one tree, with one block for each of their chunks.
    """
    rng = random.Random(seed)
    router = Router("a", "a")
    prompts: dict[int, PromptChunks] = {}
    places = [{medium: Counter[int]() for medium in ("GPU", "CPU", "STORAGE")} for _ in range(2)]

    def chain(number: int) -> list[int]:
        path: list[int] = []
        while number:
            path.insert(0, number)
            number //= 2
        return path

    def event(number: int, medium: str) -> dict[str, Any]:
        """The prompt's last block."""
        return stored(0, medium=medium) | {
            "block_hashes": [number],
            "parent_block_hash": number // 2 or None,
            "token_ids": [number] * SIZE,
        }

    for _ in range(400):
        slot, number, roll = rng.randrange(2), rng.randrange(1, 32), rng.random()
        there = places[slot]
        if roll < 0.35:
            path = chain(number)
            router.tell(*(event(one, "GPU") for one in path), slot=slot)
            there["GPU"].update(dict.fromkeys((one for one in path if not there["GPU"][one]), 1))
            router.index.insert(slot, path)
            prompts[number] = PromptChunks(tuple(path), tuple(512 * (n + 1) for n in range(len(path))))
            tail = prompt_tail([token for one in path for token in [one] * SIZE], SIZE)
            router.map.place(prompts[number], int(tail, 16), len(path), 0, [slot])
        elif roll < 0.6:
            medium = rng.choice(("CPU", "STORAGE"))
            path = [one for one in chain(number) if any(here[one] for here in there.values())]
            path = path[: next((n for n, one in enumerate(path) if one != chain(number)[n]), len(path))]
            router.tell(*(event(one, medium) for one in path), slot=slot)
            there[medium].update(path)
        elif roll < 0.97:
            medium = rng.choice(list(there))
            blocks = [one for one, count in there[medium].items() if count]
            gone = rng.sample(blocks, min(len(blocks), 3))
            router.tell({"type": "BlockRemoved", "block_hashes": gone, "medium": medium}, slot=slot)
            there[medium].subtract(gone)
        elif roll < 0.985:
            router.tell(CLEARED, slot=slot)
            there["GPU"].clear()
        else:
            router.restart(slot)
            for held in there.values():
                held.clear()
        for prompt in rng.sample(list(prompts.values()), min(len(prompts), 4)):
            reached = router.map.reach(prompt.names)
            for place, here in enumerate(places):
                counts = []
                for media in (("GPU",), ("GPU", "CPU"), ("GPU", "CPU", "STORAGE")):
                    count = 0
                    while count < len(prompt.names) and any(here[one][prompt.names[count]] for one in media):
                        count += 1
                    counts.append(count)
                believed = dict(reached.get(place, ()))
                assert router.index.match(prompt.names).get(place, 0) == counts[0]
                assert believed.get(MEMORY, counts[0]) == counts[1]
                assert believed.get(DISK, counts[1]) == counts[2]
    for slot in range(2):
        router.map.close(slot)
        router.index.clear(slot)
    assert len(router.map) == 0 and len(router.index) == 0 and not any(router.map.tiers.values())
