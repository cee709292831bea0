"""The router in front of SGLang workers, as a fake checks the protocol of their sessions field by field."""

from __future__ import annotations

import asyncio

import pytest

from tests.router.engines.fake_sglang import FakeSglang, Sessions
from tests.router.engines.test_vllm import CHAT, events_of, expected_text, streamed, text_in
from tests.router.running import running_router, until


@pytest.mark.parametrize("stream", [False, True])
async def test_pair_gets_one_body_with_one_session(stream: bool) -> None:
    sessions = Sessions()
    async with (
        FakeSglang(sessions, mode="prefill", bootstrap_port=9001) as prefill,
        FakeSglang(sessions, mode="decode") as decode,
        running_router([decode], [prefill]) as router,
    ):
        for _ in range(3):
            response = await router.post({**CHAT, "stream": stream})
            assert response.status_code == 200, response.text
            given = (
                text_in(events_of(response.text))
                if stream
                else response.json()["choices"][0]["message"]["content"]
            )
            assert given == expected_text()
        assert not prefill.violations and not decode.violations
        assert prefill.bodies == decode.bodies
        assert len({body["bootstrap_room"] for body in decode.bodies}) == 3


async def test_worker_without_disaggregation_gets_the_client_s_body() -> None:
    async with FakeSglang() as worker, running_router([worker]) as router:
        assert text_in(events_of(await streamed(router, CHAT))) == expected_text()
        assert worker.bodies == [{**CHAT, "stream": True}]
        assert not worker.violations


async def test_decode_worker_without_prefill_worker_is_not_used() -> None:
    async with FakeSglang(Sessions(), mode="decode") as decode, running_router([decode]) as router:
        response = await router.post(CHAT)
        assert response.status_code == 503
        assert not decode.bodies


@pytest.mark.parametrize("mode", ["decode", "null"])
async def test_worker_listed_in_the_wrong_role_says_why(mode: str) -> None:
    async with FakeSglang(Sessions(), mode=mode) as worker, running_router([], [worker]) as router:
        (listed,) = router.router.workers.prefill
        assert "--disaggregation-mode prefill" in listed.reason


async def test_failed_prefill_worker_sends_the_request_to_another_pair() -> None:
    sessions = Sessions()
    async with (
        FakeSglang(sessions, mode="prefill") as broken,
        FakeSglang(sessions, mode="prefill") as good,
        FakeSglang(sessions, mode="decode") as one,
        FakeSglang(sessions, mode="decode") as other,
        running_router([one, other], [broken, good]) as router,
    ):
        broken.fail_with = 500
        for number in range(20):
            body = {**CHAT, "messages": [{"role": "user", "content": f"question {number}"}]}
            assert text_in(events_of(await streamed(router, body))) == expected_text(body)
        assert broken.bodies, "the choice never met the broken worker"


async def test_client_that_leaves_ends_both_halves() -> None:
    sessions = Sessions()
    async with (
        FakeSglang(sessions, mode="prefill") as prefill,
        FakeSglang(sessions, mode="decode") as decode,
        running_router([decode], [prefill]) as router,
    ):
        prefill.gate_after = 0
        asking = asyncio.create_task(router.post({**CHAT, "stream": True}))
        await prefill.at_gate.wait()
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        (worker,) = router.router.workers.prefill
        (other,) = router.router.workers.decode
        await until(lambda: not worker.in_flight and not other.in_flight)


async def test_client_cannot_choose_a_session() -> None:
    async with FakeSglang() as worker, running_router([worker]) as router:
        response = await router.post({**CHAT, "bootstrap_room": 7})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "bootstrap_room"
