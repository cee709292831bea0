"""
The passes of one engine: launched, and read at once or while the next one is computed.

With a depth of 0, a pass is read in the step that launched it. With a depth of 1, a decode pass is launched
before the host has read the tokens of the last one. Its token ids stay on the device. Then the host reads
those tokens, ends and reports requests, and fills token masks, while the device computes. Rows with a token
mask or with penalties need these tokens for their selection: it waits, but the pass does not. A row that has
ended meanwhile was computed without need. Its token is dropped, and its KV is in a block that is not
published.

No pass is launched ahead if a queued request may be admitted, a prompt is not yet computed, or blocks are
missing. Then the scheduler plans the next pass, after the host has read the last one.

With native kernels, a request that arrives may end a pass of patient sequences early: `PassInterruption`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from torch import Tensor

from baton_engine.batch import Batch, PassInterrupted
from baton_engine.forward_pass import (
    PassResult,
    ScheduledChunk,
    compute,
    decode,
    row_of,
    with_errors,
    without_errors,
)
from baton_engine.kv.cache import KVCache
from baton_engine.model.decoder import Model
from baton_engine.sampling import sampler
from baton_engine.sampling.sampler import Selection
from baton_engine.sampling.state import SamplingState
from baton_engine.sampling.token_masks import Mask, MaskFiller
from baton_engine.scheduling.scheduler import YIELDS, Scheduler, StepPlan
from baton_engine.scheduling.sequence import Sequence, Stage
from baton_engine.streams import Event, copied

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class LaunchedPass:
    """A pass whose results the host has not read."""

    plan: StepPlan
    chunks: list[ScheduledChunk]
    admissions: list[int]
    """`Sequence.admissions` of each chunk at the launch."""
    rows: list[int]
    """As in `PassResult`."""
    logits: Tensor
    """As in `PassResult`, if `selection` has not overwritten it."""
    written: Event
    """Behind the KV of the pass."""
    overlaps: bool
    """Whether the next pass may be launched before this one is read."""
    started: float
    """Time at which its step began; `launched_at` without a step of its own."""
    launched_at: float
    done: Event
    """Behind the selection too, once it is launched; of a pass that overlaps."""
    model_s: float = 0.0
    """Duration of the model in a pass that does not overlap."""
    sampled: list[int] = field(default_factory=list)
    """Indices of the chunks that `selection` has tokens of."""
    masks: list[Mask] = field(default_factory=list)
    """Of the chunks in `sampled`."""
    selection: Selection | None = None

    @property
    def running(self) -> dict[int, ScheduledChunk]:
        """By index, the chunks whose sequence still runs, and was not retracted since the launch."""
        return {
            index: chunk
            for index, (chunk, admissions) in enumerate(zip(self.chunks, self.admissions, strict=True))
            if chunk.sequence.stage is Stage.RUNNING and chunk.sequence.admissions == admissions
        }


class PassInterruption:
    """Decides which passes a request may end. After `YIELDS` in a row, patient sequences get a whole one."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self._allowed = False
        self._in_a_row = 0

    @contextlib.contextmanager
    def during(self, chunks: list[ScheduledChunk]) -> Iterator[None]:
        """Return a context in which a pass of `chunks` is computed. Used on the engine's thread."""
        patient = [chunk.sequence.request.patient for chunk in chunks]
        self._allowed = all(patient) and self._in_a_row < YIELDS
        try:
            yield
        except PassInterrupted:
            self._in_a_row += 1
            raise
        finally:
            self._allowed = False
        if any(patient):
            self._in_a_row = 0

    def interrupt_for(self, sequence: Sequence | None) -> None:
        """
        End the pass in progress if a command about `sequence` need not wait for it. Called on any thread.

        A pass that begins just now is not always ended.
        """
        if sequence is not None and not sequence.request.patient and self._allowed:
            self._model.interrupt()


class PassPipeline:
    """Launches passes of one engine, and reads their results. Used on its thread."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        scheduler: Scheduler,
        mask_filler: MaskFiller,
        clock: Callable[[], float],
        synchronize: Callable[[], None],
        depth: int,
    ) -> None:
        """
        `synchronize` waits for all passes, and raises the device's error. `depth` is the number of passes in
        flight between two steps: 0 or 1.
        """
        self.depth = depth
        self.ahead = 0
        """Number of passes that were launched ahead."""
        self._model = model
        self._cache = cache
        self._scheduler = scheduler
        self._mask_filler = mask_filler
        self._clock = clock
        self._synchronize = synchronize
        self._read_at = 0.0

    def launch(self, plan: StepPlan, chunks: list[ScheduledChunk], started: float) -> LaunchedPass:
        """Launch the planned pass of a step that has `started`, and its selection."""
        sampled = [index for index, chunk in enumerate(chunks) if chunk.samples]
        states = [chunks[index].sequence.sampling_state for index in sampled]
        pending = self._mask_filler.begin([state.token_mask for state in states])
        try:
            batch = Batch([row_of(chunk) for chunk in chunks], self._cache.block_size, self._cache.kv.device)
            launched = self._compute(plan, chunks, batch, started)
            if not launched.overlaps:
                # Its duration is that of the model, and errors of the device surface here.
                self._synchronize()
                launched.model_s = self._clock() - launched.launched_at
        finally:
            masks = pending.wait()
        self._select(launched, sampled, states, masks)
        return launched

    def look_ahead(self, current: LaunchedPass) -> LaunchedPass | None:
        """Launch the pass after `current` with the tokens on the device. None: the scheduler plans it."""
        rows = self._continuing(current)
        if not rows or not self._scheduler.look_ahead(list(rows)):
            return None
        try:
            return self._launched_ahead(current, rows)
        except Exception as error:  # a planned pass fails too, or does better
            log.warning("A pass cannot be launched ahead: %s", error)
            return None

    def read(self, current: LaunchedPass) -> PassResult:
        """Wait for a pass, and return its results."""
        if current.overlaps:
            current.done.wait()
            now = self._clock()
            seconds, self._read_at = now - max(current.launched_at, self._read_at), now
        else:
            self._synchronize()
            seconds = current.model_s
        choices = [] if current.selection is None else current.selection.read()
        sampled = dict(zip(current.sampled, with_errors(choices, current.masks), strict=True))
        return PassResult(seconds, sampled, current.logits, current.rows)

    def select(self, ahead: LaunchedPass) -> bool:
        """
        Launch the selection of a pass that was launched ahead, if it waited for the tokens of the last one.

        Returns whether any of its sequences still runs.
        """
        sampled = list(ahead.running)
        if sampled and ahead.selection is None:
            states = [ahead.chunks[index].sequence.sampling_state for index in sampled]
            masks = self._mask_filler.begin([state.token_mask for state in states]).wait()
            self._select(ahead, sampled, states, masks)
        return bool(sampled)

    def _continuing(self, current: LaunchedPass) -> dict[Sequence, int]:
        """
        Return the sequences that continue after `current`, with their rows in its selection.

        Empty, if it does not sample a token of each running sequence.
        """
        running = current.running
        rows = {running[index].sequence: row for row, index in enumerate(current.sampled) if index in running}
        if len(rows) != len(self._scheduler.running):
            return {}
        return {sequence: row for sequence, row in rows.items() if not self._ends(sequence)}

    def _ends(self, sequence: Sequence) -> bool:
        """Return whether the next token ends the sequence, whatever it is."""
        request = sequence.request
        return (
            len(sequence.output) + 1 >= request.sampling.max_tokens
            or sequence.length + 1 >= self._scheduler.limits.max_model_len
            or request.export is not None
        )

    def _launched_ahead(self, current: LaunchedPass, rows: dict[Sequence, int]) -> LaunchedPass:
        assert current.selection is not None
        chunks = [decode(sequence) for sequence in rows]
        device = self._cache.kv.device
        batch = Batch([row_of(chunk, ahead=True) for chunk in chunks], self._cache.block_size, device)
        tokens = current.selection.tokens
        if (wanted := list(rows.values())) != list(range(len(tokens))):
            tokens = tokens[copied(np.array(wanted), device)]
        batch.feed(tokens.clamp(min=0).long())  # the row of a token -1 ends
        launched = self._compute(StepPlan(decodes=list(rows)), chunks, batch)
        states = [sequence.sampling_state for sequence in rows]
        if not any(state.needs_tokens for state in states):
            indices = list(range(len(chunks)))
            self._select(launched, indices, [state.next() for state in states], [None for _ in indices])
        self.ahead += 1
        return launched

    def _compute(
        self, plan: StepPlan, chunks: list[ScheduledChunk], batch: Batch, started: float | None = None
    ) -> LaunchedPass:
        launched_at = self._clock()
        logits = compute(self._model, self._cache, chunks, batch)
        written = self._cache.streams.record()
        ends = accumulate((1 + len(chunk.draft)) * chunk.samples for chunk in chunks)
        return LaunchedPass(
            plan,
            chunks,
            admissions=[chunk.sequence.admissions for chunk in chunks],
            rows=[0, *ends][:-1],
            logits=logits,
            written=written,
            overlaps=self.depth > 0 and not any(chunk.draft for chunk in chunks),
            started=launched_at if started is None else started,
            launched_at=launched_at,
            done=written,
        )

    def _select(
        self, launched: LaunchedPass, sampled: list[int], states: list[SamplingState], masks: list[Mask]
    ) -> None:
        if not sampled:
            return
        logits = launched.logits
        if len(sampled) < len(logits):  # the other rows are of drafts, or have ended since the launch
            rows = np.array([launched.rows[index] for index in sampled])
            logits = logits[copied(rows, logits.device)]
        launched.selection = sampler.select(logits, states, without_errors(masks))
        launched.sampled, launched.masks = sampled, masks
        if launched.overlaps:
            launched.done = self._cache.streams.record()
