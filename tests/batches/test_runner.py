"""The runner: every line gets its one result, whatever the service, the router and the clock do meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import pytest

from baton_api.errors import WorkerLost
from baton_batches.retries import GROUPS, LOSSES, AttemptOutcome
from baton_batches.runner import HELD_BYTES, BatchRunner
from baton_batches.runner_gateway import LeaseLost, LineReply, RunnerGateway
from baton_batches.values import LineResult
from baton_batches.wire import (
    SLICE_BYTES,
    InputLine,
    InputSlice,
    LeaseRenewal,
    ResultReceipt,
    RunnerLease,
    RunnerOrder,
    RunnerProgress,
)
from tests.batches import virtual_time

GOOD = b'{"choices": []}'


def lease(total: int, window: int = 64) -> RunnerLease:
    return RunnerLease(1, "t", 30, "/v1/chat/completions", total, done=0, window=window, line_s=600)


def line(number: int, kind: str = "good", **body: object) -> InputLine:
    text = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/chat/completions"}
    return InputLine(number, json.dumps({**text, "body": {"kind": kind, "number": number, **body}}).encode())


class FakeRouter(RunnerGateway):
    """A router, its ledger and one worker, in memory. A line contains its own answer."""

    def __init__(self, lines: list[InputLine], rng: random.Random, *, busy: float = 0.0) -> None:
        self.lines_left = lines
        self.rng = rng
        self.busy = busy
        self.window = 64
        self.recorded: dict[int, LineResult] = {}
        self.posts = 0
        self.attempts: Counter[int] = Counter()
        self.names: set[str] = set()
        self.retried: Counter[str] = Counter()
        self.under_way: dict[int, asyncio.Future[LineReply]] = {}
        self.widest = 0
        self.beside: Counter[int] = Counter()
        """For each line, how many others were under way at its last try."""
        self.away_until = 0.0
        self.broken_until = 0.0
        self.order = RunnerOrder.GO_ON
        self.taken = False

    async def renew(self, progress: RunnerProgress) -> LeaseRenewal:
        self.retried.update(progress.retries)
        if self.taken:
            raise LeaseLost
        return LeaseRenewal("t", self.order, self.window)

    async def lines(self, cursor: str) -> InputSlice:
        await asyncio.sleep(0.01)
        start = int(cursor or 0)
        end = start + self.rng.randint(1, 40)
        while sum(len(one.text) for one in self.lines_left[start + 1 : end]) > SLICE_BYTES:
            end -= 1
        return InputSlice(self.lines_left[start:end], str(end), end >= len(self.lines_left))

    async def record(self, results: list[LineResult]) -> ResultReceipt:
        await asyncio.sleep(self.rng.uniform(0, 0.3))
        if self.taken:
            raise LeaseLost
        self.posts += 1
        new = [one for one in results if one.line not in self.recorded]
        assert len(new) == len(results), "a line was answered twice"
        self.recorded.update({one.line: one for one in new})
        return ResultReceipt(len(new), self.order, self.window)

    async def send(self, path: str, body: bytes, request_id: str, seconds: float) -> LineReply:
        request = json.loads(body)
        number, kind = request["number"], request["kind"]
        assert request_id not in self.names
        self.names.add(request_id)
        now = asyncio.get_running_loop().time()
        if now < self.away_until:
            return LineReply(AttemptOutcome.AWAY)
        if self.rng.random() < self.busy:
            return LineReply(AttemptOutcome.BUSY, 503, b"{}", 1.0)
        self.attempts[number] += 1
        lost: asyncio.Future[LineReply] = asyncio.get_running_loop().create_future()
        self.under_way[number] = lost
        self.widest = max(self.widest, len(self.under_way))
        for one in self.under_way:
            self.beside[one] = max(len(self.under_way) - 1, self.beside[one] if one != number else 0)
        try:
            async with asyncio.timeout(self.rng.uniform(0.05, 2.0)):
                return await lost
        except TimeoutError:
            pass
        finally:
            del self.under_way[number]
        return self.answer(number, "broken" if now < self.broken_until else kind)

    def answer(self, number: int, kind: str) -> LineReply:
        match kind:
            case "good":
                return LineReply(AttemptOutcome.ANSWERED, 200, GOOD)
            case "bad":
                return LineReply(AttemptOutcome.ANSWERED, 400, b'{"error": {"param": "temperature"}}')
            case "broken":
                return LineReply(AttemptOutcome.FAULT, 500, b'{"error": {}}')
            case "shaky":
                if self.attempts[number] < 4:
                    return LineReply(AttemptOutcome.FAULT, 502, b"<html>")
                return LineReply(AttemptOutcome.ANSWERED, 200, b'{\n "choices": []\n}')
            case "slow":
                return LineReply(AttemptOutcome.SLOW)
            case "events":
                return LineReply(AttemptOutcome.ANSWERED, 200, b"data: {}\n\n", events=True)
            case "nonsense":
                return LineReply(AttemptOutcome.ANSWERED, 200, b"<html>")
            case _:
                assert kind == "poison"
                for other in self.under_way.values():  # they were at the same worker
                    if not other.done():
                        other.set_result(LineReply(AttemptOutcome.LOST))
                return LineReply(AttemptOutcome.LOST, 503, b"{}")


def served(router: FakeRouter, total: int, window: int = 64) -> dict[int, LineResult]:
    async def work() -> None:
        router.window = window
        async with asyncio.timeout(100_000):
            await BatchRunner("batch_1", router, lease(total, window), router.rng).run()

    virtual_time.run(work())
    return router.recorded


KINDS = {
    "good": (200, GOOD.decode()),
    "bad": (400, '{"error": {"param": "temperature"}}'),
    "broken": (500, '{"error": {}}'),
    "shaky": (200, '{"choices":[]}'),
    "slow": (0, "request_timeout"),
    "events": (400, '"param":"stream"'),
    "nonsense": (0, "server_error"),
    "poison": (0, WorkerLost.code),
}


@pytest.mark.parametrize("kind", KINDS)
def test_line_kinds_end_as_expected(kind: str) -> None:
    router = FakeRouter([line(1, kind), line(2)], random.Random(1))
    by_line = served(router, 2)
    status, part = KINDS[kind]
    assert by_line[1].status == status and part in by_line[1].body.decode()
    assert (by_line[2].status, by_line[2].body) == (200, GOOD)


def test_runner_with_a_harmful_line_gives_up_only_that_line() -> None:
    """Each try of the line loses everything that is under way; 511 lines beside it are answered."""
    router = FakeRouter([line(1, "poison"), *(line(number) for number in range(2, 513))], random.Random(1))
    by_line = served(router, 512, window=512)
    assert router.attempts[1] == LOSSES + len(GROUPS)
    assert router.beside[1] == 0
    assert [number for number, result in by_line.items() if result.status != 200] == [1]


def test_runner_with_a_harmful_line_isolates_it_in_few_tries() -> None:
    """Suspects are narrowed down by groups: the last attempts, one at a time, are for less than a group."""
    router = FakeRouter([line(1, "poison"), *(line(number) for number in range(2, 513))], random.Random(1))
    served(router, 512, window=512)
    assert sum(router.beside[number] == 0 for number in range(1, 513)) <= GROUPS[1]
    assert max(router.attempts.values()) == router.attempts[1]


def test_runner_with_only_suspects_reads_further_input() -> None:
    """Suspects fill all the memory that lines may take; more are fetched once they are through."""
    large = "x" * (HELD_BYTES // 8)
    lines = [line(number, "poison" if number < 10 else "good", text=large) for number in range(1, 30)]
    by_line = served(FakeRouter(lines, random.Random(1)), 29)
    assert [number for number, result in by_line.items() if result.status == 200] == list(range(10, 30))
    assert len(by_line) == 29


def test_window_bounds_the_lines_in_flight() -> None:
    router = FakeRouter([line(number) for number in range(1, 200)], random.Random(1))
    served(router, 199, window=7)
    assert router.widest == 7


def test_runner_follows_the_window_of_the_router() -> None:
    router = FakeRouter([line(number) for number in range(1, 4001)], random.Random(1))
    widest = []

    async def work() -> None:
        running = asyncio.create_task(BatchRunner("batch_1", router, lease(4000, 64), router.rng).run())
        for window in (64, 4, 64):
            router.window = window
            await asyncio.sleep(5)
            router.widest = 0
            await asyncio.sleep(15)
            widest.append(router.widest)
        router.order = RunnerOrder.STOP
        await running

    virtual_time.run(work())
    assert widest[1] == 4 and widest[0] > 16 and widest[2] > 8


def test_results_are_posted_in_groups() -> None:
    router = FakeRouter([line(number) for number in range(1, 2001)], random.Random(1))
    served(router, 2000, window=512)
    assert router.posts < 200


def test_unreachable_router_is_awaited() -> None:
    router = FakeRouter([line(number) for number in range(1, 100)], random.Random(1))
    router.away_until = 3600.0
    assert len(served(router, 99)) == 99
    assert set(router.attempts.values()) == {1}


def test_failing_service_is_awaited() -> None:
    router = FakeRouter([line(number) for number in range(1, 400)], random.Random(1))
    router.broken_until = 300.0
    by_line = served(router, 399)
    assert {result.status for result in by_line.values()} == {200}
    again = sum(router.attempts.values()) - 399
    reported = sum(router.retried.values())
    assert 0.8 * again < reported <= again, "but for those after the last heartbeat"
    assert set(router.retried) == {"fault", "outage"}


def test_failing_line_is_given_up_soon() -> None:
    router = FakeRouter([line(1, "broken"), *(line(number) for number in range(2, 400))], random.Random(1))
    assert served(router, 399, window=4)[1].status == 500
    assert router.attempts[1] <= 6


def test_cancelled_batch_keeps_results_and_starts_no_lines() -> None:
    router = FakeRouter([line(number) for number in range(1, 1000)], random.Random(1))

    router.window = 8

    async def work() -> None:
        running = asyncio.create_task(BatchRunner("batch_1", router, lease(999, 8), router.rng).run())
        await asyncio.sleep(20)
        router.order = RunnerOrder.STOP
        await running

    virtual_time.run(work())
    assert 50 < len(router.recorded) < 300
    assert not router.under_way
    assert sum(router.attempts.values()) <= len(router.recorded) + 8


def test_dismissed_runner_stops_at_once() -> None:
    router = FakeRouter([line(number) for number in range(1, 1000)], random.Random(1))

    router.window = 8

    async def work() -> None:
        running = asyncio.create_task(BatchRunner("batch_1", router, lease(999, 8), router.rng).run())
        await asyncio.sleep(20)
        router.taken = True
        await running

    with pytest.raises(LeaseLost):
        virtual_time.run(work())
    assert not router.under_way


@pytest.mark.parametrize("seed", range(12))
def test_law_every_line_gets_its_own_result(seed: int) -> None:
    rng = random.Random(seed)
    weights = [40, 3, 1, 3, 0.3, 1, 0.3, 0.5]
    kinds = rng.choices(list(KINDS), weights, k=rng.randint(1, 400))
    router = FakeRouter(
        [line(number, kind) for number, kind in enumerate(kinds, 1)], rng, busy=rng.choice([0.0, 0.05, 0.3])
    )
    by_line = served(router, len(kinds), rng.choice([1, 4, 64, 512]))
    assert len(by_line) == len(kinds)
    for number, kind in enumerate(kinds, 1):
        status, part = KINDS[kind]
        assert by_line[number].status == status and part in by_line[number].body.decode(), (number, kind)
