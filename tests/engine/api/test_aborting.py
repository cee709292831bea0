"""Requests aborted by another client, under each of their names."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import httpx
import msgspec
import openai
import pytest

from baton_api import headers as header_names
from baton_api.errors import INVALID_TYPE, MISSING_REQUIRED_PARAMETER, STRING_ABOVE_MAX_LENGTH, RequestAborted
from baton_engine.api.http import HttpServer
from baton_engine.api.running import Running
from tests.engine.api.api import MODEL, USER, Api, eventually
from tests.engine.api.test_validation import assert_error
from tests.plain_http import PLAIN


async def abort(http: httpx.AsyncClient, **body: Any) -> int:
    response = await http.post("/abort_request", json=body)
    assert response.status_code == 200, response.text
    return int(response.json()["aborted"])


async def started(api: Api, **body: Any) -> asyncio.Task[httpx.Response]:
    """A request that runs and does not end by itself soon."""
    api.model.go.clear()
    headers = {header_names.REQUEST_ID: "sent"}
    fields = {"model": MODEL, "messages": USER, "ignore_eos": True} | body
    task = asyncio.create_task(api.http.post("/v1/chat/completions", json=fields, headers=headers))
    await asyncio.to_thread(api.model.inside.wait)
    return task


def submitted(api: Api) -> int:
    now = api.served.computing.snapshot()
    return now.running + now.queued


@pytest.mark.parametrize(
    "name",
    [{"rid": "mine"}, {"request_id": "ours"}, {"rid": "sent"}, {"rid": ["no", "mine"]}, {"abort_all": True}],
    ids=str,
)
@pytest.mark.parametrize("n", [1, 3])
async def test_abort_unstreamed_request_is_a_499(api: Api, name: dict[str, Any], n: int) -> None:
    running = await started(api, rid="mine", request_id="ours", n=n)
    assert await abort(api.http, **name) == 1
    api.model.go.set()
    assert_error(await running, 499, RequestAborted.code, None)
    await eventually(lambda: not api.served.computing.snapshot().owned_blocks)
    api.assert_all_blocks_back()
    assert await api.metric('baton_worker_requests_total{finish_reason="abort"}') == n
    assert await abort(api.http, **name) == 0


async def test_abort_stream_ends_with_an_error_event(api: Api, server: HttpServer) -> None:
    body = {"model": MODEL, "messages": USER, "stream": True, "ignore_eos": True}
    api.model.stops_at = 2
    async with (
        httpx.AsyncClient(base_url=f"http://{server.address}", verify=PLAIN) as http,
        http.stream("POST", "/v1/chat/completions", json=body) as response,
    ):
        lines = response.aiter_lines()
        first = msgspec.json.decode((await anext(lines)).removeprefix("data: "))
        assert await abort(http, rid=first["id"]) == 1
        api.model.resume()
        rest = [line async for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    error = msgspec.json.decode(rest[-2].removeprefix("data: "))["error"]
    assert (error["code"], error["type"]) == (RequestAborted.code, "invalid_request_error")
    assert not any('"finish_reason":"' in line for line in rest)
    await eventually(lambda: not api.served.computing.snapshot().owned_blocks)
    api.assert_all_blocks_back()


@pytest.mark.one_process("looks into the process's history")
async def test_abort_sdk_raises_without_retry(api: Api, server: HttpServer) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"http://{server.address}/v1",
        api_key="x",
        http_client=openai.DefaultAsyncHttpxClient(verify=PLAIN),
    ) as client:
        api.model.go.clear()
        asking: asyncio.Task[Any] = asyncio.create_task(
            client.chat.completions.create(model=MODEL, messages=USER, extra_body={"rid": "r"})  # type: ignore[arg-type]
        )
        await asyncio.to_thread(api.model.inside.wait)
        assert await abort(api.http, rid="r") == 1
        api.model.go.set()
        with pytest.raises(openai.APIStatusError) as raised:
            await asking
    assert raised.value.status_code == 499
    assert len(api.served.history) == 1


async def test_abort_ends_only_the_named_request(api: Api) -> None:
    api.model.go.clear()
    tasks = [asyncio.create_task(api.chat(rid=f"r{number}")) for number in range(4)]
    await asyncio.to_thread(api.model.inside.wait)
    await eventually(lambda: submitted(api) == 4)
    assert await abort(api.http, rid="r2") == 1
    api.model.go.set()
    assert [(await task).status_code for task in tasks] == [200, 200, 499, 200]


async def test_abort_queued_request_ends(api: Api) -> None:
    api.model.go.clear()
    tasks = [asyncio.create_task(api.chat(n=64, rid=name)) for name in ("first", "second")]
    await asyncio.to_thread(api.model.inside.wait)
    await eventually(lambda: submitted(api) == 2)
    assert await abort(api.http, rid="second") == 1
    api.model.go.set()
    assert [(await task).status_code for task in tasks] == [200, 499]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({}, MISSING_REQUIRED_PARAMETER, "rid"),
        ({"rid": ""}, MISSING_REQUIRED_PARAMETER, "rid"),
        ({"abort_all": False}, MISSING_REQUIRED_PARAMETER, "rid"),
        ({"abort_all": 1}, INVALID_TYPE, "abort_all"),
        ({"rid": 7}, INVALID_TYPE, "rid"),
        ({"rid": ["a", 7]}, INVALID_TYPE, "rid[1]"),
        ({"rid": "x" * 129}, STRING_ABOVE_MAX_LENGTH, "rid"),
        ({"request_id": ["x"]}, INVALID_TYPE, "request_id"),
    ],
    ids=str,
)
async def test_abort_without_a_name_is_rejected(
    api: Api, body: dict[str, Any], code: str, param: str
) -> None:
    assert_error(await api.http.post("/abort_request", json=body), 400, code, param)


async def test_aborts_at_any_moment_leave_nothing(api: Api) -> None:
    chance = random.Random(5)

    async def ask(number: int) -> int:
        fields = {"stream": chance.random() < 0.5, "n": chance.choice((1, 2)), "max_tokens": 40}
        asking = asyncio.create_task(api.chat(rid=f"r{number}", **fields))
        for _ in range(chance.randrange(400)):
            await asyncio.sleep(0)
        ended = await abort(api.http, rid=f"r{number}")
        response = await asking
        assert ended in (0, 1)
        if not ended:
            assert response.status_code == 200 and RequestAborted.code not in response.text
        return ended

    ended = sum([await one for one in asyncio.as_completed([ask(number) for number in range(60)])])
    assert ended > 10
    await eventually(lambda: not api.served.computing.snapshot().owned_blocks)
    api.assert_all_blocks_back()
    assert (await api.chat()).status_code == 200


def test_law_each_request_is_ended_once_by_whichever_names() -> None:
    class Counted:
        def __init__(self) -> None:
            self.ends = 0

        def abort(self) -> None:
            self.ends += 1

    chance = random.Random(7)
    for _ in range(200):
        running = Running()
        requests = [(Counted(), {chance.choice("abc") for _ in range(3)}) for _ in range(5)]
        entries = [running.entered(names, request) for request, names in requests]
        for entry in entries:
            entry.__enter__()
        name = chance.choice("abcd")
        assert running.abort(name) == sum(name in names for _, names in requests)
        assert [request.ends for request, _ in requests] == [int(name in names) for _, names in requests]
        assert running.abort_all() == len(requests)
        for entry in entries:
            entry.__exit__(None, None, None)
        assert running.abort_all() == 0
