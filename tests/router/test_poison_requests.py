"""Requests that workers are lost with: how many workers one may cost, and who is recognized."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial

import httpx
import pytest

from baton_api import headers, metrics
from baton_api.errors import PoisonRequest, WorkerLost
from baton_api.stream_comments import Beginning, begin_line, tokens_line
from baton_api.workers import Role
from baton_router.proxy.timeouts import RESERVE
from baton_router.scheduling.outcome_attribution import (
    BACKGROUND_LOSSES_LIMIT,
    LOSSES_LIMIT,
    REMEMBERED_LIMIT,
    REMEMBERED_S,
    CrashHistory,
    Key,
)
from baton_router.workers.worker_list import usable
from tests.router import fake_worker
from tests.router.engines.fake_sglang import FakeSglang, Sessions
from tests.router.engines.fake_vllm import FakeVllm
from tests.router.engines.test_vllm import CHAT as CHAT_BODY
from tests.router.engines.test_vllm import PAIRS_ALWAYS
from tests.router.fake_worker import FakeWorker, WorkerRequest
from tests.router.running import CHAT, QUESTION, STREAM, anew, running_router, until

KEY = ("alice", 7)


def rejected(crashes: CrashHistory, key: Key = KEY, now: float = 0.0, *, background: bool = False) -> bool:
    try:
        crashes.check(key, now, background=background)
    except PoisonRequest:
        return True
    return False


LOSSES: dict[str, tuple[Sequence[tuple[str, str]], bool]] = {
    "none": ([], False),
    "one worker": ([("a", "1")], False),
    "two workers": ([("a", "1"), ("b", "1")], True),
    "the same request sent many times to one worker": ([("a", "1")] * 50, False),
    "one worker before and after its restart": ([("a", "1"), ("a", "2")], True),
}


@pytest.mark.parametrize(("losses", "expected"), LOSSES.values(), ids=LOSSES.keys())
def test_crashes_of_two_workers_reject_the_request(losses: Sequence[tuple[str, str]], expected: bool) -> None:
    crashes = CrashHistory()
    for worker, epoch in losses:
        crashes.lost(KEY, worker, epoch, 0.0)
    assert rejected(crashes) is expected
    assert not rejected(crashes, ("bob", 7)), "another tenant with the same body"
    assert not rejected(crashes, ("alice", 8)), "another body of the tenant"


def test_crashes_of_a_batch_line_are_left_to_its_runner() -> None:
    crashes = CrashHistory()
    for number in range(BACKGROUND_LOSSES_LIMIT):
        assert not rejected(crashes, background=True)
        crashes.lost(KEY, f"w{number}", "1", 0.0)
    assert rejected(crashes, background=True)


def test_crashes_are_forgotten_after_an_answer_and_with_time() -> None:
    crashes = CrashHistory()
    for worker in "ab":
        crashes.lost(KEY, worker, "1", 100.0)
    assert rejected(crashes, now=100.0 + REMEMBERED_S - 1)
    assert not rejected(crashes, now=100.0 + REMEMBERED_S)
    assert not crashes
    for worker in "ab":
        crashes.lost(KEY, worker, "1", 800.0)
    crashes.answered(KEY)
    assert not rejected(crashes, now=800.0)


def test_crashes_without_a_digest_are_not_remembered() -> None:
    crashes = CrashHistory()
    for worker in "ab":
        crashes.lost(("alice", 0), worker, "1", 0.0)
    assert not crashes


@pytest.mark.parametrize("seed", range(10))
def test_law_crash_history_is_bounded_and_equals_its_model(seed: int) -> None:
    """Against a plain list of all losses; the oldest are dropped at the limit."""
    rng = random.Random(seed)
    crashes, plain, now = CrashHistory(), dict[Key, tuple[float, set[str]]](), 0.0
    for _ in range(4000):
        now += rng.expovariate(1 / 2)
        key = (rng.choice("xy"), rng.randrange(1, 60))
        for old in [one for one, (last, _) in plain.items() if now - last >= REMEMBERED_S]:
            del plain[old]
        if rng.random() < 0.1:
            crashes.answered(key)
            plain.pop(key, None)
        elif rng.random() < 0.5:
            worker = f"w{rng.randrange(4)}"
            crashes.lost(key, worker, "1", now)
            plain[key] = now, plain.get(key, (now, set()))[1] | {worker}
        else:
            expected = len(plain[key][1]) >= LOSSES_LIMIT if key in plain else False
            assert rejected(crashes, key, now=now) is expected
    rejected(crashes, now=now)
    for number in range(2 * REMEMBERED_LIMIT):
        crashes.lost(("z", number + 1), "w", "1", now)
    assert len(crashes) == REMEMBERED_LIMIT
    assert not rejected(crashes, ("x", 1), now=now)


@pytest.mark.parametrize("body", [QUESTION, STREAM], ids=["whole", "stream"])
async def test_poison_request_costs_at_most_two_workers(body: object) -> None:
    """A client that sends it again gets the same answer, and no worker more dies of it."""
    async with (
        FakeWorker(fake_worker.crash) as one,
        FakeWorker(fake_worker.crash) as two,
        FakeWorker(fake_worker.crash) as three,
        FakeWorker(fake_worker.crash) as four,
        running_router([one, two, three, four], health_interval_s=600) as router,
    ):
        for _ in range(4):
            answer = await router.post(body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, PoisonRequest.code)
            assert answer.headers[headers.SHOULD_RETRY] == "false"
            assert "retry-after" not in answer.headers
        assert sum(len(worker.requests) for worker in (one, two, three, four)) == 2
        assert router.metric(metrics.ROUTER_REJECTS.name, reason="poison") == 4


async def test_stream_that_kills_three_workers_is_not_sent_again() -> None:
    """It resumes on a second and a third worker, and then ends with an error that forbids retries."""
    begun = begin_line(Beginning("chatcmpl-1", 1700000000, 42, 16))
    part = fake_worker.event("The") + tokens_line([5], ended=False)
    workers = [FakeWorker(fake_worker.streaming(begun, part, end=False)) for _ in range(4)]
    for worker in workers:
        worker.release.set()
    async with (
        workers[0],
        workers[1],
        workers[2],
        workers[3],
        running_router(workers) as router,
    ):
        seen = b""
        with pytest.raises(httpx.RemoteProtocolError):
            async with router.client.stream("POST", CHAT, json=STREAM) as answer:
                async for piece in answer.aiter_raw():
                    seen += piece
        error = json.loads(seen.rpartition(b"data: ")[2])["error"]
        assert (error["code"], error["retryable"]) == (PoisonRequest.code, False)
        again = await router.post(STREAM)
        assert (again.status_code, again.json()["error"]["code"]) == (500, PoisonRequest.code)
        assert sum(len(worker.requests) for worker in workers) == 3


async def test_worker_crash_fails_none_of_its_other_requests() -> None:
    """More requests than the retry budget: a crash costs one retry, and all continue elsewhere."""
    async with (
        FakeWorker(fake_worker.hang) as dying,
        FakeWorker() as good,
        running_router([dying, good], prefill_tokens=10**9, health_interval_s=600) as router,
    ):
        asking = [asyncio.create_task(router.post(anew(QUESTION))) for _ in range(100)]
        await until(lambda: len(dying.requests) > 2 * RESERVE)
        await dying.die()
        assert {answer.status_code for answer in await asyncio.gather(*asking)} == {200}


async def test_requests_that_kill_workers_cannot_exceed_the_budget() -> None:
    """Each of them is another, so none is recognized; without a retry left each kills one worker only."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeWorker(fake_worker.crash)) for _ in range(10)]
        routing = running_router(workers, retry_ratio=0, health_interval_s=600)
        router = await stack.enter_async_context(routing)
        for _ in range(3):
            answer = await router.post(anew(QUESTION))
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, WorkerLost.code)
        assert 1 <= sum(len(worker.requests) for worker in workers) <= 3


async def test_prompt_that_kills_sglang_prefill_workers_costs_two() -> None:
    """The decode workers of these pairs wait for a prompt that never comes, and live."""
    sessions = Sessions()
    async with AsyncExitStack() as stack:
        prefills = [await stack.enter_async_context(FakeSglang(sessions, mode="prefill")) for _ in range(4)]
        decodes = [await stack.enter_async_context(FakeSglang(sessions, mode="decode")) for _ in range(2)]
        for one in prefills:
            one.crashes = True
        routing = running_router(decodes, prefills, health_interval_s=600)
        router = await stack.enter_async_context(routing)
        for _ in range(3):
            answer = await router.post(CHAT_BODY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, PoisonRequest.code)
            assert answer.headers[headers.SHOULD_RETRY] == "false"
        assert sum(len(one.bodies) for one in prefills) == LOSSES_LIMIT


async def test_sglang_prefill_workers_that_fail_are_not_taken_for_killed() -> None:
    sessions = Sessions()
    async with (
        FakeSglang(sessions, mode="prefill") as one,
        FakeSglang(sessions, mode="prefill") as two,
        FakeSglang(sessions, mode="decode") as decode,
        running_router([decode], [one, two], health_interval_s=600, retries=1) as router,
    ):
        one.fail_with = two.fail_with = 500
        answer = await router.post(CHAT_BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, WorkerLost.code)


async def test_prompt_that_kills_a_vllm_pair_costs_two_workers() -> None:
    """The decode worker computes the prompt when its prefill worker is lost, and dies of it, too."""
    blocks: dict[str, list[int]] = {}
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(FakeVllm(blocks)) for _ in range(6)]
        for one in workers:
            one.crashes = True
        routing = running_router(workers[:3], workers[3:], health_interval_s=600, **PAIRS_ALWAYS)
        router = await stack.enter_async_context(routing)
        for _ in range(3):
            answer = await router.post(CHAT_BODY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, PoisonRequest.code)
        assert sum(len(one.bodies) for one in workers[:3]) == 1
        assert sum(len(one.bodies) for one in workers[3:]) == 1


async def test_prompt_that_kills_a_baton_pair_costs_two_workers() -> None:
    """Its decode worker dies before it can report that the prefill worker had died."""
    async with AsyncExitStack() as stack:
        prefills: dict[str, FakeWorker] = {}

        async def kill_both(worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter) -> None:
            await prefills[request.header(headers.PREFILL) or ""].die()
            await fake_worker.crash(worker, request, writer)

        for number in range(3):
            one = FakeWorker(role=Role.PREFILL, control=f"127.0.0.1:{number + 1}")
            prefills[one.load.control] = await stack.enter_async_context(one)
        decodes = [await stack.enter_async_context(FakeWorker(kill_both)) for _ in range(3)]
        routing = running_router(decodes, list(prefills.values()), health_interval_s=600, **PAIRS_ALWAYS)
        router = await stack.enter_async_context(routing)
        for _ in range(3):
            answer = await router.post(QUESTION)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, PoisonRequest.code)
        assert sum(len(one.requests) for one in decodes) == 1


async def test_prefill_worker_and_stream_lost_reject_the_request() -> None:
    """The decode worker reported the lost prefill worker, began to answer, and was lost, too."""
    blocks: dict[str, list[int]] = {}
    async with (
        FakeVllm(blocks) as prefill,
        FakeVllm(blocks) as decode,
        running_router([decode], [prefill], health_interval_s=600, **PAIRS_ALWAYS) as router,
    ):
        prefill.crashes, decode.gate_after = True, 2
        stream = {**CHAT_BODY, "stream": True}
        asking = asyncio.create_task(router.post(stream))
        await decode.at_gate.wait()
        await decode.die()
        with pytest.raises(httpx.RemoteProtocolError):
            await asking
        again = await router.post(stream)
        assert (again.status_code, again.json()["error"]["code"]) == (500, PoisonRequest.code)


async def test_prompt_that_kills_prefill_workers_only_costs_two() -> None:
    """Each time the decode worker answers in its place."""
    blocks: dict[str, list[int]] = {}
    async with AsyncExitStack() as stack:
        prefills = [await stack.enter_async_context(FakeVllm(blocks)) for _ in range(4)]
        decode = await stack.enter_async_context(FakeVllm(blocks))
        for one in prefills:
            one.crashes = True
        # Three health checks of each dead worker must fail before the next request.
        routing = running_router([decode], prefills, health_interval_s=0.5, **PAIRS_ALWAYS)
        router = await stack.enter_async_context(routing)

        def fewer(left: int) -> bool:
            return len(usable(router.router.workers.prefill, 0.0)) == left

        for number in range(LOSSES_LIMIT):
            for _ in range(20):  # the decode worker has computed it before, and may be chosen again
                assert (await router.post(CHAT_BODY)).status_code == 200
                if sum(len(one.bodies) for one in prefills) > number:
                    break
            await until(partial(fewer, 3 - number))
        for _ in range(2):
            answer = await router.post(CHAT_BODY)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, PoisonRequest.code)
        assert sum(len(one.bodies) for one in prefills) == LOSSES_LIMIT


async def test_answer_after_a_lost_prefill_worker_clears_the_request() -> None:
    blocks: dict[str, list[int]] = {}
    async with (
        FakeVllm(blocks) as prefill,
        FakeVllm(blocks) as decode,
        running_router([decode], [prefill], health_interval_s=600, **PAIRS_ALWAYS) as router,
    ):
        prefill.crashes = True
        for _ in range(2 * LOSSES_LIMIT):
            assert (await router.post(CHAT_BODY)).status_code == 200
        assert len(prefill.bodies) == 1


async def test_batch_line_that_kills_its_worker_is_not_retried() -> None:
    """Its runner sends it again by rules of its own."""
    async with (
        FakeWorker(fake_worker.crash) as one,
        FakeWorker(fake_worker.crash) as two,
        running_router([one, two]) as router,
    ):
        patient = {headers.CLASS: headers.BATCH_CLASS}
        answer = await router.client.post(CHAT, json=anew(QUESTION), headers=patient)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, WorkerLost.code)
        assert len(one.requests) + len(two.requests) == 1
