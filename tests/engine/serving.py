"""An engine over the fake model, with its outputs collected and its peers played by the test."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from baton_api.messages import TokenChoice
from baton_api.sampling import SamplingParams
from baton_engine.engine import Engine
from baton_engine.kv.cache import KVCache
from baton_engine.kv.events import KvEvents
from baton_engine.metrics.counters import EngineSnapshot
from baton_engine.model.decoder import Model
from baton_engine.requests import Fetch, FetchResult, FinishReason, Output, RelayRecord, Request
from baton_engine.sampling import sampler
from baton_engine.sampling.state import SamplingState
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.streams import Event
from baton_engine.tiers.tier import EngineTier
from tests.engine.fake_model import FakeModel, make_cache

TIMEOUT_S = 300.0


class Serving:
    """`with Serving(...) as serving`: submit, wait, look."""

    def __init__(
        self,
        blocks: int = 65,
        block_size: int = 4,
        model: FakeModel | None = None,
        clock: Callable[[], float] = time.monotonic,
        draft: FakeModel | None = None,
        wrap: Callable[[Model, KVCache], Model] = lambda model, cache: model,
        tiers: Callable[[KVCache], Sequence[EngineTier]] = lambda cache: [],
        kv_events: KvEvents | None = None,
        **limits: Any,
    ) -> None:
        self.model = model or FakeModel()
        self.cache = make_cache(blocks, block_size)
        limits = {"max_model_len": 1024, "chunk_tokens": 32, "max_running": 16, **limits}
        self.tiers: Any = tiers(self.cache)  # tests look into them
        self.fatal: list[str] = []
        self.engine = Engine(
            wrap(self.model, self.cache),
            self.cache,
            EngineLimits(**limits),
            on_outputs=self._collect,
            on_fatal=self.fatal.append,
            clock=clock,
            draft=None if draft is None else (draft, make_cache(blocks, block_size)),
            kv_events=kv_events,
            tiers=self.tiers,
        )
        self.outputs: dict[str, list[Output]] = {}
        self._changed = threading.Condition()

    def __enter__(self) -> Self:
        self.engine.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.model.resume()
        self.engine.stop()
        for tier in self.tiers:
            tier.close()

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.engine.submit(request)

    def run(self, *requests: Request) -> list[list[int]]:
        """The tokens of each request."""
        self.submit(*requests)
        return [self.tokens(request.id) for request in requests]

    def ended(self, name: str) -> Output:
        """Wait for the request's last output."""
        self.wait(lambda: bool(self._finish(name)), name)
        return self.outputs[name][-1]

    def tokens(self, name: str) -> list[int]:
        """Wait for the end, and give all tokens."""
        self.ended(name)
        return self.so_far(name)

    def so_far(self, name: str) -> list[int]:
        return [choice.token for output in self.outputs.get(name, []) for choice in output.tokens]

    def wait(self, condition: Callable[[], bool], what: object = "") -> None:
        with self._changed:
            assert self._changed.wait_for(condition, TIMEOUT_S), f"waited in vain for {what}"

    def until(self, condition: Callable[[EngineSnapshot], bool]) -> EngineSnapshot:
        """Wait for a condition on the engine's snapshot."""
        deadline = time.monotonic() + TIMEOUT_S
        while not condition(snapshot := self.engine.snapshot()):
            assert time.monotonic() < deadline, snapshot
            time.sleep(0.001)
        return snapshot

    def at_rest(self) -> EngineSnapshot:
        """Wait until no request is left; all blocks are free or cached."""
        snapshot = self.until(
            lambda now: now.running == now.queued == now.fetching == now.held == now.quarantined_blocks == 0
        )
        assert snapshot.available_blocks == snapshot.total_blocks, snapshot
        assert snapshot.pinned_blocks == 0
        return snapshot

    def reference(self, request: Request) -> list[int]:
        """Return the request's tokens, drawn one by one with no engine and no cache."""
        state, drawn = SamplingState(request.sampling, request.prompt), list[int]()
        while len(drawn) < request.sampling.max_tokens:
            token = self.first((*request.prompt, *drawn), state).token
            state.push(token)
            drawn.append(token)
            if token in request.sampling.stop_ids:
                break
        return drawn

    def first(self, tokens: Sequence[int], state: SamplingState) -> TokenChoice:
        with torch.inference_mode():
            (choice,) = sampler.sample(self.model.logits(list(tokens))[None], [state])
        assert choice is not None
        return choice

    def _finish(self, name: str) -> FinishReason | None:
        outputs = self.outputs.get(name)
        return outputs[-1].finish if outputs else None

    def _collect(self, outputs: list[Output]) -> None:
        with self._changed:
            for output in outputs:
                seen = self.outputs.setdefault(output.request_id, [])
                assert not seen or seen[-1].finish is None, f"{output} came after the end"
                seen.append(output)
            self._changed.notify_all()


class Prefiller:
    """A `RemotePrefill` that the test answers, writing the blocks as a peer's card would."""

    def __init__(self, serving: Serving) -> None:
        self.serving = serving
        self.fetches: queue.SimpleQueue[Fetch] = queue.SimpleQueue()
        self.cancelled: queue.SimpleQueue[str] = queue.SimpleQueue()

    def start(self, fetch: Fetch, unused: Event) -> None:
        self.fetches.put(fetch)

    def cancel(self, request_id: str) -> None:
        self.cancelled.put(request_id)

    def fetch(self) -> Fetch:
        """Wait for the engine to ask."""
        return self.fetches.get(timeout=TIMEOUT_S)

    def write(self, fetch: Fetch, count: int | None = None) -> None:
        """Bring the first `count` blocks, all if None."""
        cache, size = self.serving.cache, self.serving.cache.block_size
        for index, block in enumerate(fetch.blocks[:count], start=fetch.start_block):
            for slot, token in enumerate(fetch.tokens[index * size : (index + 1) * size]):
                cache.kv[block, 0, 0, 0, slot, 0] = token
                cache.kv[block, 0, 0, 0, slot, 1] = index * size + slot

    def succeed(self, fetch: Fetch, cached: int = 0, relay: RelayRecord | None = None) -> None:
        self.write(fetch)
        first = self.serving.first(fetch.tokens, SamplingState(fetch.sampling, fetch.tokens))
        self.serving.engine.fetched(
            FetchResult(fetch.request_id, len(fetch.blocks), first=first, cached_tokens=cached, relay=relay)
        )

    def fail(
        self, fetch: Fetch, arrived: int = 0, unsafe: Collection[int] = (), reason: str = "peer_lost"
    ) -> None:
        self.write(fetch, arrived)
        self.serving.engine.fetched(
            FetchResult(fetch.request_id, arrived, unsafe=frozenset(unsafe), reason=reason)
        )


class Recipient:
    """An `Export` that records its announcements."""

    def __init__(self) -> None:
        self.announced: list[tuple[int, tuple[int, ...]]] = []

    def computed(self, request_id: str, tokens: int, blocks: Sequence[int], written: Event) -> None:
        self.announced.append((tokens, tuple(blocks)))


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((seed * 31 + position * (seed + 7) + position * position) % 97 for position in range(length))


REQUEST_FIELDS = {field.name for field in dataclasses.fields(Request)} - {"id", "prompt", "sampling"}


def request_of(
    name: str, length: int = 10, *, seed: int = 0, prompt: tuple[int, ...] | None = None, **fields: Any
) -> Request:
    """Greedy and 8 tokens by default; sampling fields and request fields may be mixed."""
    own = {name: fields.pop(name) for name in REQUEST_FIELDS & fields.keys()}
    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **fields})
    return Request(name, prompt if prompt is not None else prompt_of(length, seed), sampling, **own)
