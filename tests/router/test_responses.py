"""A cluster's responses: kept by the router, whichever worker made them."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import openai
import pytest

from baton_api import headers, limits, metrics
from baton_api.errors import PREVIOUS_RESPONSE_NOT_FOUND, WorkerLost
from baton_api.keys import KeyDigest
from baton_api.response_store import ResponseStore
from baton_router.proxy.response_stores import MemoryResponseStore
from tests.plain_http import PLAIN
from tests.router import fake_worker
from tests.router.fake_worker import STREAM_END, STREAM_HEAD, FakeWorker, WorkerRequest, chunk, plain
from tests.router.running import RunningRouter, running_router, until

PATH = "/v1/responses"
QUESTION = {"model": "tiny", "input": "Hi"}

_numbers = itertools.count()


def response_to(request: WorkerRequest) -> dict[str, Any]:
    """Return a worker's answer, which contains the number of its input items."""
    body = json.loads(request.body)
    items = [body["input"]] if isinstance(body["input"], str) else body["input"]
    number = next(_numbers)
    content = [{"type": "output_text", "text": f"{len(items)} items", "annotations": [], "logprobs": []}]
    message = {"type": "message", "id": f"msg_{number}", "role": "assistant", "status": "completed"}
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 1,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": "tiny",
        "output": [{**message, "content": content}],
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "store": body.get("store", True),
        "temperature": 1.0,
        "tool_choice": "auto",
        "tools": [],
        "top_p": 1.0,
        "usage": None,
    }


def typed(number: int, kind: str, **more: Any) -> bytes:
    data = json.dumps({"type": kind, "sequence_number": number, **more})
    return f"event: {kind}\ndata: {data}\n\n".encode()


def events_of(response: dict[str, Any]) -> list[bytes]:
    created = {**response, "status": "in_progress", "output": []}
    text = response["output"][0]["content"][0]["text"]
    place = {"item_id": response["output"][0]["id"], "output_index": 0}
    return [
        typed(0, "response.created", response=created),
        typed(1, "response.output_item.added", output_index=0, item={**response["output"][0], "content": []}),
        typed(
            2,
            "response.content_part.added",
            **place,
            content_index=0,
            part={"type": "output_text", "text": "", "annotations": []},
        ),
        b": keep-alive\n\n",
        typed(3, "response.output_text.delta", **place, content_index=0, delta=text, logprobs=[]),
        typed(4, "response.output_item.done", output_index=0, item=response["output"][0]),
        typed(5, f"response.{response['status']}", response=response),
    ]


async def respond(worker: FakeWorker, request: WorkerRequest, writer: asyncio.StreamWriter) -> None:
    response = response_to(request)
    if not json.loads(request.body).get("stream"):
        writer.write(plain(200, json.dumps(response).encode()))
        return
    writer.write(STREAM_HEAD)
    for event in events_of(response):
        writer.write(chunk(event))
        await asyncio.sleep(0)
    writer.write(STREAM_END)


def stored(router: RunningRouter) -> ResponseStore:
    assert isinstance(router.router.responses, MemoryResponseStore)
    return router.router.responses.store


def client(url: str, key: str = "none") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key=key,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=PLAIN),
    )


async def test_next_turn_finds_its_conversation_on_any_worker() -> None:
    async with (
        FakeWorker(respond) as one,
        FakeWorker(respond) as other,
        running_router([one, other]) as router,
        client(router.url) as sdk,
    ):
        last = await sdk.responses.create(model="tiny", input="Hi")
        for turn in range(1, 5):
            used, unused = (one, other) if len(one.requests) > len(other.requests) else (other, one)
            used.behaviour, unused.behaviour = fake_worker.saying(503, b"{}"), respond
            before = len(unused.requests)
            last = await sdk.responses.create(model="tiny", input="And?", previous_response_id=last.id)
            assert last.output_text == f"{2 * turn + 1} items"
            assert len(unused.requests) == before + 1
        assert await sdk.responses.retrieve(last.id) == last
        items = [item async for item in await sdk.responses.input_items.list(last.id, order="asc", limit=4)]
        assert [getattr(item, "role", "") for item in items] == ["user", "assistant"] * 4 + ["user"]


@pytest.mark.parametrize("store", [None, False])
async def test_references_to_items_are_resolved_for_any_worker(store: bool | None) -> None:
    async with FakeWorker(respond) as worker, running_router([worker]) as router:
        kept = (await router.post(QUESTION, PATH)).json()["output"][0]
        reference = {"type": "item_reference", "id": kept["id"]}
        new = {"role": "user", "content": "And?"}
        question = {"model": "tiny", "store": store, "x": [1e3], "input": [reference, new]}
        second = (await router.post(question, PATH)).json()
        assert json.loads(worker.requests[1].body) == question | {"input": [kept, new]}
        follow_up = {"model": "tiny", "input": [new], "previous_response_id": second["id"]}
        answer = await router.post(follow_up, PATH)
        if store is None:  # the second response has the item, and not the reference
            assert json.loads(worker.requests[2].body)["input"][0] == kept
        else:
            assert answer.status_code == 400


async def test_reference_to_an_unknown_item_is_400() -> None:
    async with FakeWorker(respond) as worker, running_router([worker]) as router:
        items = [{"role": "user", "content": "item_reference"}, {"type": "item_reference", "id": "msg_none"}]
        answer = await router.post({"model": "tiny", "input": items}, PATH)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "input[1].id")
        assert "'msg_none' not found" in error["message"]
        assert not worker.requests


async def test_state_header_has_the_number_of_earlier_items() -> None:
    async with FakeWorker(respond) as worker, running_router([worker]) as router:
        first = (await router.post(QUESTION, PATH)).json()
        new = {"role": "user", "content": "And?", "extra": 1.0}
        question = {
            "model": "tiny",
            "input": [new],
            "previous_response_id": first["id"],
            "top_k": 3,
            "x": [1e3],
        }
        await router.post(question, PATH)
        request = worker.requests[1]
        assert [one.header(headers.STATE) for one in worker.requests] == ["0", "2"]
        sent = json.loads(request.body)
        earlier, reply, own = sent["input"]
        assert earlier["content"] == [{"type": "input_text", "text": "Hi"}]
        assert reply == first["output"][0]
        assert own == new
        assert {**sent, "input": [new]} == question


async def test_stateless_request_passes_byte_for_byte() -> None:
    body = b' {"model": "tiny",\n "input" : "\\u00e9", "store":false, "x": [1, 1.0] }'
    async with FakeWorker(respond) as worker, running_router([worker]) as router:
        kind = {"content-type": "application/json"}
        answer = await router.client.post(PATH, content=body, headers=kind)
        assert answer.status_code == 200
        assert worker.requests[0].body == body
        assert len(stored(router)) == 0
        await router.client.post(PATH, content=body.replace(b"false", b"true"), headers=kind)
        assert worker.requests[1].body == body.replace(b"false", b"true")
        assert len(stored(router)) == 1


async def test_state_header_of_a_client_is_dropped() -> None:
    async with FakeWorker(respond) as worker, running_router([worker]) as router:
        await router.client.post(PATH, json=QUESTION, headers={headers.STATE: "7"})
        assert worker.requests[0].header(headers.STATE) == "0"


async def test_stream_is_stored_before_its_last_event() -> None:
    async with FakeWorker(respond) as worker, running_router([worker]) as router, client(router.url) as sdk:
        async with sdk.responses.stream(model="tiny", input="Hi") as stream:
            async for event in stream:
                if event.type == "response.completed":
                    retrieved = await sdk.responses.retrieve(event.response.id)
                    assert retrieved.output_text == event.response.output_text == "1 items"
            final = await stream.get_final_response()
        async with sdk.responses.stream(model="tiny", input="And?", previous_response_id=final.id) as stream:
            assert (await stream.get_final_response()).output_text == "3 items"


async def test_stream_passes_unchanged() -> None:
    async with FakeWorker(respond) as worker, running_router([worker]) as router:
        for store in (True, False):
            answer = await router.post({**QUESTION, "stream": True, "store": store}, PATH)
            assert answer.text.startswith("event: response.created\n")
            assert answer.text.count("\n\n") == 7
            assert answer.text.endswith("}\n\n")


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_previous_response_is_400(stream: bool) -> None:
    async with FakeWorker(respond) as worker, running_router([worker]) as router:
        unkept = (await router.post({**QUESTION, "store": False}, PATH)).json()["id"]
        for id in ("resp_none", unkept):
            answer = await router.post({**QUESTION, "previous_response_id": id, "stream": stream}, PATH)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("previous_response_id", PREVIOUS_RESPONSE_NOT_FOUND)
            assert answer.headers[headers.REQUEST_ID]
        assert len(worker.requests) == 1
        assert router.metric(metrics.ROUTER_REQUESTS.name, path=PATH, code="400") == 2


async def test_sdk_retrieves_and_deletes_but_cannot_cancel() -> None:
    async with FakeWorker(respond) as worker, running_router([worker]) as router, client(router.url) as sdk:
        first_response = await sdk.responses.create(model="tiny", input="Hi")
        assert await sdk.responses.retrieve(first_response.id) == first_response
        with pytest.raises(openai.BadRequestError, match="Cannot cancel"):
            await sdk.responses.cancel(first_response.id)
        await sdk.responses.delete(first_response.id)
        for attempt in (
            sdk.responses.retrieve,
            sdk.responses.delete,
            sdk.responses.cancel,
            sdk.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError) as error:
                await attempt(first_response.id)
            assert error.value.request_id
        assert len(worker.requests) == 1


async def test_key_sees_only_its_own_responses() -> None:
    async with (
        FakeWorker(respond) as worker,
        running_router([worker], api_key="one,two") as router,
        client(router.url, "one") as one,
        client(router.url, "two") as two,
    ):
        mine = await one.responses.create(model="tiny", input="Hi")
        await one.responses.retrieve(mine.id)
        for attempt in (two.responses.retrieve, two.responses.delete, two.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                await attempt(mine.id)
        with pytest.raises(openai.BadRequestError):
            await two.responses.create(model="tiny", input="Hi", previous_response_id=mine.id)
        await one.responses.create(model="tiny", input="Hi", previous_response_id=mine.id)
        async with httpx.AsyncClient(base_url=router.url, trust_env=False, verify=PLAIN) as stranger:
            assert (await stranger.get(f"{PATH}/{mine.id}")).status_code == 401


async def test_keys_checked_by_workers_separate_responses() -> None:
    async with (
        FakeWorker(respond) as worker,
        running_router([worker]) as router,
        client(router.url, "one") as one,
        client(router.url, "two") as two,
    ):
        mine = await one.responses.create(model="tiny", input="Hi")
        with pytest.raises(openai.NotFoundError):
            await two.responses.retrieve(mine.id)


async def test_store_is_bounded_by_the_settings() -> None:
    async with FakeWorker(respond) as worker, running_router([worker], responses_kept=1) as router:
        first, second = [(await router.post(QUESTION, PATH)).json()["id"] for _ in range(2)]
        assert (await router.client.get(f"{PATH}/{first}")).status_code == 404
        assert (await router.client.get(f"{PATH}/{second}")).status_code == 200


NOT_KEPT = {
    "an error": fake_worker.saying(400, b'{"error":{"message":"no","type":"x","param":null,"code":null}}'),
    "no JSON": fake_worker.saying(200, b"{"),
    "no response": fake_worker.saying(200, b'{"object": "list", "data": []}'),
    "one that failed": fake_worker.saying(200, b'{"id": "resp_1", "status": "failed", "output": []}'),
}


async def test_large_conversations_of_one_key_leave_those_of_another() -> None:
    junk = {"role": "user", "content": "h", "junk": "A" * 50_000}
    text = {"role": "user", "content": "h" * 20_000}
    keys = KeyDigest.of("mine"), KeyDigest.of("yours")
    async with (
        FakeWorker(respond) as worker,
        running_router([worker], api_key=keys, responses_memory=200_000) as router,
    ):

        async def ask(key: str, item: dict[str, str]) -> str:
            body = {"model": "tiny", "input": [item]}
            answer = await router.client.post(PATH, json=body, headers={"authorization": f"Bearer {key}"})
            id: str = answer.json()["id"]
            return id

        mine = await ask("mine", junk)
        assert stored(router).size < 10_000
        for _ in range(20):
            await ask("yours", text)
        assert 150_000 < stored(router).size <= 200_000
        found = await router.client.get(f"{PATH}/{mine}", headers={"authorization": "Bearer mine"})
        assert found.status_code == 200


async def test_conversation_over_the_limit_of_a_body_is_413() -> None:
    async with FakeWorker(respond) as worker, running_router([worker], max_body=10_000) as router:
        id: str | None = None
        for number in range(3):
            body = {"model": "tiny", "input": "x" * 4_000, "previous_response_id": id}
            answer = await router.post(body, PATH)
            assert answer.status_code == (200 if number < 2 else 413)
            id = answer.json().get("id")
        assert len(worker.requests) == 2


@pytest.mark.parametrize("behaviour", NOT_KEPT.values(), ids=NOT_KEPT.keys())
async def test_other_answers_pass_and_are_not_stored(behaviour: fake_worker.Behaviour) -> None:
    async with FakeWorker(behaviour) as worker, running_router([worker]) as router:
        answer = await router.post(QUESTION, PATH)
        async with httpx.AsyncClient(trust_env=False, verify=PLAIN) as direct:
            assert answer.content == (await direct.post(worker.url + PATH, json=QUESTION)).content
        assert len(stored(router)) == 0


BAD_BODIES = {
    "no JSON": b'{"model":',
    "no object": b"[]",
    "a number as input": b'{"model": "tiny", "input": 7}',
    "no text as previous": b'{"model": "tiny", "input": "Hi", "previous_response_id": 7}',
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
async def test_invalid_body_is_left_to_the_worker(body: bytes) -> None:
    refusal = fake_worker.saying(400, b'{"error":{"message":"no","type":"x","param":null,"code":null}}')
    async with FakeWorker(refusal) as worker, running_router([worker]) as router:
        answer = await router.client.post(PATH, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400
        assert all(request.body == body for request in worker.requests)


def cut_stream(events: int) -> fake_worker.Behaviour:
    response = response_to(WorkerRequest("POST", PATH, [], b'{"input": "Hi"}'))
    return fake_worker.streaming(*events_of(response)[:events], end=False)


async def test_stream_of_a_lost_worker_ends_with_error_event_and_cut() -> None:
    async with FakeWorker(cut_stream(5)) as worker, running_router([worker]) as router:
        worker.release.set()
        received = b""
        with pytest.raises(httpx.RemoteProtocolError):
            async with router.client.stream("POST", PATH, json={**QUESTION, "stream": True}) as answer:
                async for part in answer.aiter_raw():
                    received += part
        name, data = received.rstrip(b"\n").rsplit(b"\n\n", 1)[1].split(b"\n")
        event = json.loads(data.removeprefix(b"data: "))
        assert name == b"event: error"
        assert (event["type"], event["sequence_number"], event["code"]) == ("error", 4, WorkerLost.code)
        assert event["message"] == event["error"]["message"]
        assert len(stored(router)) == 0


async def test_sdk_raises_for_a_stream_of_a_lost_worker() -> None:
    async with FakeWorker(cut_stream(5)) as worker, running_router([worker]) as router:
        worker.release.set()
        async with client(router.url) as sdk:
            with pytest.raises(openai.APIError, match="was lost"):
                async for _ in await sdk.responses.create(model="tiny", input="Hi", stream=True):
                    pass


async def test_stream_without_its_last_event_is_not_stored() -> None:
    response = response_to(WorkerRequest("POST", PATH, [], b'{"input": "Hi"}'))
    behaviour = fake_worker.streaming(*events_of(response)[:5], end=True)
    async with FakeWorker(behaviour) as worker, running_router([worker]) as router:
        with pytest.raises(httpx.RemoteProtocolError):
            await router.post({**QUESTION, "stream": True}, PATH)


@pytest.mark.parametrize("ending", ["completed", "incomplete", "failed"])
async def test_stream_with_a_final_status_is_complete(ending: str) -> None:
    response = {**response_to(WorkerRequest("POST", PATH, [], b'{"input": "Hi"}')), "status": ending}
    worker = FakeWorker(fake_worker.streaming(*events_of(response), end=False))
    async with worker, running_router([worker]) as router:
        worker.release.set()
        answer = await router.post({**QUESTION, "stream": True}, PATH)
        assert answer.content == b"".join(events_of(response))
        assert len(stored(router)) == (ending != "failed")


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
async def test_stream_pieces_of_any_size_give_the_same_result(size: int) -> None:
    response = response_to(WorkerRequest("POST", PATH, [], b'{"input": "Hi"}'))
    whole = b"".join(events_of(response))
    parts = [whole[start : start + size] for start in range(0, len(whole), size)]
    async with FakeWorker(fake_worker.streaming(*parts)) as worker, running_router([worker]) as router:
        answer = await router.post({**QUESTION, "stream": True}, PATH)
        assert answer.content == whole
        assert (await router.client.get(f"{PATH}/{response['id']}")).json() == response


async def test_large_response_is_stored_completely() -> None:
    response = response_to(WorkerRequest("POST", PATH, [], b'{"input": "Hi"}'))
    response["output"][0]["content"][0]["text"] = "x" * 1_000_000
    body = json.dumps(response).encode()
    async with FakeWorker(fake_worker.saying(200, body)) as worker, running_router([worker]) as router:
        assert (await router.post(QUESTION, PATH)).content == body
        assert (await router.client.get(f"{PATH}/{response['id']}")).content == body


@pytest.mark.parametrize(
    ("path", "field"), [(PATH, "input"), ("/v1/chat/completions", "messages"), ("/v1/completions", "prompt")]
)
async def test_body_of_too_many_values_reaches_no_worker(path: str, field: str) -> None:
    async with FakeWorker(respond) as worker, running_router([worker]) as router:
        answer = await router.post({"model": "tiny", field: [{}] * limits.VALUES.most}, path)
        assert answer.status_code == 400
        assert "objects, arrays and strings" in answer.json()["error"]["message"]
        assert not worker.requests


async def test_body_over_the_limit_is_413() -> None:
    async with FakeWorker(respond) as worker, running_router([worker], max_body=1000) as router:
        answer = await router.post({**QUESTION, "input": "x" * 2000}, PATH)
        assert answer.status_code == 413
        assert not worker.requests


async def test_body_in_two_segments_is_counted_once() -> None:
    body = json.dumps({**QUESTION, "input": "x" * 100_000}).encode()
    size = len(body)
    async with (
        FakeWorker(respond) as worker,
        running_router([worker], max_body=size, connection_memory=2 * size) as router,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        head = f"POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: {size}\r\n\r\n"
        writer.write(head.encode() + body[:1000])
        await until(lambda: router.router.memory.used == size)
        writer.write(body[1000:])
        assert b" 200 " in await reader.readline()
        writer.close()
