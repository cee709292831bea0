"""Requests through the router to vLLM workers: other endpoints than chats, tools, usage and errors."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from baton_api import metrics
from baton_api.headers import CACHED
from baton_router.engines.bodies import UNSERVED
from tests.router.engines.fake_engine import tokenize
from tests.router.engines.fake_vllm import FakeVllm
from tests.router.engines.test_vllm import CHAT, COMPLETION, PAIRS_ALWAYS, events_of, streamed
from tests.router.running import running_router, until

WORDS = "one two three"
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}


@pytest.mark.parametrize("pair", [False, True])
async def test_tokens_and_their_text_pass(pair: bool) -> None:
    async with (
        FakeVllm() as prefill,
        FakeVllm() as decode,
        running_router([decode], [prefill] if pair else [], **PAIRS_ALWAYS) as router,
    ):
        given = await router.post({"model": "tiny", "prompt": WORDS}, "/tokenize")
        assert given.json() == {
            "count": 3,
            "max_model_len": 8192,
            "tokens": tokenize(WORDS),
            "token_strs": None,
        }
        given = await router.post({"model": "tiny", "tokens": [7, 8]}, "/detokenize")
        assert given.json() == {"prompt": " w7 w8"}
        assert not prefill.bodies, "a prefill worker has no part in it"


async def test_embeddings_pass() -> None:
    async with FakeVllm(embeds=True) as worker, running_router([worker]) as router:
        given = await router.post({"model": "tiny", "input": [WORDS, "four"]}, "/v1/embeddings")
        assert given.status_code == 200
        assert [one["embedding"] for one in given.json()["data"]] == [[3.0], [1.0]]


async def test_endpoint_that_workers_do_not_have_is_named() -> None:
    async with FakeVllm() as worker, running_router([worker]) as router:
        for path in ("/v1/embeddings", "/v1/tokenize"):
            given = await router.post({"model": "tiny", "input": WORDS}, path)
            error = given.json()["error"]
            assert given.status_code == 404
            assert error["code"] == UNSERVED and path in error["message"]
            assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_response_passes_and_continues(stream: bool) -> None:
    async with FakeVllm() as worker, running_router([worker]) as router:
        body = {"model": "tiny", "input": WORDS, "max_output_tokens": 3, "stream": stream}
        first = await router.post(body, "/v1/responses")
        assert first.status_code == 200, first.text
        if stream:
            assert first.text.count("event: response.completed") == 1
            assert first.text.count("response.output_text.delta") == 6, "name and type of three events"
        stored = await router.client.get("/v1/responses/resp_1")
        assert stored.status_code == 200, stored.text
        follow = await router.post({**body, "previous_response_id": "resp_1"}, "/v1/responses")
        assert follow.status_code == 200, follow.text
        roles = [item["role"] for item in worker.bodies[-1]["input"]]
        assert roles == ["user", "assistant", "user"], (
            "the worker has no store: it gets the whole conversation"
        )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "members",
    [{"tools": TOOLS}, {"tools": TOOLS, "tool_choice": "required"}, {"response_format": SCHEMA}],
    ids=["tools", "required tool", "schema"],
)
async def test_tools_and_schemas_reach_both_workers(members: dict[str, Any], stream: bool) -> None:
    blocks: dict[str, list[int]] = {}
    async with (
        FakeVllm(blocks) as prefill,
        FakeVllm(blocks) as decode,
        running_router([decode], [prefill], **PAIRS_ALWAYS) as router,
    ):
        given = await router.post({**CHAT, **members, "stream": stream})
        assert given.status_code == 200, given.text
        for worker in (prefill, decode):
            assert not worker.violations
            (body,) = worker.bodies
            assert members.items() <= body.items(), "the template may put them into the prompt"
        if stream:
            deltas = [choice["delta"] for event in events_of(given.text) for choice in event["choices"]]
            called = any("tool_calls" in delta for delta in deltas)
        else:
            called = "tool_calls" in given.json()["choices"][0]["message"]
        assert called is ("tools" in members)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_usage_of_a_pair_has_the_prefill_worker_s_hits(path: str, stream: bool) -> None:
    blocks: dict[str, list[int]] = {}
    body = CHAT if path.endswith("chat/completions") else COMPLETION
    async with (
        FakeVllm(blocks) as prefill,
        FakeVllm(blocks) as decode,
        running_router([decode], [prefill], **PAIRS_ALWAYS) as router,
    ):
        decode.cached = 9  # older versions count the blocks that came from the prefill worker
        options = {"stream_options": {"include_usage": True}} if stream else {}
        given = await router.post({**body, "stream": stream, **options}, path)
        usage = (events_of(given.text)[-1] if stream else given.json())["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
        assert given.headers[CACHED] == "3"
        assert decode.pulled == 1


async def test_cached_tokens_at_the_end_of_a_stream_are_learned() -> None:
    async with FakeVllm() as worker, running_router([worker]) as router:
        worker.cached = 8
        events = events_of(await streamed(router, CHAT))
        assert all("usage" not in event for event in events), "the client did not request it"
        (placement,) = router.router.scheduler.planner.placements
        await until(lambda: placement.ended is not None)
        assert placement.report is not None and placement.report.cached == 8
        assert router.metric(metrics.ROUTER_PREFIX_TOKENS.name, kind="cached") == 8


async def test_unknown_cached_tokens_stay_unknown() -> None:
    async with FakeVllm() as worker, running_router([worker]) as router:
        await streamed(router, CHAT)
        (placement,) = router.router.scheduler.planner.placements
        await until(lambda: placement.ended is not None)
        assert placement.report is not None and placement.report.cached is None
        assert router.metric(metrics.ROUTER_PREFIX_TOKENS.name, kind="prompt") == 0


DETAILS = [{"type": "missing", "loc": ["body", "messages"], "msg": "Field required"}]
ERRORS = {
    "vLLM": (400, {"error": {"message": "No.", "type": "BadRequestError", "code": 400}}, "No."),
    "vLLM's parameter": (400, {"error": {"message": "No.", "type": "x", "param": "n", "code": 400}}, "No."),
    "earlier vLLM": (400, {"object": "error", "message": "No.", "type": "x", "code": 400}, "No."),
    "FastAPI": (422, {"detail": "No."}, "No."),
    "FastAPI's list": (422, {"detail": DETAILS}, "messages: Field required"),
    "plain text": (400, "No.", "No."),
    "its own failure": (500, {"error": {"message": "It died.", "type": "x", "code": 500}}, "It died."),
}


@pytest.mark.parametrize(("status", "reply", "message"), ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_of_vllm_reach_clients_in_one_shape(
    status: int, reply: Any, message: str, stream: bool
) -> None:
    async with FakeVllm() as worker, running_router([worker]) as router:
        worker.error_reply = status, reply
        given = await router.post({**CHAT, "stream": stream})
        assert given.status_code == status
        assert given.headers["content-type"] == "application/json"
        error = given.json()["error"]
        assert error["message"] == message
        assert error["type"] == ("server_error" if status == 500 else "invalid_request_error")
        assert error["code"] is None and set(error) == {"message", "type", "param", "code"}


async def test_messages_pass_in_anthropics_shape() -> None:
    async with FakeVllm() as worker, running_router([worker]) as router:
        body: Any = {"model": "tiny", "messages": [{"role": "user", "content": WORDS}], "max_tokens": 3}
        async with anthropic.AsyncAnthropic(base_url=router.url, api_key="none", max_retries=0) as client:
            message = await client.messages.create(**body)
            async with client.messages.stream(**body) as stream:
                texts = [text async for text in stream.text_stream]
            assert message.content[0].text == "".join(texts) and len(texts) == 3
            assert message.stop_reason == "end_turn"
            with pytest.raises(anthropic.BadRequestError, match="invalid_request_error"):
                await client.messages.create(**body, extra_body={"max_tokens": 0})
            with pytest.raises(anthropic.NotFoundError, match="do not serve"):
                await client.messages.count_tokens(model="tiny", messages=body["messages"])
