"""
A worker without a model: it takes as long as one would, and its cache holds and drops what one's would.

It computes prompts one after the other, as an engine does that gives all its time to the oldest prompt; it
keeps full blocks and drops the least recently used, of one prompt the end before the beginning; and it
generates for all its streams at once, the slower the more they are. Nothing here knows of sockets or of
routers: those are `model_server`'s. Times are those of the running loop, which need not be a real clock's.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields

import xxhash

BYTES_PER_TOKEN = 4

EVENT_TOKENS = 64
"""Tokens in one event of a stream, after the first, which comes alone."""


@dataclass(frozen=True, slots=True)
class Timing:
    """What work takes, in seconds: about a model of 8 billion parameters on one GPU."""

    start_s: float = 0.02
    token_s: float = 1 / 8000
    pair_s: float = 4e-9
    """Per pair of a token and one before it: 62,000 tokens take twice as long as by `token_s` alone."""
    move_s: float = 0.005
    """From a computed prompt to its blocks at the decode worker: all but the last were moved meanwhile."""
    step_s: float = 0.012
    stream_step_s: float = 0.0002
    context_step_s: float = 3e-8

    def faster(self, times: float) -> Timing:
        return Timing(*(getattr(self, one.name) / times for one in fields(self)))

    def prefill_s(self, uncached: int, context: int) -> float:
        return self.start_s + uncached * (self.token_s + self.pair_s * (context - uncached / 2))

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
    """What one use of a cache has changed in it."""

    stored: Sequence[tuple[int, int | None]]
    """(block, the one before it), parents first."""
    removed: Sequence[int]


class BlockCache:
    """What one worker keeps. Whatever is kept, all before it in its prompt is kept too."""

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
        known = self.matched(blocks)
        before: list[int | None] = [None, *blocks]
        new = list(zip(blocks[known:], before[known:], strict=False))
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
    """What became of one prompt."""

    cached: int
    queue_s: float
    compute_s: float


@dataclass(slots=True, eq=False)
class _Waiting:
    text: Text
    arrived: float
    computed: asyncio.Future[Computed]


class ModelWorker:
    """One worker. Belongs to the loop that runs when it is made."""

    def __init__(
        self, timing: Timing, capacity: int, block_tokens: int, tell: Callable[[Changed], None]
    ) -> None:
        """`capacity`: blocks of `block_tokens`. `tell` is called with every change of the cache."""
        self.timing = timing
        self.block_tokens = block_tokens
        self.cache = BlockCache(capacity)
        self.streams = 0
        self.context = 0
        """Tokens of all streams."""
        self.busy_s = 0.0
        """In which it computed prompts."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self._tell = tell
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[_Waiting] = deque()
        self._free_at = 0.0
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
        """Compute what of a prompt is not cached, after those that came before. May be cancelled."""
        one = _Waiting(text, self._loop.time(), self._loop.create_future())
        self._waiting.append(one)
        self._next()
        return one.computed

    async def generate(self, text: Text, tokens: int, emit: Callable[[int], None]) -> None:
        """Say how many tokens there are, whenever there are some; the prompt is held from the start on."""
        self.streams += 1
        self.context += text.tokens
        try:
            self.use(text.blocks)
            emit(1)
            made, due = 1, self._loop.time()
            while made < tokens:
                part = min(EVENT_TOKENS, tokens - made)
                due += part * self.step_s
                await asyncio.sleep(due - self._loop.time())
                made += part
                emit(part)
        finally:
            self.streams -= 1
            self.context -= text.tokens

    def use(self, blocks: Sequence[int]) -> None:
        changed = self.cache.use(blocks)
        if changed.stored or changed.removed:
            self._tell(changed)

    def _next(self) -> None:
        while self._waiting and not self._computing:
            one = self._waiting.popleft()
            if one.computed.cancelled():
                continue
            # From when it was free, not from when it noticed: what a slow machine is late does not add up.
            began = max(one.arrived, self._free_at)
            held = self.cache.matched(one.text.blocks) * self.block_tokens
            cached = min(held, one.text.tokens - 1)
            took = self.timing.prefill_s(one.text.tokens - cached, one.text.tokens)
            self.busy_s += took
            self.prompt_tokens += one.text.tokens
            self.cached_tokens += cached
            self._computing = True
            self._free_at = began + took
            done = Computed(cached, began - one.arrived, took)
            self._loop.call_at(self._free_at, self._ended, one, done)

    def _ended(self, one: _Waiting, done: Computed) -> None:
        self._computing = False
        self.use(one.text.blocks)
        if not one.computed.cancelled():
            one.computed.set_result(done)
        self._next()
