"""The router between clients and workers, over real sockets."""

from __future__ import annotations

import asyncio
import json
import time

import httpx
import pytest

from baton_api import headers as header_names
from baton_api import metrics, tickets
from baton_api.errors import UNSUPPORTED_PARAMETER, BodyTooLarge, ModelNotFound, Overloaded, WorkerLost
from baton_api.metrics import STALE
from baton_api.workers import Role
from baton_http.upstream import STALE_S, Upstream, UpstreamExchange, UpstreamLost
from baton_router.workers.circuit_breaker import FAILURES_IN_A_ROW
from tests.plain_http import PLAIN
from tests.router import fake_worker
from tests.router.fake_worker import FakeWorker, WorkerRequest
from tests.router.running import CHAT, QUESTION, STREAM, anew, running_router, until

ERROR_400 = b'{"error":{"message":"no","type":"invalid_request_error","param":"n","code":null}}'
ERROR_503 = b'{"error":{"message":"full","type":"server_error","param":null,"code":"overloaded"}}'


@pytest.mark.parametrize("body", [QUESTION, STREAM], ids=["whole", "stream"])
async def test_answer_has_the_bytes_of_a_direct_call(body: object) -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        async with httpx.AsyncClient(trust_env=False, verify=PLAIN) as client:
            direct = await client.post(worker.url + CHAT, json=body)
        routed = await router.post(body)
        assert routed.status_code == direct.status_code == 200
        assert routed.content == direct.content
        assert routed.headers["content-type"] == direct.headers["content-type"]
        assert routed.headers[header_names.WORKER] == worker.name


async def test_body_passes_byte_for_byte() -> None:
    body = (
        b' {"model": "tiny",\n "top_k":3, "x_unknown": {"deep": [1, 1.0, 1e3, "\\u00e9"]}, "model" : "tiny" }'
    )
    async with FakeWorker(fake_worker.saying(200, b"{}")) as worker, running_router([worker]) as router:
        answer = await router.client.post(
            CHAT + "?a=1&b=%20", content=body, headers={"content-type": "application/json"}
        )
        assert answer.status_code == 200
        assert worker.requests[0].body == body
        assert worker.requests[0].target == CHAT + "?a=1&b=%20"


async def test_worker_gets_only_the_batch_class_header() -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        for kind in ("batch", "interactive", "Batch"):
            answer = await router.client.post(CHAT, json=anew(QUESTION), headers={header_names.CLASS: kind})
            assert answer.status_code == 200
        assert (await router.post(anew(QUESTION))).status_code == 200
        classes = [request.header(header_names.CLASS) for request in worker.requests]
        assert classes == ["batch", None, "batch", None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
async def test_bad_request_is_not_retried_on_another_worker(status: int, stream: bool) -> None:
    behaviour = fake_worker.saying(status, ERROR_400, ("retry-after", "7"))
    async with (
        FakeWorker(behaviour) as worker,
        FakeWorker(behaviour) as other,
        running_router([worker, other]) as router,
    ):
        answer = await router.post({**QUESTION, "stream": stream})
        assert (answer.status_code, answer.content) == (status, ERROR_400)
        assert answer.headers["retry-after"] == "7"
        assert len(worker.requests) + len(other.requests) == 1


MANY = 40
"""Requests in a row: the choice is by chance, but so many do not all go to the same one of two workers."""

FAILURES = {
    "dies at once": fake_worker.die_at_once,
    "dies after the head": fake_worker.die_after_the_head,
    "dies in half a line": fake_worker.streaming(b"data: {", end=True),
    "says 503": fake_worker.saying(503, ERROR_503),
    "says 429": fake_worker.saying(429, ERROR_503),
    "says 500": fake_worker.saying(500, ERROR_503),
    "says 504": fake_worker.saying(504, ERROR_503),
}


@pytest.mark.parametrize("failure", FAILURES.values(), ids=FAILURES.keys())
async def test_retry_on_another_worker_ends_at_the_first_byte(failure: fake_worker.Behaviour) -> None:
    async with FakeWorker(failure) as bad, FakeWorker() as good, running_router([bad, good]) as router:
        while not bad.requests or len(good.requests) < 8:
            answer = await router.post(anew(QUESTION))
            assert answer.content == fake_worker.whole_answer()
            assert len(good.requests) <= MANY
        assert router.router.workers.decode[0].in_flight == 0


async def test_broken_body_before_the_first_byte_is_retried_elsewhere() -> None:
    async with (
        FakeWorker(fake_worker.die_in_the_body) as bad,
        FakeWorker() as good,
        running_router([bad, good]) as router,
    ):
        while not bad.requests or len(good.requests) < 8:
            assert (await router.post(anew(QUESTION))).content == fake_worker.whole_answer()
            assert len(good.requests) <= MANY


async def test_dead_worker_is_ejected_and_its_requests_go_elsewhere() -> None:
    async with FakeWorker() as dying, FakeWorker() as good, running_router([dying, good]) as router:
        await dying.die()
        for _ in range(30):
            assert (await router.post(anew(QUESTION))).status_code == 200
        assert router.metric(metrics.ROUTER_RETRIES.name, cause="connect") == FAILURES_IN_A_ROW


@pytest.mark.parametrize("status", [429, 503])
async def test_kept_connection_closed_by_the_worker_is_not_a_failure(status: int) -> None:
    refusal = fake_worker.saying(status, ERROR_503, ("retry-after", "3"))
    async with FakeWorker(refusal) as one, FakeWorker(refusal) as two, running_router([one, two]) as router:
        answer = await router.post(STREAM)
        assert (answer.status_code, answer.content) == (status, ERROR_503)
        assert answer.headers["retry-after"] == "3"
        assert {len(one.requests), len(two.requests)} == {1, 2}  # the first one may have room again
        assert all(not worker.health.breaker.recent for worker in router.router.workers.decode)


async def test_last_failure_reaches_the_client() -> None:
    failing = fake_worker.saying(500, ERROR_503)
    async with FakeWorker(failing) as one, FakeWorker(failing) as two, running_router([one, two]) as router:
        answer = await router.post(STREAM)
        assert (answer.status_code, answer.content) == (500, ERROR_503)
        assert len(one.requests) == len(two.requests) == 1
        assert all(worker.health.breaker.failures == 1 for worker in router.router.workers.decode)


async def test_rejections_stay_within_the_retry_ratio() -> None:
    refusal = fake_worker.saying(503, ERROR_503)
    async with (
        FakeWorker(refusal) as one,
        FakeWorker(refusal) as two,
        running_router([one, two], retry_ratio=0.1) as router,
    ):
        await asyncio.gather(*(router.post() for _ in range(100)))
        assert 100 <= len(one.requests) + len(two.requests) <= 100 + 10 + 10


async def test_rejected_request_waits_until_a_worker_has_capacity() -> None:
    async def full_at_first(
        worker: FakeWorker, request: fake_worker.WorkerRequest, writer: asyncio.StreamWriter
    ) -> None:
        full = len(worker.requests) == 1
        await (fake_worker.saying(503, ERROR_503) if full else fake_worker.answer)(worker, request, writer)

    async with FakeWorker(full_at_first) as only, running_router([only]) as router:
        assert (await router.post(STREAM)).content == fake_worker.whole_stream()
        assert len(only.requests) == 2


@pytest.mark.parametrize("half", [b"", b'data: {"id": "chatc'], ids=["between events", "in an event"])
async def test_worker_lost_during_a_stream_gives_error_event_and_cut(half: bytes) -> None:
    parts = [part for part in (fake_worker.event("The"), half) if part]
    dying = fake_worker.streaming(*parts, end=False)
    async with FakeWorker(dying) as one, FakeWorker(dying) as two, running_router([one, two]) as router:
        seen = b""
        with pytest.raises(httpx.RemoteProtocolError):
            async with router.client.stream("POST", CHAT, json=STREAM) as answer:
                async for piece in answer.aiter_raw():
                    seen += piece
                    one.release.set()
                    two.release.set()
        begun, _, error = seen.rpartition(b"data: ")
        assert begun == fake_worker.event("The")
        assert json.loads(error)["error"]["code"] == WorkerLost.code
        assert len(one.requests) + len(two.requests) == 1
        assert router.metric(metrics.ROUTER_CUT.name, cause="reset") == 1


async def test_stream_without_its_end_is_not_complete() -> None:
    async with (
        FakeWorker(fake_worker.streaming(fake_worker.event("The"))) as worker,
        running_router([worker]) as router,
    ):
        with pytest.raises(httpx.RemoteProtocolError):
            await router.post(STREAM)


async def test_worker_death_after_the_end_of_its_stream_is_not_a_loss() -> None:
    async with FakeWorker(fake_worker.streaming(fake_worker.whole_stream(), end=False)) as worker:
        worker.release.set()
        async with running_router([worker]) as router:
            assert (await router.post(STREAM)).content == fake_worker.whole_stream()


async def test_idle_stream_is_cut() -> None:
    async with (
        FakeWorker(fake_worker.hang_in_the_stream) as worker,
        running_router([worker], idle_s=0.2) as router,
    ):
        with pytest.raises(httpx.RemoteProtocolError):
            await router.post(STREAM)
        await worker.left.wait()


async def test_worker_that_does_not_begin_in_time_causes_503() -> None:
    async with FakeWorker(fake_worker.hang) as worker, running_router([worker], answer_s=0.2) as router:
        answer = await router.post()
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == WorkerLost.code
        await worker.left.wait()


async def test_requests_leave_a_silent_worker() -> None:
    async with (
        FakeWorker(fake_worker.hang) as silent,
        FakeWorker() as good,
        running_router([silent, good], health_interval_s=0.1) as router,
    ):
        asking = [asyncio.create_task(router.post()) for _ in range(8)]
        await silent.arrived.wait()
        silent.silent = True
        answers = await asyncio.gather(*asking)
        assert [answer.status_code for answer in answers] == [200] * 8
        assert router.metric(metrics.ROUTER_RETRIES.name, cause="hung") == len(silent.requests) > 0


async def test_worker_with_progressing_requests_is_not_down() -> None:
    async with (
        FakeWorker(fake_worker.flood) as worker,
        running_router([worker], health_interval_s=0.1, health_misses=1) as router,
        httpx.AsyncClient(base_url=router.url, trust_env=False, verify=PLAIN) as client,
        client.stream("POST", CHAT, json=STREAM) as answer,
    ):
        worker.silent = True
        before = worker.connections
        async for _ in answer.aiter_raw():
            assert router.router.unready_reason() is None
            if worker.connections > before + 5:  # each look that nothing came of has ended its own
                break


async def test_disconnected_client_ends_its_request() -> None:
    for behaviour in (fake_worker.hang, fake_worker.hang_in_the_stream, fake_worker.flood):
        async with FakeWorker(behaviour) as worker, running_router([worker]) as router:
            async with httpx.AsyncClient(base_url=router.url, trust_env=False, verify=PLAIN) as client:
                asking = asyncio.create_task(client.post(CHAT, json=STREAM))
                await worker.arrived.wait()
                asking.cancel()
                await asyncio.wait([asking])
            async with asyncio.timeout(60):
                await worker.left.wait()
            await until(lambda: router.router.workers.decode[0].in_flight == 0)
            await until(lambda: router.metric(metrics.ROUTER_IN_FLIGHT.name) == 0)


async def test_missing_worker_is_503_with_retry_after() -> None:
    async with running_router() as router:
        answer = await router.post()
        assert answer.status_code == 503
        assert 1 <= int(answer.headers["retry-after"]) <= 120
        assert answer.json()["error"]["code"] == Overloaded.code
        assert "--decode" in answer.json()["error"]["message"]


async def test_unknown_model_is_404_with_the_served_ones() -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        answer = await router.post({**QUESTION, "model": "gpt-9"})
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["type"], error["param"], error["code"]) == (
            "invalid_request_error",
            "model",
            ModelNotFound.code,
        )
        assert "tiny" in error["message"]
        assert not worker.requests


async def test_requests_go_to_the_workers_of_their_model() -> None:
    async with (
        FakeWorker(model="one") as one,
        FakeWorker(model="two") as two,
        running_router([one, two]) as router,
    ):
        for model in ("one", "two", "two"):
            assert (await router.post({**QUESTION, "model": model})).status_code == 200
        assert (len(one.requests), len(two.requests)) == (1, 2)


BAD_BODIES = {"no json": b"{", "no object": b"[1]", "empty": b"", "deep": b'{"a":' + b"[" * 200_000}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
async def test_unreadable_body_is_400(body: bytes) -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        answer = await router.client.post(CHAT, content=body)
        assert answer.status_code == 400
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert len(answer.content) < 500
        assert not worker.requests


async def test_body_over_the_limit_is_413_and_at_the_limit_passes() -> None:
    limit = 200_000
    async with FakeWorker() as worker, running_router([worker], max_body=limit) as router:
        for size, status in ((limit, 200), (limit + 1, 413), (3 * limit, 413)):
            body = json.dumps({**QUESTION, "pad": ""}).encode()
            body = body.replace(b'"pad": ""', b'"pad": "' + b"x" * (size - len(body)) + b'"')
            answer = await router.client.post(CHAT, content=body)
            assert answer.status_code == status
        assert answer.json()["error"]["code"] == BodyTooLarge.code
        assert len(worker.requests) == 1


async def test_internal_and_connection_headers_do_not_pass() -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        sent = {
            header_names.PREFILL: "10.0.0.1:1",
            "X-Baton-Ticket": "forged",
            "x-baton-anything": "1",
            "te": "trailers",
            "connection": "keep-alive, x-private",
            "x-private": "1",
            "accept-encoding": "br",
            "traceparent": "00-1-2-01",
            "authorization": "Bearer k",
        }
        answer = await router.client.post(CHAT, json=QUESTION, headers=sent)
        assert answer.status_code == 200
        arrived = worker.requests[0]
        for name in sent:
            passes = name in ("traceparent", "authorization")
            assert arrived.header(name.lower()) == (sent[name] if passes else None), name
        assert arrived.header("host") == worker.name


async def test_worker_headers_do_not_reach_the_client() -> None:
    extra = (
        ("x-baton-secret", "1"),
        ("server", "x"),
        ("keep-alive", "5"),
        (header_names.REQUEST_ID, "other"),
    )
    async with (
        FakeWorker(fake_worker.saying(200, b"{}", *extra)) as worker,
        running_router([worker]) as router,
    ):
        answer = await router.client.post(CHAT, json=QUESTION, headers={header_names.REQUEST_ID: "mine"})
        assert answer.headers.get_list(header_names.REQUEST_ID) == ["mine"]
        assert not {"x-baton-secret", "server", "keep-alive"} & set(answer.headers)


@pytest.mark.parametrize("given", [None, "mine-1", "x" * 128, "x" * 129, "with space", ""])
async def test_answer_has_the_request_id_that_the_worker_received(given: str | None) -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        headers = {header_names.REQUEST_ID: given} if given is not None else {}
        answer = await router.client.post(CHAT, json=QUESTION, headers=headers)
        identity = answer.headers[header_names.REQUEST_ID]
        assert worker.requests[0].header(header_names.REQUEST_ID) == identity
        assert (identity == given) == (given in ("mine-1", "x" * 128))
        for path in ("/v1/models", "/health", "/nowhere", "/v1/models/none"):
            assert (await router.client.get(path)).headers[header_names.REQUEST_ID]


async def test_request_carries_a_prefill_worker_and_its_ticket() -> None:
    prefiller = FakeWorker(role=Role.PREFILL, control="127.0.0.1:7001")
    async with (
        FakeWorker() as worker,
        prefiller,
        running_router([worker], [prefiller], ticket_secret="s3cret", local_prefill_max_tokens=0) as router,
    ):
        answer = await router.post()
        request = worker.requests[0]
        assert request.header(header_names.PREFILL) == "127.0.0.1:7001"
        ticket, session = request.header(header_names.TICKET), answer.headers[header_names.REQUEST_ID]
        assert ticket is not None
        assert tickets.refusal(b"s3cret", ticket, session, "127.0.0.1:7001", time.time()) is None
        assert tickets.refusal(b"s3cret", ticket, session, "127.0.0.1:7002", time.time())
        assert router.router.workers.prefill[0].in_flight == 0


async def test_decode_worker_computes_locally_without_a_prefill_worker() -> None:
    other = FakeWorker(role=Role.PREFILL, control="127.0.0.1:7001", compatibility="different")
    async with FakeWorker() as worker, other, running_router([worker], [other]) as router:
        assert (await router.post()).status_code == 200
        assert worker.requests[0].header(header_names.PREFILL) is None


async def test_connections_to_a_worker_are_used_again() -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        for _ in range(20):
            await router.post(STREAM)
        assert worker.connections <= 2


async def test_last_rejection_reaches_the_client() -> None:
    async with FakeWorker() as worker, running_router([worker], health_interval_s=600) as router:
        await router.post()
        for upstream_side in list(worker._writers):
            upstream_side.transport.abort()
        assert (await router.post()).status_code == 200
        assert router.router.workers.decode[0].health.breaker.failures == 0


async def test_request_reset_after_work_is_not_sent_again_there() -> None:
    """On a kept connection too: a worker that dies of a request must not get it again, and it counts."""

    async def die_of_it(worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        received = loop.time()
        await until(lambda: loop.time() - received > STALE_S)
        writer.transport.abort()

    async with FakeWorker() as worker, running_router([worker], health_interval_s=600) as router:
        await router.post()
        worker.requests.clear()
        worker.behaviour = die_of_it
        assert (await router.post()).status_code == 503
        assert len(worker.requests) == 1
        assert router.router.workers.decode[0].health.breaker.failures == 1


async def test_stale_connection_is_replaced_once_and_counted() -> None:
    """The worker closes the kept connection as the request comes, and then every one: two are tried."""

    async def stale(worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter) -> None:
        await (fake_worker.die_at_once if len(worker.requests) == 2 else fake_worker.answer)(
            worker, request, writer
        )

    async with FakeWorker(stale) as worker, running_router([worker], health_interval_s=600) as router:
        assert [(await router.post()).status_code for _ in range(2)] == [200, 200]
        assert len(worker.requests) == 3
        assert router.metric(metrics.ROUTER_RETRIES.name, cause=STALE) == 1
        assert router.router.workers.decode[0].health.breaker.failures == 0
        worker.behaviour = fake_worker.die_at_once
        assert (await router.post()).status_code == 503
        assert len(worker.requests) == 5


class Recorder:
    """Remembers what an upstream says of the exchange that it holds."""

    def __init__(self) -> None:
        self.seen: list[UpstreamExchange | None] = []

    @property
    def exchange(self) -> UpstreamExchange | None:
        return self.seen[-1] if self.seen else None

    @exchange.setter
    def exchange(self, exchange: UpstreamExchange | None) -> None:
        self.seen.append(exchange)


async def test_reconnecting_request_holds_nothing() -> None:
    """A timer that fires then finds nothing to end, and fires again."""
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n"
    async with FakeWorker() as worker:
        upstream = Upstream("127.0.0.1", worker.port)
        first = await upstream.request(head, b"{}")
        while await first.read():
            pass
        worker.behaviour = fake_worker.die_at_once
        recorder = Recorder()
        with pytest.raises(UpstreamLost):
            await upstream.request(head, b"{}", recorder)
        kept, between, fresh = recorder.seen
        assert kept is not None and between is None and fresh is not None
        assert not kept.fail("slow") and not fresh.fail("slow")
        upstream.close()


RESUMING = {
    "a chat": ("/v1/chat/completions", b'{"model": "tiny", "messages": [], "baton_resume": {}}'),
    "a body that is no chat": ("/v1/chat/completions", b'{"model": 1, "baton_resume": {}}'),
    "a completion": ("/v1/completions", b'{"model": "tiny", "prompt": "a", "baton_resume": null}'),
    "with an escape": ("/v1/completions", rb'{"prompt": "a", "baton\u005fresume": {"tokens": [1]}}'),
    "said twice": ("/v1/completions", b'{"baton_resume": {}, "prompt": "a", "baton_resume": null}'),
}


@pytest.mark.parametrize(("path", "body"), RESUMING.values(), ids=RESUMING.keys())
async def test_client_cannot_resume_an_answer_by_itself(path: str, body: bytes) -> None:
    """It would choose the answer's id and how many tokens the usage calls cached."""
    async with FakeWorker() as worker, running_router([worker]) as router:
        answer = await router.client.post(path, content=body)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("baton_resume", UNSUPPORTED_PARAMETER)
        assert not worker.requests
