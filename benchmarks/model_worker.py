"""
A worker without a model: it takes as long as a real one, and its cache stores and evicts the same blocks.

It computes prompts one after the other, like an engine that gives all its time to the oldest prompt. It
stores full blocks and evicts the least recently used ones, within a prompt the last ones first. A tier behind
the cache keeps what was used, as far as it has room: what the cache lacks is restored, one prompt after the
other, if that is sooner than computing it. Other prompts are computed meanwhile. The worker generates for all
its streams at once, more slowly with more streams. Sockets and routers are in `model_server`. Times are those
of the running loop, which need not be a real clock.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import xxhash

BYTES_PER_TOKEN = 4

RESTORE_BYTE_S = 26e-3 / 94.4e6
"""From memory, with checksum: two cores copied 94.4 MB in 14 ms and verified them in 12."""

EVENT_TOKENS = 64
"""Tokens in one event of a stream, after the first, which comes alone."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds that work takes: about those of a model of 8 billion parameters on one GPU."""

    start_s: float = 0.02
    token_s: float = 1 / 8000
    pair_s: float = 4e-9
    """Per pair of a token and one before it: 62,000 tokens take twice as long as by `token_s` alone."""
    move_s: float = 0.005
    """From a computed prompt to its blocks at the decode worker: all but the last were moved meanwhile."""
    step_s: float = 0.012
    stream_step_s: float = 0.0002
    context_step_s: float = 3e-8
    restore_s: float = 0.001
    restore_token_s: float = 131_072 * RESTORE_BYTE_S
    """Per token that comes from the tier: 128 KiB in such a model."""

    def faster(self, times: float) -> Timing:
        return Timing(*(getattr(self, one.name) / times for one in fields(self)))

    def prefill_s(self, uncached: int, context: int) -> float:
        return self.start_s + uncached * (self.token_s + self.pair_s * (context - uncached / 2))

    def restored_s(self, tokens: int) -> float:
        return self.restore_s + tokens * self.restore_token_s

    def token_step_s(self, streams: int, context: int) -> float:
        return self.step_s + streams * self.stream_step_s + context * self.context_step_s


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt as its worker sees it: four bytes of text are one token."""

    tokens: int
    blocks: tuple[int, ...]
    """The names of its full blocks, each of which covers all before it."""


def text_of(text: bytes, block_tokens: int) -> Text:
    """
    >>> short, longer = text_of(b"abcdefghij", 1), text_of(b"abcdefghijkl", 1)
    >>> short.tokens, len(short.blocks), longer.blocks[:2] == short.blocks
    (3, 2, True)
    """
    size = block_tokens * BYTES_PER_TOKEN
    name, names = 0, []
    for start in range(0, len(text) - size + 1, size):
        name = xxhash.xxh3_64_intdigest(text[start : start + size], seed=name)
        names.append(name)
    return Text(max(1, -(-len(text) // BYTES_PER_TOKEN)), tuple(names))


def prompt_text(messages: Iterable[tuple[str, str]]) -> bytes:
    """Roles and contents as a template would put them: a turn begins with just what the turn before made."""
    return b"".join(b"%b</%b>" % (content.encode(), role.encode()) for role, content in messages)


def answer_text(text: Text, tokens: int) -> str:
    """Four letters a token; the same for the same prompt."""
    word = f"{text.blocks[-1] if text.blocks else text.tokens:016x} "
    return (word * (tokens * 4 // len(word) + 1))[: tokens * 4]


@dataclass(frozen=True, slots=True)
class Changed:
    """Changes of the cache by one use."""

    stored: Sequence[tuple[int, int | None]]
    """(block, the one before it), parents first."""
    removed: Sequence[int]


class BlockCache:
    """Blocks of one worker. If it holds a block, it holds all blocks before it in the prompt."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.parents: OrderedDict[int, int | None] = OrderedDict()
        """Block -> the one before it; the first is dropped next."""

    def matched(self, blocks: Sequence[int]) -> int:
        """How many of the leading blocks are held."""
        for count, block in enumerate(blocks):
            if block not in self.parents:
                return count
        return len(blocks)

    def use(self, blocks: Sequence[int]) -> Changed:
        """All of a prompt's blocks are held from now on, as far as there is room."""
        held = self.matched(blocks)
        before: list[int | None] = [None, *blocks]
        new = list(zip(blocks[held:], before[held:], strict=False))
        self.parents.update(new)
        for block in reversed(blocks):  # the beginning is used last, and so is dropped last
            self.parents.move_to_end(block)
        removed = [self.parents.popitem(last=False)[0] for _ in range(len(self.parents) - self.capacity)]
        gone, added = set(removed), {block for block, _ in new}
        stored = [(block, parent) for block, parent in new if block not in gone]
        return Changed(stored, [block for block in removed if block not in added])

    def clear(self) -> None:
        self.parents.clear()


@dataclass(frozen=True, slots=True)
class Computed:
    """Result of one prompt."""

    cached: int
    """Restored tokens included."""
    queue_s: float
    compute_s: float
    """Restoring included."""


@dataclass(slots=True, eq=False)
class _Waiting:
    text: Text
    arrived: float
    computed: asyncio.Future[Computed]
    began: float | None = None
    """When its restoring began."""
    ready: float = 0.0
    """When its restoring ended."""


class ModelWorker:
    """One worker. Belongs to the loop that runs when it is made."""

    def __init__(
        self,
        timing: Timing,
        capacity: int,
        block_tokens: int,
        tell: Callable[[Changed], None],
        tier: int = 0,
        tell_tier: Callable[[Changed], None] = lambda changed: None,
    ) -> None:
        """
        `capacity` and `tier`: blocks of `block_tokens`. `tell` is called with every change of the cache,
        `tell_tier` with those of the tier.
        """
        self.timing = timing
        self.block_tokens = block_tokens
        self.cache = BlockCache(capacity)
        self.tier = BlockCache(tier)
        self.streams = 0
        self.context = 0
        """Tokens of all streams."""
        self.busy_s = 0.0
        """Seconds in which it computed prompts."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.restored_tokens = 0
        self._tell, self._tell_tier = tell, tell_tier
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Waiting] = deque()
        self._free_at = 0.0
        self._restored_at = 0.0
        """When the last prompt is restored."""
        self._computing = False

    @property
    def queued(self) -> int:
        return len(self._waiting)

    @property
    def queued_tokens(self) -> int:
        return sum(one.text.tokens for one in self._waiting)

    @property
    def step_s(self) -> float:
        """Seconds from one token to the next, as things are."""
        return self.timing.token_step_s(self.streams, self.context)

    def compute(self, text: Text) -> asyncio.Future[Computed]:
        """Compute the uncached part of a prompt, after earlier prompts. May be cancelled."""
        one = _Waiting(text, self._loop.time(), self._loop.create_future())
        self._waiting.append(one)
        self._next()
        return one.computed

    async def generate(self, text: Text, tokens: int, emit: Callable[[int], None]) -> None:
        """Call `emit` with the number of new tokens. The prompt's blocks are held from the start."""
        self.streams += 1
        self.context += text.tokens
        try:
            self.use(text.blocks)
            emit(1)
            generated, due = 1, self._loop.time()
            while generated < tokens:
                part = min(EVENT_TOKENS, tokens - generated)
                due += part * self.step_s
                await asyncio.sleep(due - self._loop.time())
                generated += part
                emit(part)
        finally:
            self.streams -= 1
            self.context -= text.tokens

    def use(self, blocks: Sequence[int]) -> None:
        changed = self.cache.use(blocks)
        if changed.stored or changed.removed:
            self._tell(changed)
        if self.tier.capacity:
            changed = self.tier.use(blocks)
            if changed.stored or changed.removed:
                self._tell_tier(changed)

    def _next(self) -> None:
        while self._waiting and not self._computing:
            one = self._waiting.popleft()
            if one.computed.cancelled() or self._restores(one):
                continue
            # Count from the time when it was free, so that delays of a slow machine do not add up.
            start = max(one.arrived, one.ready, self._free_at)
            began = start if one.began is None else one.began
            cached = self._held(one.text, self.cache)
            took = self.timing.prefill_s(one.text.tokens - cached, one.text.tokens)
            self.busy_s += took
            self.prompt_tokens += one.text.tokens
            self.cached_tokens += cached
            self._computing = True
            self._free_at = start + took
            done = Computed(cached, began - one.arrived, took + (start - began))
            self._loop.call_at(self._free_at, self._ended, one, done)

    def _held(self, text: Text, cache: BlockCache) -> int:
        """Tokens of the prompt that the cache, or the tier, has: all but the last one at most."""
        return min(cache.matched(text.blocks) * self.block_tokens, text.tokens - 1)

    def _restores(self, one: _Waiting) -> bool:
        """Begin to restore blocks of a prompt, if that is sooner than computing them."""
        if not self.tier.capacity or one.began is not None:
            return False
        timing, tokens = self.timing, one.text.tokens
        held, reached = self._held(one.text, self.cache), self._held(one.text, self.tier)
        if reached <= held:
            return False
        now = self._loop.time()
        ends = max(now, self._restored_at) + timing.restored_s(reached - held)
        saved = timing.prefill_s(tokens - held, tokens) - timing.prefill_s(tokens - reached, tokens)
        if ends - now >= saved:
            return False
        self.restored_tokens += reached - held
        one.began, one.ready = max(one.arrived, now), ends
        self._restored_at = ends
        self._loop.call_at(ends, self._restored, one, reached // self.block_tokens)
        return True

    def _restored(self, one: _Waiting, blocks: int) -> None:
        self.use(one.text.blocks[:blocks])
        self._waiting.appendleft(one)
        self._next()

    def _ended(self, one: _Waiting, done: Computed) -> None:
        self._computing = False
        self.use(one.text.blocks)
        if not one.computed.cancelled():
            one.computed.set_result(done)
        self._next()
