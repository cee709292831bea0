"""
The failure contract, row by row: a real router, and workers in processes of their own that go wrong.

`docs/concepts/failures.md` describes each row. Every row runs with little load and with 70 % of the workers'
capacity, and a client never sees more of it than the row allows.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import pytest_asyncio

from baton_api import headers, metrics
from baton_api.errors import PoisonRequest, WorkerLost
from tests.faults import caller
from tests.faults.caller import CHAT, COMPLETIONS, RESPONSES, End, Outcome
from tests.faults.cluster import TIMEOUT_S, until
from tests.faults.crew import SLOTS, Crew, Mock, open_crew

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LOAD = 0.7
LOADED_CALLS = 80

LONG_ANSWER = 200
"""Tokens of an answer that no worker may finish before its client is gone."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running() -> AsyncIterator[Crew]:
    async with open_crew() as crew:
        yield crew


@pytest_asyncio.fixture(loop_scope="module")
async def crew(running: Crew) -> AsyncIterator[Crew]:
    await running.healthy()
    yield running
    await running.at_rest()


def ends(outcomes: Sequence[Outcome]) -> Counter[End]:
    return Counter(one.end for one in outcomes)


def shown(outcomes: Sequence[Outcome]) -> list[tuple[End, int, str]]:
    """Those that are not complete, for a message."""
    return [(one.end, one.status, one.body[-300:]) for one in outcomes if one.end is not End.COMPLETE]


# Faults of one worker of three. Requests meet some of them repeatedly until the worker is ejected.
FAULTS: dict[str, dict[str, Any]] = {
    "refuses connections": {"name": "refuse"},
    "closes at once": {"name": "reset"},
    "closes in the head": {"name": "reset_in_head"},
    "answers with no HTTP": {"name": "malformed"},
    "says 500": {"name": "status", "status": 500},
    "says 502": {"name": "status", "status": 502},
    "says 503": {"name": "status", "status": 503},
    "says 429": {"name": "status", "status": 429},
    "hangs before the head": {"name": "hang"},
    "hangs after the head": {"name": "hang_after_head"},
    "breaks off in the stream": {"name": "die", "after": 5},
    "ends as a process in the stream": {"name": "exit", "after": 5},
    "breaks off in half a line": {"name": "half_line", "after": 5},
    "stands still in the stream": {"name": "hang_in_stream", "after": 5},
    "ends its stream without the end": {"name": "no_done", "after": 5},
    "fails in the stream and says so": {"name": "fail_in_stream", "after": 5},
    "falls silent altogether": {"name": "silent"},
    "is slow": {"name": "", "step_s": 0.03},
    "has lost its cache": {"name": "drop_kv"},
    "is draining": {"name": "drain"},
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
async def test_failure_one_bad_worker_is_invisible_at_low_load(crew: Crew, fault: dict[str, Any]) -> None:
    bad = crew.decodes[0]
    await bad.become(**fault)
    outcomes = await crew.calls(24)
    outcomes += await calls_until_met(crew, bad)
    assert ends(outcomes) == {End.COMPLETE: len(outcomes)}, shown(outcomes)


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
async def test_failure_one_bad_worker_is_invisible_under_load(crew: Crew, fault: dict[str, Any]) -> None:
    bad = crew.decodes[0]
    clients = int(LOAD * SLOTS * len(crew.decodes))
    calling = asyncio.create_task(crew.calls(LOADED_CALLS, clients))
    await until(lambda: _begun(crew), "requests run")
    await bad.become(**fault)
    outcomes = await calling
    outcomes += await calls_until_met(crew, bad)
    assert ends(outcomes) == {End.COMPLETE: len(outcomes)}, shown(outcomes)


async def calls_until_met(crew: Crew, bad: Mock) -> list[Outcome]:
    """Further calls, if the worker was so late to go wrong that the others had answered all requests."""
    outcomes: list[Outcome] = []
    async with asyncio.timeout(TIMEOUT_S):
        while not await met(crew, bad):
            outcomes += await crew.calls(8)
    return outcomes


async def met(crew: Crew, bad: Mock) -> bool:
    """Whether requests met its fault, or the router saw the fault before any request did."""
    if not bad.runs or (await bad.counts()).met:
        return True
    row = (await crew.workers())[bad.name]
    return bool(row["consecutive_failures"]) or row["state"] != "ready"


async def _begun(crew: Crew) -> bool:
    return (await crew.decodes[0].counts()).running > 0


BREAKS = {
    "breaks off": {"name": "die", "after": 4},
    "breaks off in half a line": {"name": "half_line", "after": 4},
    "ends without the end": {"name": "no_done", "after": 4},
    "falls silent": {"name": "freeze", "after": 4},
}
UNRESUMED: dict[str, dict[str, Any]] = {
    "two choices at once": {"choices": 2},
    "a response": {"path": RESPONSES},
}


@pytest.mark.parametrize("fields", UNRESUMED.values(), ids=UNRESUMED.keys())
@pytest.mark.parametrize("fault", BREAKS.values(), ids=BREAKS.keys())
async def test_failure_unresumable_answer_ends_with_an_error(
    crew: Crew, fault: dict[str, Any], fields: dict[str, Any]
) -> None:
    await crew.all_become(**fault)
    outcomes = await crew.calls(3, **fields)
    assert ends(outcomes) == {End.ERROR: 3}, shown(outcomes)
    for outcome in outcomes:
        error = json.loads(outcome.body.rpartition("data: ")[2])["error"]
        assert (error["code"], error["retryable"]) == (WorkerLost.code, True)


async def test_failure_stream_broken_by_every_worker_ends_with_error(crew: Crew) -> None:
    await crew.all_become("die", after=4)
    (outcome,) = await crew.calls(1, tokens=100)
    assert outcome.end is End.ERROR
    assert (outcome.error["code"], outcome.error["retryable"]) == (PoisonRequest.code, False)
    assert not any([(await mock.counts()).wrong for mock in crew.decodes])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_failure_broken_stream_resumes_with_the_next_word(crew: Crew, path: str) -> None:
    await crew.decodes[0].become("die", after=6)
    await crew.decodes[1].become("half_line", after=3)
    outcomes = await crew.calls(16, path=path, tokens=40)
    assert ends(outcomes) == {End.COMPLETE: 16}, shown(outcomes)
    assert any(one.resumed for one in outcomes)
    assert not any([(await mock.counts()).wrong for mock in crew.decodes])


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_failure_client_error_is_passed_on_without_retry(crew: Crew, status: int) -> None:
    before = [(await mock.counts()).requests for mock in crew.decodes]
    await crew.all_become("status", status=status)
    outcomes = await crew.calls(8)
    assert [one.status for one in outcomes] == [status] * 8
    assert all(one.error["code"] == "told" for one in outcomes)
    requests = [(await mock.counts()).requests for mock in crew.decodes]
    assert sum(requests) - sum(before) == 8
    assert all(row["state"] == "ready" for row in (await crew.workers()).values())


async def test_failure_without_decode_workers_is_a_503_with_a_retry(crew: Crew) -> None:
    await crew.all_become("refuse")
    outcomes = await crew.calls(4)
    assert [(one.end, one.status) for one in outcomes] == [(End.REFUSED, 503)] * 4
    assert all(1 <= int(one.headers["retry-after"]) <= 120 for one in outcomes)
    await crew.all_become()
    outcomes = await crew.calls(4)  # at once: when all are bad, none is ejected
    assert ends(outcomes) == {End.COMPLETE: 4}, shown(outcomes)


async def test_failure_recovered_worker_gets_one_probe_then_its_share(crew: Crew) -> None:
    bad = crew.decodes[0]
    async with asyncio.timeout(TIMEOUT_S):
        while not await _stays_ejected(crew, bad):
            pass
    await until(lambda: _is(crew, bad, "half_open"), "its pause is over")

    async def back() -> bool:
        await crew.calls(4)
        return await crew.state(bad) == "ready"

    await until(back, "a request showed that it is well")


async def _stays_ejected(crew: Crew, bad: Mock) -> bool:
    """Whether a pause of its ejection was long enough for some calls; none of them goes there."""
    await bad.become("status", status=500)
    while await crew.state(bad) != "ejected":
        assert ends(await crew.calls(8)) == {End.COMPLETE: 8}
    before = (await bad.become()).requests
    assert ends(await crew.calls(8)) == {End.COMPLETE: 8}
    after = (await bad.counts()).requests
    if await crew.state(bad) != "ejected":
        return False  # the next pause is longer
    assert after == before, "nothing goes there meanwhile"
    return True


async def _is(crew: Crew, mock: Mock, state: str) -> bool:
    return await crew.state(mock) == state


PREFILL_FAULTS = {
    "nobody is at its address": ("unreachable", True),
    "it breaks off": ("lost", True),
    "it fails": ("failed", True),
    "it has no room": ("busy", False),
}


@pytest.mark.parametrize(("fallback", "ejected"), PREFILL_FAULTS.values(), ids=PREFILL_FAULTS.keys())
async def test_failure_failing_prefill_worker_is_ejected_full_one_kept(
    crew: Crew, fallback: str, ejected: bool
) -> None:
    """The decode workers say so: they ask it, and compute the prompt themselves where it does not."""
    bad = crew.prefills[0]
    await crew.all_become(fallback=fallback, fallback_of=bad.name)
    outcomes = await crew.calls(32)
    async with asyncio.timeout(TIMEOUT_S):  # its pause may be over before it is seen
        while ejected and await crew.state(bad) != "ejected":
            outcomes += await crew.calls(8)
    assert ends(outcomes) == {End.COMPLETE: len(outcomes)}, shown(outcomes)
    assert (await crew.state(bad) == "ejected") == ejected
    assert await crew.state(crew.prefills[1]) == "ready"


async def test_failure_pair_without_transfer_is_avoided_for_a_while(crew: Crew) -> None:
    source, target = crew.prefills[0], crew.decodes[0]
    await target.become(fallback="transport", fallback_of=source.name, forget=True)
    while source.name not in (await target.counts()).computed:
        await crew.calls(8)
    counts = await target.become(fallback="transport", fallback_of=source.name, forget=True)
    assert not counts.computed
    assert ends(await crew.calls(48)) == {End.COMPLETE: 48}
    assert source.name not in (await target.counts()).computed
    assert crew.prefills[1].name in (await target.counts()).computed, "with others it is a pair"
    assert source.name in (await crew.decodes[1].counts()).computed
    assert all(row["state"] == "ready" for row in (await crew.workers()).values())


async def test_failure_without_prefill_workers_decode_computes_prompts(crew: Crew) -> None:
    for mock in crew.prefills:
        await mock.become("refuse")
    await until(lambda: _is(crew, crew.prefills[0], "down"), "the router misses the prefill workers")
    await until(lambda: _is(crew, crew.prefills[1], "down"), "the router misses the prefill workers")
    await crew.all_become(forget=True)
    assert ends(await crew.calls(8)) == {End.COMPLETE: 8}
    assert not any([(await mock.counts()).computed for mock in crew.decodes])


async def test_failure_restarted_worker_has_no_known_cache(crew: Crew) -> None:
    spec = crew.spec(path=COMPLETIONS)
    first = await crew.call(spec)
    again = await crew.call(spec)
    assert _cached(again) > 0
    for mock in crew.all:
        await mock.kill()
    await crew.healthy()
    anew = await crew.call(spec)
    assert [one.end for one in (first, again, anew)] == [End.COMPLETE] * 3
    assert _cached(anew) == 0


def _cached(outcome: Outcome) -> int:
    """Of the prompt, as the router believed when it decided."""
    decision = dict(part.split("=") for part in outcome.headers[headers.DECISION].split(";"))
    return int(decision["cached"])


MOMENTS: dict[str, dict[str, Any]] = {
    "before the head": {"name": "hang"},
    "after the head": {"name": "hang_after_head"},
    "in the stream": {"name": "", "step_s": 0.2},
    "in a whole answer": {"name": "", "step_s": 0.2, "stream": False},
    "while it stands still": {"name": "hang_in_stream", "after": 2},
}


@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS.keys())
async def test_failure_disconnect_aborts_the_request_at_once(crew: Crew, moment: dict[str, Any]) -> None:
    fault = dict(moment)
    spec = crew.spec(stream=fault.pop("stream", True), tokens=LONG_ANSWER)
    await crew.all_become(**fault)
    before = [await mock.counts() for mock in crew.decodes]
    _, writer = await asyncio.open_connection("127.0.0.1", crew.router.port)
    writer.write(caller.head(spec, len(spec.body)) + spec.body)

    async def running() -> bool:
        return any([(await mock.counts()).running for mock in crew.decodes])

    await until(running, "a worker has the request")
    writer.transport.abort()
    await crew.at_rest()

    async def all_left() -> bool:
        """The router may have tried a second worker before the client left."""
        after = [await mock.counts() for mock in crew.decodes]
        begun = sum(one.requests for one in after) - sum(one.requests for one in before)
        return begun == sum(one.left for one in after) - sum(one.left for one in before) > 0

    await until(all_left, "the router left every worker that had the request")


async def test_failure_disconnect_before_the_body_is_forgotten(crew: Crew) -> None:
    spec = crew.spec()
    requests = [(await mock.counts()).requests for mock in crew.decodes]
    _, writer = await asyncio.open_connection("127.0.0.1", crew.router.port)
    writer.write(caller.head(spec, len(spec.body) + 100) + spec.body)
    await until(lambda: _in_flight(crew, 1), "the request has begun")
    writer.transport.abort()
    await until(lambda: _in_flight(crew, 0), "the request is forgotten")
    assert [(await mock.counts()).requests for mock in crew.decodes] == requests


async def _in_flight(crew: Crew, count: int) -> bool:
    return (await crew.router.metrics())[metrics.ROUTER_IN_FLIGHT.name] == count


async def test_failure_hundred_disconnects_leak_nothing(crew: Crew) -> None:
    async def leave(number: int) -> None:
        spec = crew.spec(stream=number % 3 != 0)
        _, writer = await asyncio.open_connection("127.0.0.1", crew.router.port)
        writer.write(caller.head(spec, len(spec.body)) + spec.body)
        await asyncio.sleep(0.15 * (number % 17) / 17)
        writer.transport.abort()

    await asyncio.gather(*(leave(number) for number in range(100)))
    await crew.at_rest()
    for mock in crew.decodes:
        load = (await crew.http.get(f"{mock.url}/load")).raise_for_status().json()
        assert load["free_blocks"] == load["total_blocks"]
