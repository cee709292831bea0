"""Captured decode passes of several ranks, as threads with fakes of CUDA's graphs, joined by gloo."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace, TracebackType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.batch import Batch, BatchRow
from baton_engine.graphs import CaptureLimits, GraphModel, with_graphs
from baton_engine.kv.cache import KVCache, MemoryBudget
from baton_engine.model.decoder import Model
from baton_engine.model.group import Group, RankFailed
from baton_engine.model.shards import Shard
from baton_engine.ops.choice import runs_kernels
from baton_engine.parallel.messages import ReplayPass
from baton_engine.parallel.ranks import ParallelModel, PassWatch
from baton_engine.requests import FinishReason, Request
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.settings import WorkerSettings
from baton_engine.streams import DeviceStreams, Streams, Waiting
from baton_engine.worker import _limits
from tests.engine.fake_graphs import TensorModel
from tests.engine.fake_model import SPEC
from tests.engine.fake_streams import FakeCuda
from tests.engine.greedy import CPU
from tests.engine.rank_threads import FOREVER_S, PartModel, RankDevice, RankKilled, rank_threads
from tests.engine.serving import Serving, request_of
from tests.engine.test_pass_pipeline import Overlapping

ENGINE = EngineLimits(max_model_len=64, max_running=16)
LIMITS = CaptureLimits(rows=8, memory=2**30, seconds=60)


class ParallelServing(Serving):
    """An engine whose decode passes are captured by two ranks."""

    def __enter__(self) -> ParallelServing:
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(self.graphs, GraphModel):
            self.graphs.close()
        self.ranks.close()

    def __init__(
        self,
        other: RankDevice | None = None,
        limits: CaptureLimits = LIMITS,
        timeout_s: float = FOREVER_S,
        **how: Any,
    ) -> None:
        # With overlap, rank 0's calls run at once: a late replay would find the input of the next pass.
        late = not how.get("overlap", False)
        self.devices = [RankDevice(late=late), other or RankDevice()]

        def wrap(_: Model, cache: KVCache) -> Model:
            devices = self.devices
            parallel = rank_threads(devices, PartModel, SPEC, cache, context=64, timeout_s=timeout_s)
            self.ranks = parallel.ranks
            try:
                self.graphs = with_graphs(
                    parallel, cache, ENGINE, limits, devices[0].taken, clock=lambda: 0.0
                )
            except BaseException:
                self.ranks.close()
                raise
            return self.graphs

        super().__init__(model=TensorModel(), wrap=wrap, **{"max_model_len": 64, **how})

    @property
    def replays(self) -> list[dict[int, int]]:
        """Replays of each rank, by the place of the graph."""
        return [
            {place: graph.replays for place, graph in enumerate(cuda.captured) if graph.replays}
            for cuda in self.devices
        ]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("count", [1, 3, 8])
def test_parallel_graphs_give_the_same_tokens(count: int, overlap: bool) -> None:
    """Requests of other lengths end at other steps, so batches of many sizes are replayed."""
    with ParallelServing(overlap=overlap) as serving:
        requests = [
            request_of(f"r{number}", 3 + 2 * number, seed=number, max_tokens=4 + 3 * (number % 4))
            for number in range(count)
        ]
        assert serving.run(*requests) == [serving.reference(request) for request in requests]
        serving.at_rest()
        assert isinstance(serving.graphs, GraphModel)
        own, other = serving.replays
        assert own == other
        assert sum(own.values()) == serving.graphs.replays > 0


def test_parallel_graphs_replay_passes_with_drafts() -> None:
    with ParallelServing(speculation_tokens=8, clock=itertools.count().__next__) as serving:
        request = request_of("r", 5, max_tokens=30)
        expected = serving.reference(request)
        assert serving.run(replace(request, prediction=tuple(expected))) == [expected]
        assert serving.engine.snapshot().totals.accepted_tokens > 10
        assert isinstance(serving.graphs, GraphModel)
        own, other = serving.replays
        assert own == other
        assert sum(own.values()) == serving.graphs.replays < 20


def mixed_requests() -> list[Request]:
    """12 requests, more than rows of a captured pass: greedy, sampled, penalized and with a token mask."""
    how: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1.0, "top_p": 0.9},
        {"allowed_ids": tuple(range(0, 97, 3))},
        {"frequency_penalty": 0.7, "stop_ids": tuple(range(0, 97, 7)), "min_tokens": 2},
    )
    return [
        request_of(f"r{number}", 6, seed=number, max_tokens=8 + 4 * number, **how[number % 4])
        for number in range(12)
    ]


def test_parallel_passes_are_launched_ahead_as_those_of_one_rank() -> None:
    """The other ranks get the tokens that rank 0's host has not read. It waits once for each pass."""
    requests = mixed_requests()

    def run(serving: Serving, device: FakeCuda) -> tuple[list[list[int]], int, int, int]:
        serving.submit(*requests)  # all are there before the first step
        with serving:
            answers = [serving.tokens(request.id) for request in requests]
            passes = serving.at_rest().forward_times.count
            return answers, passes, serving.engine._pipeline.ahead, device.counts["synchronize"]

    alone = Overlapping(graphs=True, blocks=200)
    expected = run(alone, alone.cuda)
    ranks = ParallelServing(overlap=True, blocks=200)
    assert run(ranks, ranks.devices[0]) == expected
    answers, passes, ahead, waits = expected
    assert answers[::4] == [ranks.reference(request) for request in requests[::4]]
    assert passes == waits > ahead > passes - 6
    own, other = ranks.replays
    assert own == other
    assert 0 < sum(own.values()) < passes - 1, "some passes have more rows than captured ones"


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("device", [CPU, torch.device("cuda", 0)])
def test_workers_launch_passes_ahead_on_gpus_only(
    device: torch.device, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without kernels the host selects tokens, and would wait for a pass where no limit ends the wait."""
    monkeypatch.setenv("BATON_KERNELS", kernels)
    ahead = device != CPU and kernels == "on" and runs_kernels("cuda")
    model = connected(RankDevice(), RankDevice())
    with contextlib.closing(model.ranks):
        loaded: Any = SimpleNamespace(model=model, spec=SPEC, encoder=None)
        assert _limits(WorkerSettings(model="m"), loaded, device).overlap is ahead
        assert not _limits(WorkerSettings(model="m", overlap=False), loaded, device).overlap


@pytest.mark.parametrize("finish", [False, True], ids=["event", "stream"])
def test_wait_for_a_pass_ends_if_a_rank_hangs(finish: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    own = RankDevice()

    def streams_of(device: torch.device, waiting: Waiting) -> Streams:
        return DeviceStreams(torch.device("cuda", 0), own, waiting)

    monkeypatch.setattr("baton_engine.parallel.ranks.streams_of", streams_of)
    model = rank_threads([own, RankDevice()], SumModel, SPEC, None, context=64, timeout_s=0.1)
    with contextlib.closing(model.ranks):
        cache = model.open_cache(20, torch.float32, CPU)

        def hang() -> None:
            own.aborted.wait(FOREVER_S)

        own.default.queued.append(hang)
        with pytest.raises(RankFailed, match=r"a rank did not answer within 0.1 s"):
            cache.streams.finish() if finish else cache.streams.record().wait()


def test_parallel_batches_that_do_not_fit_are_computed_plainly() -> None:
    with ParallelServing(limits=CaptureLimits(rows=2, memory=2**30, seconds=60)) as serving:
        requests = [request_of(f"r{number}", 5, seed=number, max_tokens=4 * number) for number in range(1, 6)]
        assert serving.run(*requests) == [serving.reference(request) for request in requests]
        assert isinstance(serving.graphs, GraphModel) and serving.graphs.rows == [1, 2]
        assert serving.replays[0] == serving.replays[1] != {}


class SumModel:
    """Its results are sums of zeros over all ranks."""

    spec = SPEC

    def __init__(self, shard: Shard, group: Group) -> None:
        self.device = CPU
        self.tokens = 0
        self._group = group

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        self.tokens = max(self.tokens, batch.size)
        return self._group.sum(torch.zeros((len(batch.wanted_at), self.spec.vocab)))


def connected(*devices: RankDevice) -> ParallelModel:
    """Return ranks that have measured the memory of their passes."""
    cache = KVCache(SPEC, 20, torch.float32, CPU, block_size=4, ranks=len(devices))
    return rank_threads(devices, SumModel, SPEC, cache, context=64, limits=ENGINE)


def test_ranks_measure_their_memory_together() -> None:
    """The fullest device decides. The passes are those of one worker, and all ranks compute them."""
    own, other = RankDevice(), RankDevice()
    own.most, other.most, other.free = 700, 900, 5_000
    model = connected(own, other)
    with contextlib.closing(model.ranks):
        assert model.working == 900
        budget = MemoryBudget(at_start=None, weights=1, free=6_000, gpu=True)
        assert model.budget(budget).free == 5_000
        assert isinstance(model.part, SumModel) and model.part.tokens == 64 + 16  # a prompt, and the others


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_without_memory_for_its_passes_ends_the_start(rank: int) -> None:
    devices = [RankDevice(), RankDevice()]
    devices[rank].failing = torch.OutOfMemoryError("CUDA out of memory.")
    with pytest.raises(SetupError, match=r"more than the free memory .* CUDA out of memory"):
        connected(*devices)


class IdleDevice(RankDevice):
    """Has nothing to do."""

    def start(self) -> None:
        raise AssertionError("rank 0 computes, though a rank has failed")


def test_rank_that_fails_before_rank_0_has_connected_ends_the_start() -> None:
    """Nothing would end an operation that rank 0 begins then: a device waits for its timeout."""
    own, other = IdleDevice(), RankDevice()
    other.failing = torch.OutOfMemoryError("CUDA out of memory.")

    def failure_is_known() -> None:
        for listening in [one for one in threading.enumerate() if one.name == "rank-1"]:
            listening.join()

    own.on_connected = failure_is_known
    with pytest.raises(SetupError, match=r"cannot start: rank 1: .* CUDA out of memory"):
        connected(own, other)


def refusing(after: int) -> RankDevice:
    """Return a device that captures `after` passes only."""
    cuda = RankDevice()
    cuda.failure, cuda.fails_after = RuntimeError("CUDA error: operation not permitted"), after
    return cuda


def filling(*taken: int) -> RankDevice:
    """Return a device of which so many bytes are taken at the beginning and after each capture."""
    amounts = iter(taken)
    return RankDevice(taken=lambda: next(amounts))


@pytest.mark.parametrize(
    ("other", "rows", "message"),
    [
        (refusing(0), [], "Passes of 8 rows and fewer are not captured: rank 1: RuntimeError: CUDA error"),
        (refusing(2), [4, 8], "Passes of 2 rows and fewer are not captured: rank 1: RuntimeError"),
        (filling(0, 70, 40, 45, 50), [1, 2, 4], "Passes of 8 rows need 70"),
    ],
    ids=["none", "two", "memory"],
)
def test_pass_that_one_rank_lacks_is_dropped_by_all(
    other: RankDevice, rows: list[int], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    limits = CaptureLimits(rows=8, memory=50, seconds=60)
    with ParallelServing(other, limits) as serving:
        requests = [request_of(f"r{number}", 5, seed=number, max_tokens=4 * number) for number in range(1, 9)]
        assert serving.run(*requests) == [serving.reference(request) for request in requests]
        assert (serving.graphs.rows if isinstance(serving.graphs, GraphModel) else []) == rows
        own, replays = serving.replays
        assert own == replays
        assert bool(own) == bool(rows)
        assert [len(cuda.alive) for cuda in serving.devices] == [len(rows)] * 2
    assert message in caplog.text


def test_rank_that_ends_at_a_capture_ends_the_start() -> None:
    cuda = RankDevice()
    cuda.failure = RankKilled()
    with pytest.raises(SetupError, match=r"rank 1 \(process 0\) ended with signal 9"):
        ParallelServing(cuda)


def interrupted(cuda: RankDevice, how: Any) -> RankDevice:
    """Call `how` before the fourth replay of a device."""
    replays = itertools.count(1)
    cuda.on_replay = lambda: how() if next(replays) == 4 else None
    return cuda


def die() -> None:
    raise RankKilled


@pytest.mark.parametrize(
    ("ends", "timeout_s", "reason"),
    [
        (True, FOREVER_S, "rank 1 (process 0) ended with signal 9"),
        (False, 3.0, "did not answer within 3 s"),
    ],
    ids=["ends", "hangs"],
)
def test_rank_lost_within_a_replay_ends_the_worker(ends: bool, timeout_s: float, reason: str) -> None:
    cuda = RankDevice()
    interrupted(cuda, die if ends else lambda: cuda.aborted.wait(FOREVER_S))
    with ParallelServing(cuda, timeout_s=timeout_s) as serving:
        request = request_of("r", 5, max_tokens=40)
        serving.submit(request)
        assert serving.ended("r").finish is FinishReason.ERROR
        tokens = serving.so_far("r")
        assert tokens == serving.reference(request)[: len(tokens)]  # none of the aborted pass
        serving.wait(lambda: bool(serving.fatal))
    assert reason in serving.fatal[0]


# --- Parts ---


def test_replay_message_has_the_arrays_of_the_batch() -> None:
    generator = np.random.default_rng(5)
    for rows in range(1, 9):
        starts = generator.integers(0, 200, rows).tolist()
        batch = Batch(
            [
                BatchRow([row] * (1 + row % 3), start, list(range(1 + row, 80)), 1 + row % 3)
                for row, start in enumerate(starts)
            ],
            4,
            CPU,
        )
        for has_states in (False, True):
            message = ReplayPass.of(8, batch, states=has_states, of_head=False)
            values, tables, states = message.arrays()
            assert np.array_equal(values, batch.values) and np.array_equal(tables, batch.token_tables)
            assert (states is not None) is has_states
            assert states is None or np.array_equal(states, batch.token_state_blocks)
        owners = [row for row in range(rows) for _ in range(1 + row % 3)]
        assert np.array_equal(tables, batch.tables[owners])


@pytest.fixture
def late() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_watch_notices_a_wait_beyond_its_limit(late: threading.Event) -> None:
    now = [0.0]
    watch = PassWatch(0.04, late.set, clock=lambda: now[0])
    with watch.limit():
        now[0] += 1
        assert late.wait(FOREVER_S)
    watch.close()


def test_watch_notices_the_longest_of_several_waits(late: threading.Event) -> None:
    now = [0.0]
    watch = PassWatch(0.04, late.set, clock=lambda: now[0])

    def wait_shortly() -> None:
        with watch.limit():
            pass

    with watch.limit():
        now[0] += 1
        other = threading.Thread(target=wait_shortly)
        other.start()
        other.join()
        assert late.wait(FOREVER_S)
    watch.close()


def test_watch_does_not_mind_a_pause_between_passes(late: threading.Event) -> None:
    looks = threading.Semaphore(0)

    def clock() -> float:
        looks.release()
        return 100.0

    watch = PassWatch(0.004, late.set, clock)
    with watch.limit():
        assert looks.acquire(timeout=FOREVER_S) and looks.acquire(timeout=FOREVER_S)
    watch.close()
    assert not late.is_set()
