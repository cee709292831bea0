"""
A replay without sockets and without waiting: only the scheduler, with modeled workers, in virtual time.

    python -m benchmarks.replay_inside --workload mooncake_conversation_trace.jsonl --minutes 60

With `--chunk N` the workers compute by passes (`model_passes`): up to N prompt tokens delay the streams of
their worker. Printed are also the share of requests within two objectives, and gaps between tokens.

An hour passes in seconds and every run is the same, so that decisions can be compared. The cost of
processes and sockets, and the influence of busy machines, are measured by `replay`. Events can
be lost (`--lost 0.01`), workers can restart (`--restart-s 60`), and the router's clock can jump
(`--jump-s 30`): the expected cached tokens must stay equal to the actual ones.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from baton_api.errors import BatonError
from baton_api.kv_events import IN_USE, BlockRemoved, BlockStored, Event
from baton_api.prompt_report import PromptReport
from baton_api.workers import Load, Role
from baton_http.upstream import UpstreamPool
from baton_router.cache import kv_feed, prompt_chunks
from baton_router.cache.tiers import MEDIA, Tier
from baton_router.requests.picker import PickRequest, RequestEnd
from baton_router.scheduling.scheduler import RequestScheduler
from baton_router.settings import RouterSettings
from baton_router.workers.worker import Worker
from benchmarks import virtual_time, workloads
from benchmarks.crowd import ReplayedRequest, play
from benchmarks.model_passes import GAP_S, Chunks, PassWorker
from benchmarks.model_worker import Changed, ModelWorker, Timing, answer_text, prompt_text, text_of
from benchmarks.replay import summarize
from benchmarks.workloads import Arrival, Message

MODEL = "m"
LOOK_S = 2.0
"""Seconds from one look at a worker to the next."""

TIMEOUT_S = 7200.0

JUMP_EVERY_S = 60.0

TTFT_S = 5.0
TOKEN_S = 0.05
"""Objectives: seconds to the first token, and on average from one token of an answer to the next."""

KEPT = 100
"""Batches of events that a worker can send again."""


@dataclass(frozen=True, slots=True)
class Faults:
    """Simulated faults."""

    lost: float = 0.0
    """Share of the batches of events that do not arrive."""
    restart_s: float = 0.0
    """Seconds between restarts of workers; 0: none."""
    jump_s: float = 0.0
    """Seconds by which the router's clock jumps forward every minute, as if its process had been stopped."""


class InsideWorker:
    """A modeled worker, the router's state of it, and the events between the two."""

    def __init__(
        self,
        seen: Worker,
        role: Role,
        timing: Timing,
        capacity: int,
        block_tokens: int,
        tier: int,
        lost: float,
        clock: Callable[[], float],
        chunks: Chunks | None,
    ) -> None:
        """`capacity` and `tier` in blocks; `clock` is the router's; `chunks` if it computes by passes."""
        self._chunks = chunks
        self._clock = clock
        self._timing = timing
        self.role = role
        self.seen = seen
        self.busy_s = 0.0
        """Of earlier processes."""
        self._capacity, self._block_tokens, self._tier = capacity, block_tokens, tier
        self._lost = lost
        self._rng = random.Random(seen.name)
        self._epoch = 0
        self.begin()

    def begin(self) -> None:
        """As a new process."""
        if self._epoch:
            self.busy_s += self.model.busy_s
        self._epoch += 1
        self._sent: list[Sequence[Event]] = []
        self._feed: kv_feed.KvEventFeed | None = None
        sizes = self._timing, self._capacity, self._block_tokens
        self.model: ModelWorker
        if self._chunks is None:
            self.model = ModelWorker(*sizes, self._tell, self._tier, self._tell_tier)
        else:
            self.model = PassWorker(*sizes, self._tell, self._chunks)

    @property
    def load(self) -> Load:
        model = self.model
        return Load(
            role=self.role,
            model=MODEL,
            running=model.streams,
            queued=model.queued,
            queued_tokens=model.queued_tokens,
            step_s=model.step_s if model.streams else 0.0,
            free_blocks=max(0, self._capacity - model.context // self._block_tokens),
            total_blocks=self._capacity,
            block_size=self._block_tokens,
            control=self.seen.name if self.role is Role.PREFILL else "",
            epoch=str(self._epoch),
            compatibility="c",
        )

    @property
    def usage(self) -> dict[str, Any]:
        return {"role": self.role, "busy_s": self.busy_s + self.model.busy_s}

    def followed(self, blocks: kv_feed.BlockSink, now: float) -> None:
        """Connect the router to the events of this process."""
        self._feed = kv_feed.KvEventFeed(blocks, now)

    def tend(self, now: float) -> None:
        """Send an empty batch, which reveals lost ones, and answer the requests of the feed."""
        self._send(())
        feed = self._feed
        if feed is None:
            return
        match feed.due(now):
            case kv_feed.FeedRequest.SNAPSHOT:
                feed.snapshot(len(self._sent) - 1, dict(self.model.cache.parents), now)
            case kv_feed.FeedRequest.REPLAY:
                for seq in range(max(feed.next, len(self._sent) - KEPT), len(self._sent)):
                    feed.batch(seq, self._sent[seq], now)
                feed.replay_ended(now)

    def _tell(self, changed: Changed) -> None:
        self._tell_of(changed, IN_USE)

    def _tell_tier(self, changed: Changed) -> None:
        self._tell_of(changed, MEDIA[Tier.MEMORY])

    def _tell_of(self, changed: Changed, medium: str) -> None:
        removed = list(changed.removed)
        events: list[Event] = [BlockRemoved(removed, medium)] if removed else []
        for block, parent in changed.stored:
            last = events[-1] if events else None
            if isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
                last.block_hashes.append(block)
            else:
                events.append(BlockStored([block], parent, [], self._block_tokens, medium=medium))
        self._send(events)

    def _send(self, events: Sequence[Event]) -> None:
        self._sent.append(events)
        if len(self._sent) > KEPT:
            self._sent[len(self._sent) - KEPT - 1] = ()
        if self._feed is not None and self._rng.random() >= self._lost:
            self._feed.batch(len(self._sent) - 1, events, self._clock())


class Inside:
    """A router's scheduler and its cluster: `workloads.Asking` for every session."""

    def __init__(
        self,
        roles: Sequence[Role],
        speed: float,
        scale: float,
        capacity: int,
        block_tokens: int,
        tier: int,
        lost: float,
        seed: int,
        chunks: Chunks | None,
    ) -> None:
        """`scale`: how much faster than modeled the workers are; `speed`: the same for the clients."""
        self._speed = speed
        self.jumped_s = 0.0
        self._loop = asyncio.get_running_loop()
        self.requests: list[ReplayedRequest] = []
        self.compared: list[tuple[int, int]] = []
        """Tokens of each prompt that the choice counted on, and that were cached where it was computed."""
        listed = [(role, f"http://127.0.0.1:{1 + number}") for number, role in enumerate(roles)]
        settings = RouterSettings(
            decode=tuple(url for role, url in listed if role is not Role.PREFILL),
            prefill=tuple(url for role, url in listed if role is Role.PREFILL),
        )
        self.scheduler = RequestScheduler(settings, UpstreamPool(1.0), random.Random(seed), self._now)
        self.workers = {
            seen.name: InsideWorker(
                seen,
                Role.PREFILL if seen.listed is Role.PREFILL else roles[-1],
                Timing().faster(scale),
                capacity,
                block_tokens,
                tier,
                lost,
                self._now,
                chunks,
            )
            for seen in self.scheduler.workers.all
        }
        self.look()

    def _now(self) -> float:
        """By the router's clock."""
        return self._loop.time() + self.jumped_s

    def look(self) -> None:
        """Check the health of the workers, and connect to the events of restarted ones."""
        worker_states = self.scheduler.planner.worker_states
        for worker in self.workers.values():
            load, before = worker.load, worker.seen.health.load
            worker.seen.answered(load)
            if before is None or before.epoch != load.epoch:
                worker.followed(worker_states.blocks.open(worker_states.of(worker.seen).slot), self._now())

    async def watch(self, faults: Faults) -> None:
        rng, restarted, jumped = random.Random(2), self._loop.time(), self._loop.time()
        while True:
            await asyncio.sleep(LOOK_S)
            if faults.jump_s and self._loop.time() - jumped >= JUMP_EVERY_S:
                jumped = self._loop.time()
                self.jumped_s += faults.jump_s
            for worker in self.workers.values():
                worker.tend(self._now())
            if faults.restart_s and self._loop.time() - restarted >= faults.restart_s:
                restarted = self._loop.time()
                rng.choice(list(self.workers.values())).begin()
            self.look()

    async def ask(self, messages: list[Message], tokens: int) -> str:
        prompt_messages = [prompt_chunks.PromptMessage(one["role"], one["content"]) for one in messages]
        prompt = prompt_chunks.chunk_messages(prompt_messages, None, prompt_chunks.root_name("", MODEL))
        self.requests.append(one := ReplayedRequest())
        sent = self._loop.time()
        try:
            grant = await self.scheduler.pick(PickRequest(MODEL, prompt))
        except BatonError:
            return ""
        placement = next(
            one for one in reversed(self.scheduler.planner.placements) if one.number == grant.number
        )
        whole = False
        try:
            decode = self.workers[grant.decode].model
            source = self.workers[grant.prefill].model if grant.prefill else decode
            raw = prompt_text((m["role"], m["content"]) for m in messages)
            text = text_of(raw, decode.block_tokens)
            held = min(decode.cache.matched(text.blocks) * decode.block_tokens, text.tokens - 1)
            done = await source.compute(text)
            if source is not decode:
                await asyncio.sleep(decode.timing.move_s)
            self.scheduler.began(
                grant,
                PromptReport(
                    tokens=text.tokens,
                    cached=done.cached,
                    held=held,
                    queue_s=done.queue_s,
                    compute_s=done.compute_s,
                    transfer_s=0.0 if source is decode else decode.timing.move_s,
                    remote=source is not decode,
                    tail=f"{text.blocks[-1]:016x}" if text.blocks else "",
                ),
            )
            self.compared.append((placement.expected_cached, done.cached))
            one.wait, one.tokens, one.cached = self._loop.time() - sent, text.tokens, done.cached
            answer = answer_text(text, tokens)
            first = self._loop.time()
            await decode.generate(text, tokens, lambda count: None)
            one.token_s = (self._loop.time() - first) / max(1, tokens - 1)
            decode.use(text_of(raw + answer.encode(), decode.block_tokens).blocks)
            one.ok = whole = True
            return answer
        finally:
            self.scheduler.release(grant, RequestEnd(complete=whole, tokens=tokens if whole else None))

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self._speed)


async def replay(
    arrivals: Iterator[Arrival],
    rate: float,
    scale: float,
    roles: Sequence[Role],
    capacity: int,
    block_tokens: int,
    tier: int,
    faults: Faults,
    seed: int = 1,
    chunks: Chunks | None = None,
) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    inside = Inside(roles, rate * scale, scale, capacity, block_tokens, tier, faults.lost, seed, chunks)
    watch = asyncio.create_task(inside.watch(faults))
    began = time.process_time()
    await play(arrivals, inside, rate * scale, loop.time, TIMEOUT_S)
    watch.cancel()
    worker_states = inside.scheduler.planner.worker_states
    expected = sum(one for one, _ in inside.compared)
    states = [worker_states.of(one.seen) for one in inside.workers.values()]
    models = [one.model for one in inside.workers.values()]
    prompt_tokens = sum(one.prompt_tokens for one in models)
    return summarize(inside.requests, [one.usage for one in inside.workers.values()], loop.time(), scale) | {
        "actual_expected": round(sum(one for _, one in inside.compared) / expected, 3) if expected else 1.0,
        "restored": round(sum(one.restored_tokens for one in models) / max(1, prompt_tokens), 4),
        "left_booked": sum(one.prefills.waiting + one.streams.count for one in states),
        "chunks": len(worker_states),
        "memory_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "processor_s": round(time.process_time() - began, 1),
        **goodput(inside.requests, models, scale),
    }


def goodput(
    requests: Sequence[ReplayedRequest], models: Sequence[ModelWorker], scale: float
) -> dict[str, float]:
    """Requests within both objectives, and gaps between tokens, if the workers record them."""
    gaps: Counter[int] = Counter()
    for model in models:
        if isinstance(model, PassWorker):
            gaps.update(model.gaps)
    if not gaps:
        return {}
    ordered, total, passed = sorted(gaps), gaps.total(), 0
    at: dict[float, float] = {}
    for gap in ordered:
        passed += gaps[gap]
        for share in (0.5, 0.99):
            if share not in at and passed >= share * total:
                at[share] = gap * GAP_S * scale
    good = [one.ok and one.wait * scale <= TTFT_S and one.token_s * scale <= TOKEN_S for one in requests]
    return {
        "good": round(sum(good) / len(good), 4),
        "gap_p50_ms": round(1e3 * at[0.5], 1),
        "gap_p99_ms": round(1e3 * at[0.99], 1),
        "gap_max_ms": round(1e3 * ordered[-1] * GAP_S * scale, 1),
    }


def roles_of(prefill: int, decode: int) -> list[Role]:
    """Of so many workers; without prefill workers all do both."""
    return [Role.PREFILL] * prefill + [Role.DECODE if prefill else Role.BOTH] * decode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--workload", required=True, help=f"a trace, or one of {', '.join(workloads.GENERATED)}"
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="times the workload's own rate")
    parser.add_argument("--scale", type=float, default=1.0, help="times faster than modeled, as in `replay`")
    parser.add_argument("--prefill", type=int, default=8, help="workers; 0: the decode workers do it all")
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--capacity", type=int, default=2000, help="blocks of each worker")
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument(
        "--tiers", type=int, nargs="+", default=[0], help="sizes of each worker's memory tier, in capacities"
    )
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[1],
        help="of the router's choices, and of generated workloads",
    )
    parser.add_argument("--lost", type=float, default=0.0, help="share of the batches of events")
    parser.add_argument("--restart-s", type=float, default=0.0, help="seconds between restarts of workers")
    parser.add_argument("--jump-s", type=float, default=0.0, help="of the router's clock, every minute")
    parser.add_argument(
        "--chunk", type=int, default=0, help="most prompt tokens beside streams; 0: no passes"
    )
    parser.add_argument(
        "--hidden",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="whether weights are read during a chunk's arithmetic",
    )
    options = parser.parse_args()
    for rate, tier, seed in itertools.product(options.rates, options.tiers, options.seeds):
        summary = virtual_time.run(
            replay(
                workloads.arrivals(options.workload, options.minutes, seed),
                rate,
                options.scale,
                roles_of(options.prefill, options.decode),
                options.capacity,
                options.block_tokens,
                tier * options.capacity,
                Faults(options.lost, options.restart_s, options.jump_s),
                seed,
                Chunks(options.chunk, options.hidden) if options.chunk else None,
            )
        )
        print(json.dumps({"rate": rate, "tier": tier, "seed": seed, **summary}), flush=True)


if __name__ == "__main__":
    main()
