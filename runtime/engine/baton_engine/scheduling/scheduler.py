"""
Decides which sequences take part in the next forward pass, and with how many tokens.

A sequence has pending tokens: its prompt first, then one at a time. Every generating sequence takes part in
every pass. Prompts share the remaining tokens of the pass: running ones first, then the queue in order of
arrival. A sequence is admitted when blocks for all its tokens are available, so a prompt never stops half
way. If a generating sequence needs a block and none is left, the sequence with the least output is retracted
to the front of the queue. It keeps its tokens; its KV is computed again.

Patient sequences, such as batch lines, come after all others. They skip most passes that compute prompts of
others, which makes these passes shorter. A generating patient sequence is retracted for one that is not
patient.

This module uses no tensors, threads or clocks.
"""

from __future__ import annotations

from collections import abc, deque
from dataclasses import dataclass, field

from baton_engine.kv.block_pool import BlockPool
from baton_engine.kv.events import KvEvents
from baton_engine.requests import Fetch
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.scheduling.sequence import Sequence, Stage

YIELDS = 8
"""Maximum consecutive passes that patient sequences skip, since they hold blocks meanwhile."""


@dataclass(slots=True)
class StepPlan:
    """The decision of `Scheduler.plan`. The scheduler has already applied the lists after `prefills`."""

    decodes: list[Sequence] = field(default_factory=list)
    """Each computes the one token it has pending."""
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    """Each computes this many of its pending tokens."""
    admitted: list[Sequence] = field(default_factory=list)
    """Newly in the batch. Their cached prefix counts as computed."""
    fetches: list[Sequence] = field(default_factory=list)
    """Sequences whose `fetch` is to be started."""
    retracted: list[Sequence] = field(default_factory=list)
    outgrown: list[Sequence] = field(default_factory=list)
    """To be ended: they fill all blocks."""
    starved: list[Sequence] = field(default_factory=list)
    """To be ended: they cannot be admitted, and no other sequence holds blocks."""

    @property
    def changed(self) -> bool:
        """Whether planning again could change anything."""
        return bool(self.decodes or self.prefills or self.fetches or self.outgrown or self.starved)


class Scheduler:
    """The queue, the batch, and the blocks of each sequence."""

    def __init__(
        self, pool: BlockPool, limits: EngineLimits, block_size: int, kv_events: KvEvents | None = None
    ) -> None:
        self.pool = pool
        self.kv_events = kv_events
        """Receives each block that becomes known; the pool reports those that are dropped."""
        self.limits = limits
        self.block_size = block_size
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.fetching: dict[str, Sequence] = {}
        self.held: dict[str, Sequence] = {}
        self._refused: tuple[Sequence, int, int, int, int] | None = None
        """The head of the queue and the figures at which it did not fit: no need to look again."""
        self._yielded = 0
        """Passes in a row that patient requests stayed out of."""

    def add(self, sequence: Sequence) -> None:
        place = len(self.waiting) if sequence.request.patient else self._first_patient()
        self.waiting.insert(place, sequence)

    def plan(self) -> StepPlan:
        """Decide the next pass and take the blocks it needs."""
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

    def advance(self, sequence: Sequence, tokens: int) -> None:
        """Count `tokens` more computed tokens: whole blocks become known."""
        request = sequence.request
        request.computed += tokens
        size, events = self.block_size, self.kv_events
        for index in range(sequence.published, request.computed // size):
            name, parent = sequence.block_hash(index), sequence.parent(index)
            if self.pool.publish(request.blocks[index], name, parent) and events is not None:
                events.stored(name, parent, sequence.tokens(index * size, (index + 1) * size))
            sequence.published = index + 1

    def fetched(self, sequence: Sequence, arrived: int, unsafe: frozenset[int]) -> bool:
        """
        A fetch has ended with its first `arrived` blocks whole; `unsafe` ones may still be written.

        True if the whole prompt is there. The caller says where the job goes next.
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
        computed = min((fetch.start_block + good) * self.block_size, len(sequence.request.prompt))
        self.advance(sequence, computed - sequence.request.computed)
        if unsafe:
            blocks = sequence.drop_blocks()
            self.pool.quarantine([block for block in blocks if block in unsafe])
            self.pool.release([block for block in blocks if block not in unsafe])
        return good == len(fetch.blocks)

    def join(self, sequence: Sequence) -> None:
        """Add a sequence whose whole prompt was fetched to the batch."""
        sequence.stage = Stage.RUNNING
        self.running.append(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """To the front of its queue, to be computed here; what the prefix cache still has is not lost."""
        self.pool.release(sequence.drop_blocks())
        sequence.fetchable = False
        sequence.stage = Stage.WAITING
        self.waiting.insert(self._first_patient() if sequence.request.patient else 0, sequence)

    def end(self, sequence: Sequence, *, hold: bool = True) -> None:
        """
        Take a job out. Its known blocks stay cached.

        Blocks of a fetch stay pinned, and the job in `fetching`, until `fetched`. Exported blocks, which
        a peer may be reading, are held until this is called again with `hold` off.
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
            case Stage.ENDED:  # just fetched
                pass
        if exported:
            self.pool.unpin(sequence.request.blocks)
        sequence.stage = Stage.ENDED
        self.pool.release(sequence.drop_blocks())

    def _plan_decodes(self, plan: StepPlan) -> None:
        decodes = [sequence for sequence in self.running if sequence.decoding]
        growing = [sequence for sequence in decodes if sequence.request.computed == sequence.room]
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
        """Retract until every job that grows can; the one that cannot, alone as it is, is returned."""
        while len(growing) > self.pool.available:
            victims = [sequence for sequence in self.running if sequence.retractable]
            if len(victims) == 1:
                (alone,) = victims
                if len(self.running) == 1 and not self.fetching and not self.held:
                    plan.outgrown.append(alone)
                return alone  # with others about to let go of blocks, it waits
            victim = self._retract_one(plan, victims)
            growing = [sequence for sequence in growing if sequence is not victim]
        return None

    def _make_way(self, plan: StepPlan) -> bool:
        """Retract a patient job for one that is not; False if there is none."""
        victims = [sequence for sequence in self.running if sequence.request.patient and sequence.retractable]
        if not victims:
            return False
        victim = self._retract_one(plan, victims)
        plan.decodes = [sequence for sequence in plan.decodes if sequence is not victim]
        return True

    def _retract_one(self, plan: StepPlan, victims: abc.Sequence[Sequence]) -> Sequence:
        """Of `victims`, a patient one if there is one, and the one that loses the least."""
        victim = min(victims, key=_loss)
        self.running.remove(victim)
        self.requeue(victim)
        plan.retracted.append(victim)
        return victim

    def _first_patient(self) -> int:
        """Where in the queue the patient ones begin."""
        if not self.waiting or not self.waiting[-1].request.patient:
            return len(self.waiting)
        return next(place for place, sequence in enumerate(self.waiting) if sequence.request.patient)

    def _prompt_tokens(self, decodes: abc.Sequence[Sequence]) -> int:
        """What a pass with these has for prompts: a block at least, or they might be kept out for good."""
        return max(self.limits.prompt_tokens(len(decodes)), self.block_size)

    def _plan_prompts(self, plan: StepPlan, budget: int, *, patient: bool) -> int:
        """Share the pass's tokens, those under way first; gives what is left of them."""
        return self._admit(plan, self._plan_prefills(plan, budget, patient), patient)

    def _plan_prefills(self, plan: StepPlan, budget: int, patient: bool) -> int:
        for sequence in self.running:
            if budget <= 0:
                break
            if sequence.request.patient == patient and not sequence.decoding:
                tokens = min(sequence.request.pending, budget)
                plan.prefills.append((sequence, tokens))
                budget -= tokens
        return budget

    def _admit(self, plan: StepPlan, budget: int, patient: bool) -> int:
        size = self.block_size
        while self.waiting and self.waiting[0].request.patient == patient:
            sequence = self.waiting[0]
            if budget <= 0 and not sequence.fetchable:
                return budget
            full = len(self.running) + len(self.fetching) >= self.limits.max_running
            if full and (patient or not self._make_way(plan)):
                return budget
            request = sequence.request
            # One block for each that runs, or it would be retracted for a newcomer's sake.
            reserve = len(self.running) + len(self.fetching)
            state = (sequence, self.pool.available, len(self.running), len(self.fetching), len(self.held))
            if state == self._refused:
                return budget
            prefix = self.pool.match(sequence.hashes[: sequence.cacheable // size])
            missing = request.length - len(prefix) * size
            fetch = sequence.fetchable and missing > self.limits.local_prefill_tokens
            if budget <= 0 and not fetch:
                return budget
            needed = sequence.blocks_for(request.length) - len(prefix)
            if needed + self.pool.unused(prefix) + reserve > self.pool.available:
                if not patient and self._make_way(plan):
                    continue
                self._refused = state
                if not reserve and not self.held:
                    plan.starved.append(sequence)
                return budget
            self._refused = None
            self.waiting.popleft()
            self._place(sequence, prefix, needed)
            if fetch:
                self._begin_fetch(sequence)
                plan.fetches.append(sequence)
                continue
            if request.export is not None:
                self.pool.pin(request.blocks)
            sequence.stage = Stage.RUNNING
            self.running.append(sequence)
            plan.admitted.append(sequence)
            tokens = min(request.pending, budget)
            plan.prefills.append((sequence, tokens))
            budget -= tokens
        return budget

    def _place(self, sequence: Sequence, prefix: list[int], needed: int) -> None:
        request = sequence.request
        self.pool.take(prefix)
        sequence.grow([*prefix, *self.pool.allocate(needed)])
        sequence.published = len(prefix)
        request.computed = len(prefix) * self.block_size
        sequence.admissions += 1
        if not sequence.readmitted:
            sequence.local_tokens = request.cached_tokens = request.computed

    def _begin_fetch(self, sequence: Sequence) -> None:
        request = sequence.request
        start = sequence.published
        sequence.fetch = Fetch(
            request_id=request.id,
            tokens=request.prompt,
            start_block=start,
            parent=sequence.parent(start),
            blocks=tuple(request.blocks[start:]),
            sampling=request.sampling,
            salt=request.salt,
            trace=request.trace,
        )
        self.pool.pin(sequence.fetch.blocks)
        sequence.stage = Stage.FETCHING
        self.fetching[request.id] = sequence


def _loss(sequence: Sequence) -> tuple[bool, int, int]:
    """What is lost if it is retracted, for comparison: somebody's patience before work."""
    request = sequence.request
    return not request.patient, len(request.output), -len(request.prompt)
