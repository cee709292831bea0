"""
The learned state of each worker: prefix cache contents, booked work, speed, and cache accuracy.

It is learned from requests: where each was sent, when its first token came, and what the worker reported of
the prompt. A sent prompt counts as cached at once, so that the next prompt with the same prefix follows it;
reports correct this. A restarted worker begins with an empty cache and the typical speed of its kind.

Cache accuracy compares expected with actual cached tokens. It finds silent failures, such as different
tokens, another chat template, a disabled cache or missing events. A worker whose prompts have less than half
of the expected tokens cached is chosen by load alone until its accuracy recovers.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from baton_api.profiles import Profile
from baton_api.prompt_report import PromptReport
from baton_api.workers import EngineKind, Load, Role
from baton_router.cache.block_map import BlockMap
from baton_router.cache.prefix_index import PrefixIndex
from baton_router.cache.prompt_chunks import BYTES_PER_TOKEN, CHUNK_BYTES, PromptChunks
from baton_router.cache.tiers import Tier
from baton_router.workers.bookings import PrefillBookings, StreamBookings
from baton_router.workers.costs import (
    DEFAULT_PRIOR,
    BytesPerToken,
    CostPrior,
    LeastSquares,
    RunningAverage,
    StepCost,
    TransferCost,
    WorkerKind,
)
from baton_router.workers.worker import Worker

ACCURACY_REQUESTS = 200
"""Requests in the average; fewer are not judged."""

INACCURATE_BELOW = 0.5
ACCURATE_FROM = 0.6

MIN_EXPECTED_TOKENS = 64
"""Expected tokens below which rounding to blocks dominates."""


class CacheAccuracy:
    """Actual against expected cached tokens of one worker."""

    __slots__ = ("broken", "ratio", "requests")

    def __init__(self) -> None:
        self.ratio = 1.0
        self.requests = 0
        self.broken = False

    def learn(self, expected: float, actual: float) -> bool:
        """Add a measurement; returns whether `broken` changed."""
        if expected < MIN_EXPECTED_TOKENS:
            return False
        self.requests += 1
        self.ratio += (min(1.0, actual / expected) - self.ratio) / min(self.requests, ACCURACY_REQUESTS)
        before = self.broken
        if self.requests >= ACCURACY_REQUESTS:
            self.broken = self.ratio < (ACCURATE_FROM if before else INACCURATE_BELOW)
        return self.broken is not before


CAPACITY_FACTOR = 1.5
"""Assumed capacity against the reported one: forgetting too soon costs more than assuming too much."""

DEGRADED_WEIGHT = 0.5
"""Weight of a match with a worker whose KV events are missing."""

NO_SLOT = -1
"""Slot of a removed worker: it holds nothing."""

AUTHORS_LIMIT = 65_536
"""Prompts whose generating workers are remembered."""


class WorkerState:
    """The state of one process of a worker."""

    __slots__ = (
        "_load",
        "accuracy",
        "block_size",
        "degraded",
        "epoch",
        "free_blocks",
        "named_blocks",
        "peers",
        "prefill_cost",
        "prefills",
        "restore",
        "slot",
        "step_cost",
        "streams",
        "total_blocks",
    )

    def __init__(self, slot: int, epoch: str, kind: WorkerKind) -> None:
        self.slot = slot
        """Its slot in the prefix index."""
        self.epoch = epoch
        self.prefill_cost = kind.new_worker()
        self.restore = kind.restore
        self.step_cost = StepCost(LeastSquares(kind.prior.step))
        self.prefills = PrefillBookings()
        self.streams = StreamBookings()
        self.accuracy = CacheAccuracy()
        self.degraded = False
        """Whether its KV events are missing."""
        self.block_size = 0
        self.total_blocks = 0
        """0 if unknown."""
        self.free_blocks = 0
        self.named_blocks = 0
        """Tokens of a block whose name follows from its tokens (`cache.token_blocks`); 0 for other engines,
        or without KV events."""
        self.peers = False
        """As in `Load`."""
        self._load: Load | None = None

    @property
    def cache_weight(self) -> float:
        """Share of its assumed cache to count on."""
        if self.accuracy.broken:
            return 0.0
        return DEGRADED_WEIGHT if self.degraded else 1.0

    def reported(self, load: Load) -> None:
        """Update from the worker's load; an unchanged load is ignored."""
        if load is self._load:
            return
        self._load = load
        self.block_size, self.peers = load.block_size, load.peers
        self.total_blocks, self.free_blocks = load.total_blocks, load.free_blocks
        foreign = load.engine is not EngineKind.BATON and bool(load.kv_events)
        self.named_blocks = load.block_size if foreign else 0
        if load.running and load.step_s:
            tokens = (load.total_blocks - load.free_blocks) * load.block_size
            self.step_cost.learn(load.running, tokens, load.step_s)


class WorkerStates:
    """The states of all workers. Belongs to one thread."""

    def __init__(self, profiles: Iterable[Profile] = ()) -> None:
        """`profiles`: measured in advance, by model."""
        self._priors = {profile.model: CostPrior.of(profile) for profile in profiles}
        self._states: dict[Worker, WorkerState] = {}
        self._free: list[int] = []
        """Slots of removed workers, the lowest first: a set of workers has one bit for each."""
        self._index = PrefixIndex()
        self.blocks = BlockMap(self._index)
        self._kinds: dict[tuple[Role, str], WorkerKind] = {}
        """By role and model."""
        self._transfers: dict[tuple[str, str], TransferCost] = {}
        self._bytes_per_token: dict[str, BytesPerToken] = {}
        self._answered: OrderedDict[int, int] = OrderedDict()
        """Last chunk of a prompt, with the workers that generated its answer, as bits."""

    def __len__(self) -> int:
        """Distinct cached chunks."""
        return len(self._index)

    @property
    def bytes(self) -> int:
        """Memory of the prefix index, estimated."""
        return self._index.bytes + sum(index.bytes for index in self.blocks.tiers.values())

    @property
    def tier_chunks(self) -> dict[Tier, int]:
        """Distinct chunks in each tier in use."""
        return {tier: len(index) for tier, index in self.blocks.tiers.items()}

    def of(self, worker: Worker) -> WorkerState:
        """The state of the worker's current process."""
        load = worker.health.load
        epoch = load.epoch if load else ""
        state = self._states.get(worker)
        if state is None or (state.epoch != epoch and epoch):
            if worker.removed:
                return WorkerState(NO_SLOT, epoch, WorkerKind())
            state = self._register(worker, epoch, state, load)
        if load is not None:
            state.reported(load)
        return state

    def transfer(self, source: str, target: str) -> TransferCost:
        """Between two workers, by name."""
        cost = self._transfers.get((source, target))
        if cost is None:
            prior = next(iter(self._priors.values()), DEFAULT_PRIOR)
            cost = self._transfers[source, target] = TransferCost(
                RunningAverage(prior.transfer_token_s), prior.transfer_start_s
            )
        return cost

    def bytes_per_token(self, model: str) -> BytesPerToken:
        average = self._bytes_per_token.get(model)
        if average is None:
            average = self._bytes_per_token[model] = BytesPerToken()
        return average

    def tokens(self, prompt: PromptChunks, model: str) -> int:
        """Tokens of the prompt, estimated from its bytes; at least 1."""
        return max(1, round(prompt.bytes / self.bytes_per_token(model).value))

    def match(self, prompt: PromptChunks) -> dict[int, int]:
        """Leading chunks of the prompt sent to each slot's worker; others were sent none."""
        return self._index.match(prompt.names)

    def held(self, prompt: PromptChunks, matched: dict[int, int]) -> dict[int, int]:
        """Return the bytes of the prompt that each slot's worker is assumed to hold; 0 for missing slots."""
        chunks = matched
        for begin, end in prompt.answers:
            # The worker that generated an answer holds it, although it never was part of a prompt.
            authors = self._answered.get(prompt.names[begin - 1], 0) if begin else 0
            if authors:
                chunks = {
                    slot: end if count == begin and authors >> slot & 1 else count
                    for slot, count in chunks.items()
                }
        sizes = prompt.sizes
        return {slot: sizes[count - 1] for slot, count in chunks.items()}

    def reach(self, prompt: PromptChunks) -> dict[int, list[tuple[Tier, int]]]:
        """
        Return the bytes of the prompt that each slot's worker holds or can restore, by its tiers.

        See `BlockMap.reach`. Workers without tiers are left out.
        """
        sizes = prompt.sizes
        return {
            slot: [(tier, sizes[count - 1]) for tier, count in reached]
            for slot, reached in self.blocks.reach(prompt.names).items()
        }

    def sent(self, prompt: PromptChunks, state: WorkerState, matched: int) -> list[int]:
        """
        Assume that the worker holds the whole prompt. Returns the chunks that are new to it.

        `matched` is its result of `match`.
        """
        if state.slot == NO_SLOT:
            return []
        return self._index.insert(state.slot, prompt.names, matched)

    def lost(self, chunks: Iterable[int], state: WorkerState) -> None:
        """The worker does not hold these chunks after all."""
        self._index.remove(state.slot, chunks)

    def computed(
        self, prompt: PromptChunks, report: PromptReport, assumed: Sequence[tuple[WorkerState, list[int]]]
    ) -> None:
        """A sent prompt was computed; `assumed` are the chunks that were new to its workers."""
        new = max((len(chunks) for _, chunks in assumed), default=0)
        if not new or not report.tail:
            return
        size = assumed[0][0].block_size
        blocks = report.tokens // size if size else 0
        slots = [state.slot for state, _ in assumed]
        self.blocks.place(prompt, int(report.tail, 16), blocks, len(prompt.names) - new, slots)

    def answered(self, prompt: PromptChunks, state: WorkerState) -> None:
        """The worker generated the whole answer and holds it too."""
        slot = state.slot
        if not prompt.names or slot == NO_SLOT:
            return
        last = prompt.names[-1]
        self._answered[last] = self._answered.pop(last, 0) | 1 << slot
        if len(self._answered) > AUTHORS_LIMIT:
            self._answered.popitem(last=False)

    def forget(self, worker: Worker) -> None:
        """Remove a worker; another one may get its slot."""
        state = self._states.pop(worker, None)
        if state is None:
            return
        self._empty(state.slot)
        heapq.heappush(self._free, state.slot)
        state.slot = NO_SLOT
        for pair in [pair for pair in self._transfers if worker.name in pair]:
            del self._transfers[pair]

    def _register(
        self, worker: Worker, epoch: str, before: WorkerState | None, load: Load | None
    ) -> WorkerState:
        if before is not None:
            slot, before.slot = before.slot, NO_SLOT
            self._empty(slot)
        else:
            slot = heapq.heappop(self._free) if self._free else len(self._states)
        key = (worker.listed, worker.model)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = WorkerKind(self._priors.get(worker.model, DEFAULT_PRIOR))
        state = self._states[worker] = WorkerState(slot, epoch, kind)
        tokens = load.total_blocks * load.block_size if load else 0
        self._index.register(slot, max(64, int(CAPACITY_FACTOR * tokens * BYTES_PER_TOKEN / CHUNK_BYTES)))
        return state

    def _empty(self, slot: int) -> None:
        """Clear a slot for another process."""
        self.blocks.close(slot)
        self._index.forget(slot)
        mask = ~(1 << slot)
        self._answered = OrderedDict(
            (last, left) for last, authors in self._answered.items() if (left := authors & mask)
        )
