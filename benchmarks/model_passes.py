"""
A worker without a model that computes by forward passes, so that prompts delay the streams beside them.

`ModelWorker` computes prompts and generates side by side, as if on two devices. Here a pass has one token of
every stream and a chunk of the oldest prompt, as the engine plans them, and every stream's next token comes
at its end. Where both are in a pass, weights are read once: either during the arithmetic of the chunk (the
better case of what devices do), or before it (the worse one).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from benchmarks.model_worker import Changed, Computed, ModelWorker, Text, Timing, _Waiting

GAP_S = 1e-4
"""Resolution of recorded gaps."""

RESUMED_S = 1e-6
"""From the end of a pass to the next one: who waited for its results can join."""


@dataclass(frozen=True, slots=True)
class Chunks:
    """Most prompt tokens of a pass, beside streams (`mixed`) and without."""

    mixed: int
    hidden: bool = True
    """Whether weights are read during a chunk's arithmetic, and not before it."""
    alone: int = 2048


@dataclass(slots=True)
class _Prompt:
    """The prompt that is computed."""

    waiting: _Waiting
    cached: int
    left: int
    began: float


@dataclass(frozen=True, slots=True)
class _Joined:
    """A stream that waits for its first pass."""

    at: float
    tokens: int
    ended: asyncio.Future[None]


class PassWorker(ModelWorker):
    """`ModelWorker` with the interference of prompts and streams, without a tier. Records gaps."""

    def __init__(
        self,
        timing: Timing,
        capacity: int,
        block_tokens: int,
        tell: Callable[[Changed], None],
        chunks: Chunks,
    ) -> None:
        super().__init__(timing, capacity, block_tokens, tell)
        self.gaps: Counter[int] = Counter()
        """How many tokens came how long after the one before, in `GAP_S`."""
        self._chunks = chunks
        self._passes = 0
        self._prompt: _Prompt | None = None
        self._chunk = 0
        """Prompt tokens of the current pass."""
        self._ends: list[tuple[int, int, asyncio.Future[None]]] = []
        """For each stream the number of its last pass; a heap."""
        self._numbers = count()
        self._joined: list[_Joined] = []
        self._new: list[_Joined] = []
        """Streams whose first pass is the current one."""
        self._timer: asyncio.TimerHandle | None = None
        self._began, self._pass_s, self._planned = 0.0, 0.0, 1

    async def generate(self, text: Text, tokens: int, emit: Callable[[int], None]) -> None:
        self.streams += 1
        self.context += text.tokens
        try:
            self.use(text.blocks)
            emit(1)
            if tokens > 1:
                joined = _Joined(self._loop.time(), tokens - 1, self._loop.create_future())
                self._joined.append(joined)
                self._next()
                await joined.ended
                emit(tokens - 1)
        finally:
            self.streams -= 1
            self.context -= text.tokens

    def _next(self) -> None:
        """There is something new: at the end of the current pass, or now."""
        if self._timer is None:
            self._start()
        elif self._planned > 1:
            passed = int((self._loop.time() - self._began) / self._pass_s) + 1
            if passed < self._planned:
                self._timer.cancel()
                self._planned = passed
                self._timer = self._loop.call_at(self._began + passed * self._pass_s, self._finish)

    def _start(self) -> None:
        """Begin with a pass, or with several equal ones."""
        now, timing = self._loop.time(), self.timing
        self._timer = None
        self._new, self._joined = self._joined, []
        for one in self._new:
            heappush(self._ends, (self._passes + one.tokens, next(self._numbers), one.ended))
        if self._prompt is None:
            self._prompt = self._oldest(now)
        streams, prompt = len(self._ends), self._prompt
        self._chunk, self._planned = 0, 1
        if prompt is not None:
            self._chunk = min(prompt.left, self._chunks.mixed if streams else self._chunks.alone)
            tokens = prompt.waiting.text.tokens
            first = prompt.left == tokens - prompt.cached
            position = tokens - prompt.left
            chunk_s = self._chunk * (timing.token_s + timing.pair_s * (position + self._chunk / 2))
            chunk_s += timing.start_s if first else 0.0
            self._pass_s = chunk_s
            if streams:
                self._pass_s += timing.token_step_s(streams, self.context)
                if self._chunks.hidden:
                    self._pass_s -= min(timing.step_s, chunk_s)
        elif streams:
            self._pass_s = timing.token_step_s(streams, self.context)
            if not self._new:
                self._planned = self._ends[0][0] - self._passes
        else:
            return
        self._began = now
        self._timer = self._loop.call_at(now + self._planned * self._pass_s, self._finish)

    def _oldest(self, now: float) -> _Prompt | None:
        while self._waiting:
            one = self._waiting.popleft()
            if not one.computed.cancelled():
                cached = self._held(one.text, self.cache)
                self.prompt_tokens += one.text.tokens
                self.cached_tokens += cached
                return _Prompt(one, cached, one.text.tokens - cached, now)
        return None

    def _finish(self) -> None:
        """The current passes have ended."""
        now = self._loop.time()
        self._passes += self._planned
        for one in self._new:
            self.gaps[round((now - one.at) / GAP_S)] += 1
        if others := len(self._ends) - len(self._new):
            self.gaps[round(self._pass_s / GAP_S)] += others * self._planned
        while self._ends and self._ends[0][0] <= self._passes:
            _, _, ended = heappop(self._ends)
            if not ended.done():
                ended.set_result(None)
        if (prompt := self._prompt) is not None:
            self.busy_s += self._pass_s
            prompt.left -= self._chunk
            if not prompt.left:
                self._prompt = None
                self.use(prompt.waiting.text.blocks)
                arrived, computed = prompt.waiting.arrived, prompt.waiting.computed
                if not computed.cancelled():
                    computed.set_result(Computed(prompt.cached, prompt.began - arrived, now - prompt.began))
        self._planned = 1
        self._timer = self._loop.call_at(now + RESUMED_S, self._start)
