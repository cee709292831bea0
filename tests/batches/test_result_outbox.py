"""The queue of results: groups that grow while a post is under way, and nothing lost or posted twice."""

from __future__ import annotations

import asyncio

from baton_batches.result_outbox import GROUP_BYTES, GROUP_RESULTS, POST_RESULTS, ResultOutbox
from baton_batches.values import LineResult
from baton_batches.wire import ResultReceipt, RunnerOrder
from tests.batches import virtual_time

POST_S = 0.1


def result(line: int, size: int = 2) -> LineResult:
    return LineResult(line, 200, b" " * size)


def posted(arrivals: list[tuple[float, list[LineResult]]]) -> list[list[int]]:
    """The groups that are posted when results arrive in bursts after pauses of so many seconds."""
    groups: list[list[int]] = []

    async def post(results: list[LineResult]) -> ResultReceipt:
        await asyncio.sleep(POST_S)
        groups.append([one.line for one in results])
        return ResultReceipt(len(results), RunnerOrder.GO_ON, 64)

    async def work() -> None:
        outbox = ResultOutbox(post)
        running = asyncio.create_task(outbox.run(lambda receipt: None))
        for pause, results in arrivals:
            await asyncio.sleep(pause)
            for one in results:
                outbox.put(one)
        await outbox.emptied()
        running.cancel()

    virtual_time.run(work())
    assert [line for group in groups for line in group] == [one.line for _, rest in arrivals for one in rest]
    return groups


def test_group_takes_what_arrived_during_a_post() -> None:
    first, rest = range(1, GROUP_RESULTS + 1), range(GROUP_RESULTS + 1, 3 * GROUP_RESULTS)
    groups = posted([(0, [result(line) for line in first]), (POST_S / 2, [result(line) for line in rest])])
    assert groups == [list(first), list(rest)]


def test_group_is_bounded_by_results_and_by_bytes() -> None:
    groups = posted([(0, [result(line) for line in range(2 * POST_RESULTS + 1)])])
    assert [len(group) for group in groups] == [POST_RESULTS, POST_RESULTS, 1]
    groups = posted([(0, [result(line, GROUP_BYTES // 2) for line in range(3)])])
    assert [len(group) for group in groups] == [2, 1]
