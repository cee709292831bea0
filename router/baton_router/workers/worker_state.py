"""
What the router has learned of each worker: prefix cache contents, booked work, speed, and cache accuracy.

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
from baton_api.reports import PromptReport
from baton_api.workers import Load, Role
from baton_router.cache.block_map import BlockMap
from baton_router.cache.prefix_index import PrefixIndex
from baton_router.cache.prompt_chunks import CHUNK_BYTES, PromptChunks
from baton_router.workers.bookings import PrefillBookings, StreamBookings
from baton_router.workers.costs import (
    DEFAULT_PRIOR,
    CostPrior,
    LeastSquares,
    PrefillCost,
    RunningAverage,
    StepCost,
    TransferCost,
    WorkerKind,
)
from baton_router.workers.worker import Worker

ACCURACY_REQUESTS = 200
"""About as many are averaged over; fewer judge nobody."""

INACCURATE_BELOW = 0.5
ACCURATE_FROM = 0.6

MIN_EXPECTED_TOKENS = 64
"""Expected ones: of fewer, whole blocks and the tokens' size in bytes are too large a part."""


class CacheAccuracy:
    """One worker's tokens, actually cached against expected to be."""

    __slots__ = ("broken", "ratio", "requests")

    def __init__(self) -> None:
        self.ratio = 1.0
        self.requests = 0
        self.broken = False

    def learn(self, expected: float, actual: float) -> bool:
        """Whether that changed what is to be thought of the worker."""
        if expected < MIN_EXPECTED_TOKENS:
            return False
        self.requests += 1
        self.ratio += (min(1.0, actual / expected) - self.ratio) / min(self.requests, ACCURACY_REQUESTS)
        before = self.broken
        if self.requests >= ACCURACY_REQUESTS:
            self.broken = self.ratio < (ACCURATE_FROM if before else INACCURATE_BELOW)
        return self.broken is not before


BYTES_PER_TOKEN = 4.0
"""Before the first report."""

CAPACITY_FACTOR = 1.5
"""What is believed to be held against what the worker said it can hold: to forget too soon costs more than
to hope in vain."""

DEGRADED_WEIGHT = 0.5
"""What counts of a match with a worker whose events do not come."""

NO_SLOT = -1
"""The slot of a worker that is gone: it holds nothing, whatever is still said of it."""

AUTHORS_LIMIT = 65_536
"""Prompts of which it is remembered who generated the answer."""


class WorkerState:
    """One process of a worker."""

    __slots__ = (
        "_load",
        "accuracy",
        "block_size",
        "degraded",
        "epoch",
        "free_blocks",
        "prefill_cost",
        "prefills",
        "slot",
        "step_cost",
        "streams",
        "total_blocks",
    )

    def __init__(
        self, slot: int, epoch: str, prefill_cost: PrefillCost, prior: CostPrior = DEFAULT_PRIOR
    ) -> None:
        self.slot = slot
        """In the prefix index."""
        self.epoch = epoch
        self.prefill_cost = prefill_cost
        self.step_cost = StepCost(LeastSquares(prior.step))
        self.prefills = PrefillBookings()
        self.streams = StreamBookings()
        self.accuracy = CacheAccuracy()
        self.degraded = False
        """Whether it should tell what it holds, and nothing comes."""
        self.block_size = 0
        self.total_blocks = 0
        """0 if it does not say."""
        self.free_blocks = 0
        self._load: Load | None = None

    @property
    def cache_weight(self) -> float:
        """How much of what it is believed to hold one may count on."""
        if self.accuracy.broken:
            return 0.0
        return DEGRADED_WEIGHT if self.degraded else 1.0

    def reported(self, load: Load) -> None:
        """What the worker says of itself, maybe what it said before."""
        if load is self._load:
            return
        self._load = load
        self.block_size = load.block_size
        self.total_blocks, self.free_blocks = load.total_blocks, load.free_blocks
        if load.running and load.step_s:
            tokens = (load.total_blocks - load.free_blocks) * load.block_size
            self.step_cost.learn(load.running, tokens, load.step_s)


class WorkerStates:
    """Belongs to one thread."""

    def __init__(self, profiles: Iterable[Profile] = ()) -> None:
        """`profiles`: of the models of which anything is known beforehand."""
        self._priors = {profile.model: CostPrior.of(profile) for profile in profiles}
        self._states: dict[Worker, WorkerState] = {}
        self._free: list[int] = []
        """Slots of workers that were forgotten, the lowest first: a set of workers has a bit for each."""
        self._index = PrefixIndex()
        self.blocks = BlockMap(self._index)
        self._kinds: dict[tuple[Role, str], WorkerKind] = {}
        """By what workers are listed for, and their model."""
        self._transfers: dict[tuple[str, str], TransferCost] = {}
        self._bytes_per_token: dict[str, RunningAverage] = {}
        self._answered: OrderedDict[int, int] = OrderedDict()
        """Last chunk of a prompt -> the workers, as bits, that generated what follows it."""

    def __len__(self) -> int:
        """Different chunks of prompts that anybody is believed to hold."""
        return len(self._index)

    @property
    def bytes(self) -> int:
        """Of memory, about, that this takes."""
        return self._index.bytes

    def of(self, worker: Worker) -> WorkerState:
        """What is known of the process that the worker now is."""
        load = worker.health.load
        epoch = load.epoch if load else ""
        state = self._states.get(worker)
        if state is None or (state.epoch != epoch and epoch):
            if worker.gone:
                return WorkerState(NO_SLOT, epoch, WorkerKind().newcomer())
            state = self._register(worker, epoch, state, load)
        if load is not None:
            state.reported(load)
        return state

    def transfer(self, source: str, target: str) -> TransferCost:
        """Between two workers of these names."""
        cost = self._transfers.get((source, target))
        if cost is None:
            prior = next(iter(self._priors.values()), DEFAULT_PRIOR)
            cost = self._transfers[source, target] = TransferCost(
                RunningAverage(prior.transfer_token_s), prior.transfer_start_s
            )
        return cost

    def bytes_per_token(self, model: str) -> RunningAverage:
        average = self._bytes_per_token.get(model)
        if average is None:
            average = self._bytes_per_token[model] = RunningAverage(BYTES_PER_TOKEN)
        return average

    def tokens(self, prompt: PromptChunks, model: str) -> int:
        """How many tokens the prompt has, as far as one can tell from its bytes; at least 1."""
        return max(1, round(prompt.bytes / self.bytes_per_token(model).value))

    def match(self, prompt: PromptChunks) -> dict[int, int]:
        """How many leading chunks of the prompt each slot's worker was sent; all others were sent none."""
        return self._index.match(prompt.names)

    def held(self, prompt: PromptChunks, matched: dict[int, int]) -> dict[int, int]:
        """How many bytes of the prompt each slot's worker is believed to hold; all others hold nothing."""
        chunks = matched
        for begin, end in prompt.answers:
            # Whoever generated an answer holds it, although it never was part of a prompt.
            authors = self._answered.get(prompt.names[begin - 1], 0) if begin else 0
            if authors:
                chunks = {
                    slot: end if count == begin and authors >> slot & 1 else count
                    for slot, count in chunks.items()
                }
        sizes = prompt.sizes
        return {slot: sizes[count - 1] for slot, count in chunks.items()}

    def sent(self, prompt: PromptChunks, state: WorkerState, matched: int) -> list[int]:
        """
        The worker will hold the whole prompt. Gives the chunks that are new to it.

        `matched` is what `match` has just said of it.
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
        """A prompt that was sent, with chunks that were new to its workers, has been computed."""
        new = max((len(chunks) for _, chunks in assumed), default=0)
        if not new or not report.tail:
            return
        size = assumed[0][0].block_size
        blocks = report.tokens // size if size else 0
        slots = [state.slot for state, _ in assumed]
        self.blocks.place(prompt, int(report.tail, 16), blocks, len(prompt.names) - new, slots)

    def answered(self, prompt: PromptChunks, state: WorkerState) -> None:
        """The worker has generated a whole answer to the prompt, and holds that too."""
        slot = state.slot
        if not prompt.names or slot == NO_SLOT:
            return
        last = prompt.names[-1]
        self._answered[last] = self._answered.pop(last, 0) | 1 << slot
        if len(self._answered) > AUTHORS_LIMIT:
            self._answered.popitem(last=False)

    def forget(self, worker: Worker) -> None:
        """It is gone, and what it was known for with it: another one may have its slot."""
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
        state = self._states[worker] = WorkerState(slot, epoch, kind.newcomer(), kind.prior)
        tokens = load.total_blocks * load.block_size if load else 0
        self._index.register(slot, max(64, int(CAPACITY_FACTOR * tokens * BYTES_PER_TOKEN / CHUNK_BYTES)))
        return state

    def _empty(self, slot: int) -> None:
        """Another process has the slot from now on, and holds and generated nothing of what this one did."""
        self.blocks.close(slot)
        self._index.forget(slot)
        mask = ~(1 << slot)
        self._answered = OrderedDict(
            (last, left) for last, authors in self._answered.items() if (left := authors & mask)
        )
