"""
Policies of other routers, simulated before the modeled workers of `replay_inside`, in virtual time.

    python -m benchmarks.peer_policies --workload mooncake_conversation_trace.jsonl --minutes 20 --rates 1 1.4

`--tiers` gives each worker a memory tier, as in `replay_inside`; the precise policies price its blocks as
their projects do by default. The policy "baton" is the router's own scheduler, as in `replay_inside`.

Each policy sends a request when it arrives, and the workers compute in order of arrival. A policy knows what
one router sees: its own requests and, for the precise ones, the workers' caches. The rules are those that the
projects publish, with their defaults or the stated settings; none of their code is used. A worker with the
fewest streams generates. Real routers are measured by `replay`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from baton_api.workers import Role
from benchmarks import replay_inside, virtual_time, workloads
from benchmarks.crowd import ReplayedRequest, play
from benchmarks.model_worker import BlockCache, ModelWorker, Text, Timing, answer_text, prompt_text, text_of
from benchmarks.replay import summarize
from benchmarks.workloads import Message

TIMEOUT_S = 7200.0

TREE_TOKENS = 2**26 // 4
"""Tokens per worker that a tree of prompts remembers, at four bytes each."""


@dataclass(slots=True)
class Target:
    """A worker that computes prompts, and what the router remembers of it."""

    model: ModelWorker
    remembered: BlockCache
    """Prompts that were sent to it."""
    running: int = 0
    """Requests sent to it that it has not finished: their prompts, or their answers if it generates."""
    pending_blocks: int = 0
    """Blocks of prompts that it has not computed."""

    def matched(self, text: Text, tier_weight: float) -> float:
        """Leading blocks in its pool, and with their weight those that only its tier has."""
        pool = self.model.cache.matched(text.blocks)
        return pool + tier_weight * max(0, self.model.tier.matched(text.blocks) - pool)


Policy = Callable[[Sequence[Target], Text, random.Random], Target]


@dataclass(frozen=True, slots=True)
class CacheAware:
    """sglang-router and vllm-router, `cache_aware`: the longest match, unless the counts differ too much."""

    threshold: float
    """Least share of the prompt that must match."""
    difference: int
    """Requests by which the busiest worker may exceed the least busy one."""
    ratio: float = 1.5

    def __call__(self, targets: Sequence[Target], text: Text, rng: random.Random) -> Target:
        least, most = min(one.running for one in targets), max(one.running for one in targets)
        if most - least <= self.difference or most <= self.ratio * least:
            matches = [one.remembered.matched(text.blocks) for one in targets]
            if text.blocks and max(matches) / len(text.blocks) > self.threshold:
                return targets[rng.choice([n for n, match in enumerate(matches) if match == max(matches)])]
        return rng.choice([one for one in targets if one.running == least])


def weighted_scores(targets: Sequence[Target], text: Text, rng: random.Random) -> Target:
    """
    llm-d by default: twice the free queue, twice the free cache, three times the matched share.

    A block of the tier of a worker counts 0.8.
    """
    queues = [one.model.queued for one in targets]
    spread = max(queues) - min(queues)

    def score(one: Target) -> float:
        queue = (max(queues) - one.model.queued) / spread if spread else 1.0
        used = min(1.0, one.pending_blocks / one.model.cache.capacity)
        match = one.matched(text, 0.8) / max(1, len(text.blocks))
        return 2 * queue + 2 * (1 - used) + 3 * match

    best = max(map(score, targets))
    return rng.choice([one for one in targets if score(one) == best])


def block_cost(targets: Sequence[Target], text: Text, rng: random.Random) -> Target:
    """
    Dynamo's default cost: blocks that are booked and not yet computed, and this prompt's uncached ones.

    A block of the tier of a worker counts 0.75.
    """

    def cost(one: Target) -> float:
        return one.pending_blocks + len(text.blocks) - one.matched(text, 0.75)

    least = min(map(cost, targets))
    return rng.choice([one for one in targets if cost(one) == least])


POLICIES: dict[str, Policy] = {
    **{
        f"cache_aware {threshold:g} {difference}": CacheAware(threshold, difference)
        for threshold in (0.1, 0.3, 0.5)
        for difference in (8, 32, 64)
    },
    "weighted scores": weighted_scores,
    "block cost": block_cost,
}

BATON = "baton"


@dataclass(slots=True)
class Cluster:
    """One policy and its workers: `workloads.Asking` for every session."""

    policy: Policy
    targets: Sequence[Target]
    decodes: Sequence[ModelWorker]
    """Empty if the targets do both."""
    speed: float
    requests: list[ReplayedRequest] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    async def ask(self, messages: list[Message], tokens: int) -> str:
        loop = asyncio.get_running_loop()
        raw = prompt_text((m["role"], m["content"]) for m in messages)
        text = text_of(raw, self.targets[0].model.block_tokens)
        self.requests.append(one := ReplayedRequest())
        sent = loop.time()
        target = self.policy(self.targets, text, self.rng)
        target.remembered.use(text.blocks)
        target.running += 1
        target.pending_blocks += len(text.blocks)
        done = await target.model.compute(text)
        target.pending_blocks -= len(text.blocks)
        decode = target.model
        if self.decodes:
            target.running -= 1
            decode = min(self.decodes, key=lambda one: one.streams)
            await asyncio.sleep(decode.timing.move_s)
        one.wait, one.tokens, one.cached = loop.time() - sent, text.tokens, done.cached
        answer = answer_text(text, tokens)
        await decode.generate(text, tokens, lambda count: None)
        decode.use(text_of(raw + answer.encode(), decode.block_tokens).blocks)
        if not self.decodes:
            target.running -= 1
        one.ok = True
        return answer

    async def pause(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.speed)


async def replay(name: str, options: argparse.Namespace, rate: float, tier: int) -> dict[str, float]:
    """One policy at one rate, summarized as in `replay`; `tier` in blocks."""
    loop = asyncio.get_running_loop()
    arrivals = workloads.arrivals(options.workload, options.minutes)
    if name == BATON:
        roles = replay_inside.roles_of(options.prefill, options.decode)
        sizes = options.capacity, options.block_tokens, tier
        return await replay_inside.replay(arrivals, rate, 1.0, roles, *sizes, replay_inside.Faults())

    def worker() -> ModelWorker:
        sizes = options.capacity, options.block_tokens
        return ModelWorker(Timing(), *sizes, lambda changed: None, tier)

    tree = TREE_TOKENS // options.block_tokens
    targets = [Target(worker(), BlockCache(tree)) for _ in range(options.prefill or options.decode)]
    decodes = [worker() for _ in range(options.decode)] if options.prefill else []
    cluster = Cluster(POLICIES[name], targets, decodes, rate)
    await play(arrivals, cluster, rate, loop.time, TIMEOUT_S)
    usage = [{"role": Role.PREFILL, "busy_s": one.model.busy_s} for one in targets]
    models = [one.model for one in targets]
    restored, tokens = sum(one.restored_tokens for one in models), sum(one.prompt_tokens for one in models)
    return summarize(cluster.requests, usage, loop.time(), 1.0) | {
        "restored": round(restored / max(1, tokens), 4)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--workload", required=True, help="as in `replay_inside`")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--rates", type=float, nargs="+", default=[1.0], help="times the workload's own rate")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=[BATON, *POLICIES])
    parser.add_argument("--prefill", type=int, default=8, help="workers; 0: the decode workers do it all")
    parser.add_argument("--decode", type=int, default=4)
    parser.add_argument("--capacity", type=int, default=2000, help="blocks of each worker")
    parser.add_argument("--block-tokens", type=int, default=512)
    parser.add_argument("--tiers", type=int, nargs="+", default=[0], help="as in `replay_inside`")
    options = parser.parse_args()
    for rate, tier, name in itertools.product(options.rates, options.tiers, options.policies):
        summary = virtual_time.run(replay(name, options, rate, tier * options.capacity))
        print(json.dumps({"policy": name, "rate": rate, "tier": tier, **summary}), flush=True)


if __name__ == "__main__":
    main()
