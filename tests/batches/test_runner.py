"""The runner: every line gets its one result, whatever the service, the router and the clock do meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import pytest

from baton_api.errors import WorkerLost
from baton_batches.retries import GROUPS, LOSSES, TryOutcome
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
    """A router, its ledger and one worker, in memory; what a line is answered stands in the line."""

    def __init__(self, lines: list[InputLine], rng: random.Random, *, busy: float = 0.0) -> None:
        self.lines_left = lines
        self.rng = rng
        self.busy = busy
        self.window = 64
        self.recorded: dict[int, LineResult] = {}
        self.posts = 0
        self.tries: Counter[int] = Counter()
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
        asked = json.loads(body)
        number, kind = asked["number"], asked["kind"]
        assert request_id not in self.names
        self.names.add(request_id)
        now = asyncio.get_running_loop().time()
        if now < self.away_until:
            return LineReply(TryOutcome.AWAY)
        if self.rng.random() < self.busy:
            return LineReply(TryOutcome.BUSY, 503, b"{}", 1.0)
        self.tries[number] += 1
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
                return LineReply(TryOutcome.ANSWERED, 200, GOOD)
            case "bad":
                return LineReply(TryOutcome.ANSWERED, 400, b'{"error": {"param": "temperature"}}')
            case "broken":
                return LineReply(TryOutcome.FAULT, 500, b'{"error": {}}')
            case "shaky":
                if self.tries[number] < 4:
                    return LineReply(TryOutcome.FAULT, 502, b"<html>")
                return LineReply(TryOutcome.ANSWERED, 200, b'{\n "choices": []\n}')
            case "slow":
                return LineReply(TryOutcome.SLOW)
            case "events":
                return LineReply(TryOutcome.ANSWERED, 200, b"data: {}\n\n", events=True)
            case "nonsense":
                return LineReply(TryOutcome.ANSWERED, 200, b"<html>")
            case _:
                assert kind == "poison"
                for other in self.under_way.values():  # they were at the same worker
                    if not other.done():
                        other.set_result(LineReply(TryOutcome.LOST))
                return LineReply(TryOutcome.LOST, 503, b"{}")


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
def test_how_each_kind_of_line_ends(kind: str) -> None:
    router = FakeRouter([line(1, kind), line(2)], random.Random(1))
    found = served(router, 2)
    status, part = KINDS[kind]
    assert found[1].status == status and part in found[1].body.decode()
    assert (found[2].status, found[2].body) == (200, GOOD)


def test_runner_with_a_harmful_line_gives_up_that_line_alone() -> None:
    """Each try of the line loses everything that is under way; 511 lines beside it are answered."""
    router = FakeRouter([line(1, "poison"), *(line(number) for number in range(2, 513))], random.Random(1))
    found = served(router, 512, window=512)
    assert router.tries[1] == LOSSES + len(GROUPS)
    assert router.beside[1] == 0
    assert [number for number, result in found.items() if result.status != 200] == [1]


def test_runner_with_a_harmful_line_isolates_it_in_few_tries() -> None:
    """Suspects are narrowed down by groups: the last tries, one at a time, are for less than a group."""
    router = FakeRouter([line(1, "poison"), *(line(number) for number in range(2, 513))], random.Random(1))
    served(router, 512, window=512)
    assert sum(router.beside[number] == 0 for number in range(1, 513)) <= GROUPS[1]
    assert max(router.tries.values()) == router.tries[1]


def test_runner_holding_only_suspects_goes_on_with_its_input() -> None:
    """Suspects fill all the memory that lines may take; more are fetched once they are through."""
    large = "x" * (HELD_BYTES // 8)
    lines = [line(number, "poison" if number < 10 else "good", text=large) for number in range(1, 30)]
    found = served(FakeRouter(lines, random.Random(1)), 29)
    assert [number for number, result in found.items() if result.status == 200] == list(range(10, 30))
    assert len(found) == 29


def test_the_window_bounds_what_is_under_way() -> None:
    router = FakeRouter([line(number) for number in range(1, 200)], random.Random(1))
    served(router, 199, window=7)
    assert router.widest == 7


def test_it_makes_room_when_the_router_says_so_and_takes_it_back() -> None:
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


def test_a_router_that_is_away_is_waited_for() -> None:
    router = FakeRouter([line(number) for number in range(1, 100)], random.Random(1))
    router.away_until = 3600.0
    assert len(served(router, 99)) == 99
    assert set(router.tries.values()) == {1}


def test_a_service_that_fails_for_everybody_is_waited_for() -> None:
    router = FakeRouter([line(number) for number in range(1, 400)], random.Random(1))
    router.broken_until = 300.0
    found = served(router, 399)
    assert {result.status for result in found.values()} == {200}
    again = sum(router.tries.values()) - 399
    told = sum(router.retried.values())
    assert 0.8 * again < told <= again, "but for those after the last heartbeat"
    assert set(router.retried) == {"fault", "outage"}


def test_a_line_that_fails_alone_is_given_up_soon() -> None:
    router = FakeRouter([line(1, "broken"), *(line(number) for number in range(2, 400))], random.Random(1))
    assert served(router, 399, window=4)[1].status == 500
    assert router.tries[1] <= 6


def test_a_cancelled_batch_keeps_what_is_done_and_starts_no_more() -> None:
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
    assert sum(router.tries.values()) <= len(router.recorded) + 8


def test_who_was_dismissed_stops_at_once() -> None:
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
def test_whatever_happens_every_line_has_the_result_that_is_its_own(seed: int) -> None:
    rng = random.Random(seed)
    weights = [40, 3, 1, 3, 0.3, 1, 0.3, 0.5]
    kinds = rng.choices(list(KINDS), weights, k=rng.randint(1, 400))
    router = FakeRouter(
        [line(number, kind) for number, kind in enumerate(kinds, 1)], rng, busy=rng.choice([0.0, 0.05, 0.3])
    )
    found = served(router, len(kinds), rng.choice([1, 4, 64, 512]))
    assert len(found) == len(kinds)
    for number, kind in enumerate(kinds, 1):
        status, part = KINDS[kind]
        assert found[number].status == status and part in found[number].body.decode(), (number, kind)
