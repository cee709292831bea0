"""
A million prompts without shared prefixes through one scheduler: its memory must not grow.

    python -m benchmarks.unique_prompts --prompts 1000000

Each is planned, booked, started with a report and released. Events report that its blocks are stored and
evicted by twelve workers, whose caches are full after a few thousand prompts. Prints the memory after every
tenth: from the second line on it should be the same.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import random
import time

import psutil

from baton_api.kv_events import BlockRemoved, BlockStored, Event
from baton_api.prompt_report import PromptReport
from baton_api.workers import Load, Role
from baton_http.upstream import UpstreamPool
from baton_router.cache.block_map import WorkerBlocks
from baton_router.cache.prompt_chunks import PromptChunks
from baton_router.requests.picker import PickRequest, RequestEnd
from baton_router.scheduling.scheduler import RequestScheduler
from baton_router.settings import RouterSettings
from benchmarks.model_worker import BlockCache

PREFILL, DECODE = 8, 4
CAPACITY, BLOCK_TOKENS = 8_000, 64
BLOCKS = 16
"""Of each prompt, half as many chunks."""


def prompt_of(blocks: list[int]) -> PromptChunks:
    return PromptChunks(tuple(blocks[1::2]), tuple(512 * (place + 1) for place in range(len(blocks) // 2)))


class Teller:
    """One worker's cache and its KV events to the router."""

    def __init__(self, held: WorkerBlocks) -> None:
        self._held = held
        self._cache = BlockCache(CAPACITY)

    def use(self, blocks: list[int]) -> None:
        changed = self._cache.use(blocks)
        events: list[Event] = [BlockRemoved(list(changed.removed))] if changed.removed else []
        stored = [block for block, _ in changed.stored]
        self._held.apply([*events, BlockStored(stored, None, [], BLOCK_TOKENS)])


async def send(count: int) -> None:
    now = 0.0
    urls = [f"http://127.0.0.1:{port}" for port in range(1, PREFILL + DECODE + 1)]
    settings = RouterSettings(decode=tuple(urls[PREFILL:]), prefill=tuple(urls[:PREFILL]))
    scheduler = RequestScheduler(settings, UpstreamPool(1.0), random.Random(1), lambda: now)
    worker_states = scheduler.planner.worker_states
    tellers: dict[str, Teller] = {}
    for worker in scheduler.workers.all:
        control = "x:1" if worker.listed is Role.PREFILL else ""
        worker.answered(
            Load(
                role=worker.listed, model="m", control=control, epoch="1", compatibility="c",
                total_blocks=CAPACITY, free_blocks=CAPACITY, block_size=BLOCK_TOKENS,
            )
        )  # fmt: skip
        held = worker_states.blocks.open(worker_states.of(worker).slot)
        held.replace({})
        tellers[worker.name] = Teller(held)
    rng, process, began = random.Random(2), psutil.Process(), time.process_time()
    for number in range(1, count + 1):
        blocks = [rng.getrandbits(64) for _ in range(BLOCKS)]
        grant = await scheduler.pick(PickRequest("m", prompt_of(blocks)))
        now += 0.01
        for name in {grant.prefill or grant.decode, grant.decode}:
            tellers[name].use(blocks)
        tokens = BLOCKS * BLOCK_TOKENS
        report = PromptReport(
            tokens=tokens, cached=0, held=0, queue_s=0.0, compute_s=0.01, transfer_s=0.001,
            remote=bool(grant.prefill), tail=f"{blocks[-1]:016x}",
        )  # fmt: skip
        scheduler.began(grant, report)
        scheduler.release(grant, RequestEnd(complete=True))
        if number % (count // 10) == 0:
            gc.collect()
            each = 1e6 * (time.process_time() - began) / number
            memory = process.memory_info().rss / 2**20
            print(
                f"{number:>9} prompts  {memory:7.1f} MB  {len(worker_states)} chunks  {each:.0f} us each",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    asyncio.run(send(parser.parse_args().prompts))


if __name__ == "__main__":
    main()
