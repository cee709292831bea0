"""
The scheduler: selects the sequences of the next forward pass, and their numbers of tokens.

A sequence has pending tokens: its prompt first, then one at a time. Every generating sequence takes part in
every pass. Prompts share the remaining tokens of the pass: running ones first, then the queue, in which
tenants take turns (`waiting`). If the batch is full, a tenant's sequence is retracted for one of a tenant
that has fewer, until both have as many. A sequence is admitted when blocks for all its tokens are available,
so a prompt never stops half way. If a generating sequence needs a block and none is left, the sequence with
the least output is retracted and becomes the first one of the queue. It keeps its tokens; its KV is computed
again.

Patient sequences, such as batch lines, come after all others. They skip most passes that compute prompts of
others, which makes these passes shorter. A generating patient sequence is retracted for one that is not
patient.

This module uses no tensors, threads or clocks.
"""

from __future__ import annotations

import math
from collections import Counter, abc
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from baton_api.workers import PEER
from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.events import KvEvents
from baton_engine.requests import CachedPrefix, Fetch, RemotePrefill
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.sequence import Sequence, Stage
from baton_engine.scheduling.waiting import WaitingQueue
from baton_engine.tiers.policy import PromptSpeed

YIELDS = 8
"""Maximum number of consecutive passes that patient sequences skip, because they occupy blocks."""


class PrefixTier(Protocol):
    """A tier of this worker that may have blocks of prompts."""

    @property
    def name(self) -> str: ...

    def prefix(self, names: abc.Sequence[bytes], start: int) -> CachedPrefix | None:
        """Return what it has of a chain from block `start` on. None: nothing."""
        ...


class FetchPlan(NamedTuple):
    """A fetch that is sooner than computing."""

    source: RemotePrefill
    name: str
    """`CachedPrefix.name`; empty: a prefill worker."""
    end: int
    """The block before which it ends."""
    within_s: float


@dataclass(slots=True)
class StepPlan:
    """The decision of `Scheduler.plan`. The scheduler has already applied the lists after `prefills`."""

    decodes: list[Sequence] = field(default_factory=list)
    """Sequences that compute their single pending token."""
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences with prompt tokens, and their numbers of tokens in this pass."""
    admitted: list[Sequence] = field(default_factory=list)
    """Sequences that were added to the batch. Their cached prefix counts as computed."""
    fetches: list[Sequence] = field(default_factory=list)
    """Sequences whose `fetch` must be started."""
    retracted: list[Sequence] = field(default_factory=list)
    outgrown: list[Sequence] = field(default_factory=list)
    """Sequences to end, because they occupy all blocks."""
    starved: list[Sequence] = field(default_factory=list)
    """Sequences to end, because they cannot be admitted although no other sequence has blocks."""

    @property
    def changed(self) -> bool:
        """Whether planning again could change anything."""
        return bool(self.decodes or self.prefills or self.fetches or self.outgrown or self.starved)


class Scheduler:
    """The queue, the batch, and the blocks of each sequence."""

    def __init__(
        self,
        pool: BlockPool,
        limits: EngineLimits,
        block_size: int,
        kv_events: KvEvents | None = None,
        tiers: abc.Sequence[PrefixTier] = (),
    ) -> None:
        """`tiers` in the order of their speed."""
        self.pool = pool
        self.kv_events = kv_events
        """Receives published blocks; the pool reports evicted ones."""
        self.tiers = tiers
        self.limits = limits
        self.block_size = block_size
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        self.fetching: dict[str, Sequence] = {}
        self.held: dict[str, Sequence] = {}
        self.lent: dict[str, list[int]] = {}
        """Blocks that other workers read of this worker's prefix cache, by the name of the read."""
        self.prompt_speed = PromptSpeed()
        self._refused: tuple[Sequence, int, int, int, int] | None = None
        """The next queued sequence and the state in which it did not fit, to avoid repeated checks."""
        self._yielded = 0
        """Number of consecutive passes that patient sequences skipped."""

    def add(self, sequence: Sequence) -> None:
        self.waiting.add(sequence)

    def plan(self) -> StepPlan:
        """Plan the next pass and allocate its blocks."""
        plan = StepPlan()
        self._plan_decodes(plan)
        shared = self._yielded == YIELDS
        budget = self._prompt_tokens(
            [sequence for sequence in plan.decodes if shared or not sequence.request.patient]
        )
        budget = self._plan_prompts(plan, budget, patient=False)
        if plan.prefills and not shared:
            self._yielded += 1
            plan.decodes = [sequence for sequence in plan.decodes if not sequence.request.patient]
            return plan
        self._yielded = 0
        self._plan_prompts(plan, budget if shared else self._prompt_tokens(plan.decodes), patient=True)
        return plan

    def retract(self, count: int) -> list[Sequence]:
        """Retract up to `count` running sequences, those with the least loss. Returns them."""
        plan = StepPlan()
        while len(plan.retracted) < count:
            victims = [sequence for sequence in self.running if sequence.retractable]
            if not victims:
                break
            self._retract_one(plan, victims)
        return plan.retracted

    def look_ahead(self, sequences: abc.Sequence[Sequence]) -> bool:
        """
        Add blocks for the token after the next one of generating sequences, without a plan.

        Returns False, and adds none, if blocks are missing, or a plan might admit another sequence.
        """
        growing = [sequence for sequence in sequences if sequence.length == sequence.capacity]
        if len(growing) > self.pool.available or (self.waiting and not self._still_refused()):
            return False
        for sequence in growing:
            sequence.grow(self.pool.allocate(1))
        return True

    def _still_refused(self) -> bool:
        """Return whether the next queued sequence cannot be admitted, as at the last plan."""
        batch = self._batch()
        head = self.waiting.head(batch, patient=False) or self.waiting.head(batch, patient=True)
        assert head is not None
        full = len(self.running) + len(self.fetching) >= self.limits.max_running
        if full and not self._victims(head, batch):
            return True
        if self._refused is None:
            return False
        refused, available, running, fetching, held_count = self._refused
        return (
            head is refused
            and self.pool.available <= available
            and (len(self.running), len(self.fetching), len(self.held)) == (running, fetching, held_count)
        )

    def reserve(self, sequence: Sequence, tokens: int) -> int:
        """
        Return how many of `tokens` draft tokens fit into the blocks of a generating sequence.

        Adds available blocks, but retracts no other sequence for them. Call `trim` after the pass.
        """
        missing = sequence.blocks_for(sequence.length + tokens) - len(sequence.blocks)
        if missing > 0:
            sequence.grow(self.pool.allocate(min(missing, self.pool.available)))
        return min(tokens, sequence.capacity - sequence.length)

    def trim(self, sequence: Sequence, tokens: int) -> None:
        """Release the blocks after the first `tokens` tokens, which were reserved for draft tokens."""
        if sequence.stage is Stage.RUNNING and (blocks := sequence.trim(tokens)):
            self.pool.release(blocks)

    def advance(self, sequence: Sequence, tokens: int) -> None:
        """Count `tokens` computed tokens, and publish complete blocks."""
        sequence.computed += tokens
        size, events = self.block_size, self.kv_events
        if sequence.computed < (sequence.published + 1) * size:
            return
        request = sequence.request
        adapter = "" if request.adapter is None else request.adapter.name
        for index in range(sequence.published, sequence.computed // size):
            name, parent = sequence.block_hash(index), sequence.parent(index)
            if self.pool.publish(sequence.blocks[index], name, parent, index) and events is not None:
                events.stored(name, parent, sequence.tokens(index * size, (index + 1) * size), adapter)
            sequence.published = index + 1

    def fetched(self, sequence: Sequence, arrived: int, unsafe: frozenset[int]) -> bool:
        """
        End a fetch whose first `arrived` blocks are complete. A peer may still write `unsafe` blocks.

        Returns whether all of them have arrived. Next is `fetch_more`, `join`, `requeue` or `end`.
        """
        fetch = sequence.fetch
        assert fetch is not None and sequence.stage is Stage.FETCHING
        del self.fetching[sequence.request.id]
        sequence.stage = Stage.ENDED
        sequence.fetch = None
        self.pool.unpin(fetch.blocks)
        good = 0
        while good < arrived and fetch.blocks[good] not in unsafe:
            good += 1
        computed = min((fetch.start_block + good) * self.block_size, sequence.length)
        self.advance(sequence, computed - sequence.computed)
        if unsafe:
            blocks = sequence.drop_blocks()
            self.pool.quarantine([block for block in blocks if block in unsafe])
            self.pool.release([block for block in blocks if block not in unsafe])
        return good == len(fetch.blocks)

    def fetch_more(self, sequence: Sequence) -> bool:
        """Begin a fetch of what a tier or another worker has after the blocks that were fetched."""
        planned = self._fetch_of(sequence, sequence.published, sequence.pending)
        if planned is not None:
            self._begin_fetch(sequence, planned)
        return planned is not None

    def join(self, sequence: Sequence) -> None:
        """Add a sequence to the batch whose blocks were fetched. It keeps them."""
        if sequence.request.export is not None:
            self.pool.pin(sequence.blocks)
        sequence.stage = Stage.RUNNING
        self.running.append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Put a sequence first in its queue, for local prefill. Its published blocks stay cached."""
        self.pool.release(sequence.drop_blocks())
        sequence.fetchable = False
        sequence.tried.add(PEER)
        sequence.stage = Stage.WAITING
        self.waiting.put_back(sequence)

    def end(self, sequence: Sequence, *, hold: bool = True) -> None:
        """
        Remove a sequence. Its published blocks stay cached.

        A fetching sequence stays in `fetching` with pinned blocks until `fetched`. Exported blocks, which a
        peer may read, stay pinned until a second call without `hold`.
        """
        exported = sequence.request.export is not None
        match sequence.stage:
            case Stage.WAITING:
                self.waiting.remove(sequence)
            case Stage.FETCHING:
                sequence.cancelled = True
                return
            case Stage.RUNNING:
                self.running.remove(sequence)
                if exported and hold:
                    sequence.stage = Stage.HELD
                    self.held[sequence.request.id] = sequence
                    return
            case Stage.HELD:
                del self.held[sequence.request.id]
            case Stage.ENDED:  # after `fetched`
                exported = False  # nothing was announced
        if exported:
            self.pool.unpin(sequence.blocks)
        sequence.stage = Stage.ENDED
        self.pool.release(sequence.drop_blocks())

    def lend(self, name: str, hashes: abc.Sequence[bytes]) -> list[int]:
        """Keep the leading ones of these blocks that are cached for a reader, until `take_back(name)`."""
        assert name not in self.lent, f"{name} has blocks already"
        blocks = self.pool.match(hashes)
        self.pool.take(blocks)
        self.pool.pin(blocks)
        if blocks:  # requests that do not fit wait for what is lent
            self.lent[name] = blocks
        return blocks

    def take_back(self, name: str) -> None:
        """End a read of another worker. It may have ended already."""
        blocks = self.lent.pop(name, [])
        self.pool.unpin(blocks)
        self.pool.release(blocks)

    def _plan_decodes(self, plan: StepPlan) -> None:
        decodes = [sequence for sequence in self.running if sequence.decoding]
        growing = [sequence for sequence in decodes if sequence.computed == sequence.capacity]
        if growing:
            if len(growing) > self.pool.available:
                stuck = self._free_blocks(plan, growing)
                decodes = [
                    sequence
                    for sequence in decodes
                    if sequence.stage is Stage.RUNNING and sequence is not stuck
                ]
                growing = [
                    sequence
                    for sequence in growing
                    if sequence.stage is Stage.RUNNING and sequence is not stuck
                ]
            for sequence in growing:
                sequence.grow(self.pool.allocate(1))
        plan.decodes = decodes

    def _free_blocks(self, plan: StepPlan, growing: list[Sequence]) -> Sequence | None:
        """Retract sequences until all growing ones get a block. Returns a last one without a block."""
        while len(growing) > self.pool.available:
            victims = [sequence for sequence in self.running if sequence.retractable]
            if len(victims) == 1:
                (last,) = victims
                if len(self.running) == 1 and not self.fetching and not self.held and not self.lent:
                    plan.outgrown.append(last)
                return last  # waits if other sequences will release blocks
            victim = self._retract_one(plan, victims)
            growing = [sequence for sequence in growing if sequence is not victim]
        return None

    def _make_way(self, plan: StepPlan, head: Sequence, batch: Counter[str]) -> bool:
        """Retract a sequence in favor of `head`. Returns False if none has to make way for it."""
        victims = self._victims(head, batch)
        if not victims:
            return False
        victim = self._retract_one(plan, victims)
        plan.decodes = [sequence for sequence in plan.decodes if sequence is not victim]
        batch[victim.request.tenant] -= 1
        return True

    def _victims(self, head: Sequence, batch: abc.Mapping[str, int]) -> list[Sequence]:
        """
        Sequences that may be retracted for `head`: patient ones if it is not, otherwise those of the tenant
        with the most, if it has more than the tenant of `head` will have.
        """
        if head.request.patient:
            return []
        running = [sequence for sequence in self.running if sequence.retractable]
        if patient := [sequence for sequence in running if sequence.request.patient]:
            return patient
        most = max(batch, key=batch.__getitem__, default=None)
        if most is None or batch[most] <= batch.get(head.request.tenant, 0) + 1:
            return []
        return [sequence for sequence in running if sequence.request.tenant == most and sequence.decoding]

    def _batch(self) -> Counter[str]:
        """Return the number of each tenant's sequences in the batch."""
        return Counter(
            sequence.request.tenant for group in (self.running, self.fetching.values()) for sequence in group
        )

    def _retract_one(self, plan: StepPlan, victims: abc.Sequence[Sequence]) -> Sequence:
        """Retract the sequence of `victims` with the least loss, preferably a patient one."""
        victim = min(victims, key=_loss)
        self.running.remove(victim)
        self.requeue(victim)
        victim.tried = {PEER}  # its blocks may come back from a tier
        plan.retracted.append(victim)
        return victim

    def _prompt_tokens(self, decodes: abc.Sequence[Sequence]) -> int:
        """Return the tokens of a pass for prompts: at least a block, so that prompts do not starve."""
        return max(self.limits.prompt_tokens(len(decodes)), self.block_size)

    def _plan_prompts(self, plan: StepPlan, budget: int, *, patient: bool) -> int:
        """Plan prompt tokens, running sequences first. Returns the remaining budget."""
        return self._admit(plan, self._plan_prefills(plan, budget, patient), patient)

    def _plan_prefills(self, plan: StepPlan, budget: int, patient: bool) -> int:
        if len(plan.decodes) == len(self.running):
            return budget  # all of them generate
        for sequence in self.running:
            if budget <= 0:
                break
            if sequence.request.patient == patient and not sequence.decoding:
                tokens = self._chunk(sequence, budget)
                plan.prefills.append((sequence, tokens))
                budget -= tokens
        return budget

    def _chunk(self, sequence: Sequence, budget: int) -> int:
        """Return how many tokens of a prompt are computed in this pass, which has space for `budget`."""
        tokens = min(sequence.pending, budget)
        # Beside others, each piece would be followed by a pass with their tokens.
        alone = len(self.running) == 1 and not self.waiting
        if sequence.request.export is None or tokens < sequence.pending or not alone:
            return tokens
        return next_piece(sequence.computed, tokens, self.limits.last_chunk_tokens, self.block_size)

    def _admit(self, plan: StepPlan, budget: int, patient: bool) -> int:
        size = self.block_size
        if not self.waiting:
            return budget
        batch = self._batch()
        while (sequence := self.waiting.head(batch, patient=patient)) is not None:
            if budget <= 0 and not sequence.fetchable and not self._reads(sequence):
                return budget
            full = len(self.running) + len(self.fetching) >= self.limits.max_running
            # A pass without tokens left retracts nothing for a prompt that a tier or peer may not have.
            waits = budget <= 0 and not sequence.fetchable
            if full and (waits or not self._make_way(plan, sequence, batch)):
                return budget
            request = sequence.request
            # Reserve a block per running sequence, so that admission does not cause retractions.
            reserve = len(self.running) + len(self.fetching)
            state = (sequence, self.pool.available, len(self.running), len(self.fetching), len(self.held))
            if state == self._refused:
                return budget
            prefix = self.pool.match(sequence.hashes[: sequence.cacheable // size])
            missing = sequence.length - len(prefix) * size
            fetch = self._fetch_of(sequence, len(prefix), missing)
            if (budget <= 0 and fetch is None) or (self.limits.whole_prompts and missing > budget):
                return budget
            needed = sequence.blocks_for(sequence.length) - len(prefix)
            if needed + self.pool.unused(prefix) + reserve > self.pool.available:
                if self._make_way(plan, sequence, batch):
                    continue
                self._refused = state
                if not reserve and not self.held and not self.lent:
                    plan.starved.append(sequence)
                return budget
            self._refused = None
            self.waiting.take(sequence)
            batch[request.tenant] += 1
            self._place(sequence, prefix, needed)
            if fetch is not None:
                self._begin_fetch(sequence, fetch)
                plan.fetches.append(sequence)
                continue
            if request.export is not None:
                self.pool.pin(sequence.blocks)
            sequence.stage = Stage.RUNNING
            self.running.append(sequence)
            plan.admitted.append(sequence)
            tokens = self._chunk(sequence, budget)
            plan.prefills.append((sequence, tokens))
            budget -= tokens
        return budget

    def _place(self, sequence: Sequence, prefix: list[int], needed: int) -> None:
        self.pool.take(prefix)
        sequence.grow([*prefix, *self.pool.allocate(needed)])
        sequence.published = len(prefix)
        sequence.computed = len(prefix) * self.block_size
        sequence.admissions += 1
        if not sequence.readmitted:
            sequence.local_tokens = sequence.cached_tokens = sequence.computed

    def _reads(self, sequence: Sequence) -> bool:
        """Whether a tier or another worker may have blocks of the sequence."""
        if sequence.prompt_output is not None:
            return False
        if sequence.request.cached_prefix is not None and PEER not in sequence.tried:
            return True
        return any(tier.name not in sequence.tried for tier in self.tiers)

    def _fetch_of(self, sequence: Sequence, prefix: int, missing: int) -> FetchPlan | None:
        """
        Return the fetch to begin; None: this worker computes.

        `prefix` is the number of cached blocks, `missing` that of the tokens after them. Tiers come first:
        another worker then computes, or moves, less.
        """
        request = sequence.request
        if sequence.prompt_output is None:
            for tier in self.tiers:
                if tier.name not in sequence.tried:
                    restored = self._read_of(sequence, tier.prefix(sequence.hashes, prefix), prefix)
                    if restored is not None:
                        return restored
        if sequence.fetchable and missing > self.limits.local_prefill_tokens:
            assert request.remote is not None
            return FetchPlan(request.remote, "", sequence.blocks_for(sequence.length), math.inf)
        if sequence.prompt_output is not None or PEER in sequence.tried:
            return None
        return self._read_of(sequence, request.cached_prefix, prefix)

    def _read_of(self, sequence: Sequence, cached: CachedPrefix | None, prefix: int) -> FetchPlan | None:
        """Return the read of `cached` from block `prefix` on, if it is sooner than computing."""
        if cached is None:
            return None
        end = min(cached.blocks, sequence.cacheable // self.block_size)
        if end <= prefix:
            return None
        compute_s = self.prompt_speed.seconds((end - prefix) * self.block_size)
        within_s = cached.read_within_s(end - prefix, compute_s)
        return FetchPlan(cached, cached.name, end, within_s) if within_s else None

    def _begin_fetch(self, sequence: Sequence, planned: FetchPlan) -> None:
        request = sequence.request
        sequence.source = planned.source
        if planned.name:
            sequence.tried.add(planned.name)
        start = sequence.published
        sequence.fetch = Fetch(
            request_id=request.id,
            tokens=request.prompt,
            start_block=start,
            parent=sequence.parent(start),
            blocks=tuple(sequence.blocks[start : planned.end]),
            sampling=request.sampling,
            salt=request.salt,
            trace=request.trace,
            tenant=request.tenant,
            adapter=request.adapter,
            within_s=planned.within_s,
        )
        self.pool.pin(sequence.fetch.blocks)
        sequence.stage = Stage.FETCHING
        self.fetching[request.id] = sequence


def next_piece(start: int, tokens: int, least: int, block_size: int) -> int:
    """
    Return how many of the last `tokens` tokens of a prompt, from position `start` on, are computed next.

    They are half of them, up to the end of a block. If that is less than `least`, or `least` is 0, they are
    all. A reader gets the blocks of a piece while the next one is computed, so few are left at the end.
    """
    half = (start + tokens // 2) // block_size * block_size - start
    return half if least and half >= least else tokens


def _loss(sequence: Sequence) -> tuple[bool, int, int]:
    """Return a sort key of the loss by a retraction: patient sequences first, then the least output."""
    request = sequence.request
    return not request.patient, len(sequence.output), -len(request.prompt)
