"""Responses are kept: continued, asked for again and deleted, by those who made them."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from baton_api import headers, limits, response_items
from baton_api.errors import PREVIOUS_RESPONSE_NOT_FOUND, BodyTooLarge
from baton_api.keys import KeyDigest, Keys
from baton_api.response_store import ResponseStore, StoreLimits, Turn
from baton_engine.api.http import HttpServer
from baton_engine.api.responses.endpoint import OwnMemory
from baton_engine.settings import WorkerSettings
from tests.engine.api.api import MODEL, Api, open_api
from tests.engine.api.responses.typed import typed_events, whole_response
from tests.plain_http import PLAIN


async def respond(api: Api, **body: Any) -> httpx.Response:
    given = {"model": MODEL, "input": "Hi", "max_output_tokens": 8} | body
    return await api.http.post("/v1/responses", json=given)


async def test_store_next_turn_continues_the_conversation(api: Api, sdk: openai.AsyncOpenAI) -> None:
    api.model.script = "Hello"
    first = await sdk.responses.create(model=MODEL, input="Hi")
    second = await sdk.responses.create(model=MODEL, input="And?", previous_response_id=first.id)
    third = await sdk.responses.create(
        model=MODEL, input=[{"role": "user", "content": "Then?"}], previous_response_id=second.id
    )
    chat = await sdk.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "And?"},
            {"role": "assistant", "content": "Hello"},
            {"role": "user", "content": "Then?"},
        ],
    )
    assert third.usage is not None
    assert chat.usage is not None
    assert third.usage.input_tokens == chat.usage.prompt_tokens
    assert third.previous_response_id == second.id
    items = [item async for item in await sdk.responses.input_items.list(third.id, order="asc", limit=2)]
    assert [(item.type, getattr(item, "role", "")) for item in items] == [
        ("message", "user"),
        ("message", "assistant"),
    ] * 2 + [("message", "user")]
    assert items[1].id == first.output[0].id
    assert len({item.id for item in items}) == 5


async def test_instructions_hold_for_their_own_turn_alone(api: Api) -> None:
    api.model.script = "Hello"
    first = (await respond(api, instructions="Be brief.")).json()
    second = (await respond(api, previous_response_id=first["id"])).json()
    plain = (await respond(api)).json()
    third = (await respond(api, previous_response_id=plain["id"])).json()
    assert second["usage"]["input_tokens"] == third["usage"]["input_tokens"]
    assert second["instructions"] is None


async def test_store_streamed_response_is_kept_after_its_last_event(api: Api) -> None:
    api.model.script = "Hello"
    events = typed_events((await respond(api, stream=True)).text)
    id = events[0]["response"]["id"]
    assert (await api.http.get(f"/v1/responses/{id}")).json() == events[-1]["response"]
    assert (await respond(api, previous_response_id=id)).status_code == 200


async def test_store_sdk_retrieves_and_deletes(api: Api, sdk: openai.AsyncOpenAI) -> None:
    api.model.script = "Hello"
    created = await sdk.responses.create(model=MODEL, input="Hi", metadata={"a": "b"})
    retrieved = await sdk.responses.retrieve(created.id)
    assert retrieved.to_dict() == created.to_dict()
    await sdk.responses.delete(created.id)
    with pytest.raises(openai.NotFoundError) as error:
        await sdk.responses.retrieve(created.id)
    assert error.value.param == "id"
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.delete(created.id)
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.input_items.list(created.id)


async def test_store_deletion_is_confirmed(api: Api) -> None:
    id = (await respond(api)).json()["id"]
    gone = await api.http.delete(f"/v1/responses/{id}")
    assert gone.json() == {"id": id, "object": "response", "deleted": True}


async def test_store_cancel_is_rejected(api: Api, sdk: openai.AsyncOpenAI) -> None:
    created = await sdk.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        await sdk.responses.cancel(created.id)
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.cancel("resp_none")


async def test_store_unknown_previous_response_is_a_400(api: Api) -> None:
    kept = (await respond(api, store=False)).json()
    assert kept["store"] is False
    for id in ("resp_none", kept["id"]):
        for stream in (False, True):
            answer = await respond(api, previous_response_id=id, stream=stream)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("previous_response_id", PREVIOUS_RESPONSE_NOT_FOUND)


async def test_store_continuation_may_be_unstored(api: Api) -> None:
    first = (await respond(api)).json()
    second = (await respond(api, previous_response_id=first["id"], store=False)).json()
    assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
    assert (await api.http.get(f"/v1/responses/{second['id']}")).status_code == 404


async def test_store_response_may_be_continued_twice(api: Api) -> None:
    api.model.script = "Hello"
    first = (await respond(api)).json()
    continuations = [(await respond(api, previous_response_id=first["id"])).json() for _ in range(2)]
    assert continuations[0]["id"] != continuations[1]["id"]
    assert continuations[0]["usage"]["input_tokens"] == continuations[1]["usage"]["input_tokens"]


async def test_store_invalid_new_input_names_its_place(api: Api) -> None:
    first = (await respond(api)).json()
    wrong = [{"role": "user", "content": "Hi"}, {"role": "wizard", "content": "Hi"}]
    answer = await respond(api, previous_response_id=first["id"], input=wrong)
    assert answer.json()["error"]["param"] == "input[1].role"


async def test_store_stream_replay_is_rejected(api: Api) -> None:
    id = (await respond(api)).json()["id"]
    answer = await api.http.get(f"/v1/responses/{id}", params={"stream": "true"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "stream")


def client(url: str, key: str) -> openai.AsyncOpenAI:
    http = openai.DefaultAsyncHttpxClient(verify=PLAIN)
    return openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, http_client=http)


async def test_store_key_sees_only_its_own_responses() -> None:
    keys = Keys((KeyDigest.of("one"), KeyDigest.of("two")))
    async with open_api(keys=keys) as api, HttpServer(api.app, "127.0.0.1", 0, api.served.drain) as server:
        url = f"http://{server.address}/v1"
        async with client(url, "one") as one, client(url, "two") as two:
            mine = await one.responses.create(model=MODEL, input="Hi", max_output_tokens=2)
            await one.responses.retrieve(mine.id)
            for attempt in (two.responses.retrieve, two.responses.delete, two.responses.input_items.list):
                with pytest.raises(openai.NotFoundError):
                    await attempt(mine.id)
            with pytest.raises(openai.BadRequestError):
                await two.responses.create(model=MODEL, input="Hi", previous_response_id=mine.id)
            await one.responses.create(
                model=MODEL, input="Hi", previous_response_id=mine.id, max_output_tokens=2
            )


async def test_store_keeps_at_most_the_configured_number() -> None:
    async with open_api(settings=WorkerSettings(responses_kept=1)) as api:
        first, second = [(await respond(api)).json()["id"] for _ in range(2)]
        assert (await api.http.get(f"/v1/responses/{first}")).status_code == 404
        assert (await api.http.get(f"/v1/responses/{second}")).status_code == 200


async def test_behind_a_router_the_input_is_whole_and_nothing_is_kept(api: Api) -> None:
    api.model.script = "Hello"
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "And?"},
    ]
    body = {"model": MODEL, "input": talk, "previous_response_id": "resp_elsewhere"}
    routed = await api.http.post("/v1/responses", json=body, headers={headers.STATE: "2"})
    assert routed.status_code == 200
    response = whole_response(routed.json())
    assert response.previous_response_id == "resp_elsewhere"
    chat = await api.chat(messages=talk)
    assert response.usage is not None
    assert response.usage.input_tokens == chat.json()["usage"]["prompt_tokens"]
    assert (await api.http.get(f"/v1/responses/{response.id}")).status_code == 404
    wrong = body | {"input": [*talk, {"role": "wizard", "content": ""}]}
    refused = await api.http.post("/v1/responses", json=wrong, headers={headers.STATE: "2"})
    assert refused.json()["error"]["param"] == "input[1].role"


@pytest.mark.parametrize("how", ["one item, many times", "one response after another"])
def test_conversation_over_the_limit_of_a_body_is_refused_before_it_is_built(how: str) -> None:
    store = ResponseStore(StoreLimits(100, 10 * limits.BODY.most, 60.0))
    memory = OwnMemory(store, b"")
    large = b'{"id":"m","content":"%b"}' % (b"x" * (limits.BODY.most // 3))
    before: Turn | None = None
    for id in "ab":
        before = Turn(id, before, (), b'{"output":[%b]}' % large)
        store.put(b"", before)
    reference = {"type": response_items.REFERENCE, "id": "m"}
    assert len(memory.recall(None, [reference] * 2).items) == 2
    assert len(memory.recall("b", [{}]).items) == 3
    with pytest.raises(BodyTooLarge):
        if how == "one item, many times":
            memory.recall(None, [reference] * 4)
        else:
            memory.recall("b", [reference] * 2)
