"""The router in front of TensorRT-LLM workers, whose protocol a fake checks member by member."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from baton_api import metrics
from baton_api.errors import UNSUPPORTED_PARAMETER, InvalidRequest
from baton_api.headers import CACHED
from baton_api.prompt_report import Fallback
from baton_api.workers import EngineKind
from baton_router.engines.registry import ENGINES
from tests.router.engines.fake_engine import generate, text_of, tokenize
from tests.router.engines.fake_trtllm import FakeTrtllm
from tests.router.engines.test_vllm import (
    CHAT,
    COMPLETION,
    PAIRS_ALWAYS,
    events_of,
    expected_text,
    streamed,
    text_in,
)
from tests.router.running import running_router
from tests.router.test_quotas import tenants

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def text_of_answer(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    text: str = choice["message"]["content"] if "message" in choice else choice["text"]
    return text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
async def test_pair_generates_what_one_worker_would(path: str, stream: bool) -> None:
    blocks: dict[int, list[int]] = {}
    body = {**(CHAT if path == CHATS else COMPLETION), "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    wanted = expected_text()
    if path == COMPLETIONS:
        wanted = "".join(map(text_of, generate(tokenize(str(COMPLETION["prompt"])), 6)))
    async with (
        FakeTrtllm(blocks) as prefill,
        FakeTrtllm(blocks) as decode,
        running_router([decode], [prefill], **PAIRS_ALWAYS) as router,
    ):
        for _ in range(2):
            given = await router.post(body, path)
            assert given.status_code == 200, given.text
            assert (text_in(events_of(given.text)) if stream else text_of_answer(given.json())) == wanted
            assert given.headers[CACHED] == "3"
            assert "ctx_info_endpoint" not in given.text and "prompt_token_ids" not in given.text
        assert (prefill.computed, decode.computed) == (2, 0)
        numbers = [one["disaggregated_params"]["disagg_request_id"] for one in prefill.bodies]
        assert len(set(numbers)) == 2
        assert not prefill.violations and not decode.violations and not blocks
        assert not prefill.records and not decode.records


async def test_worker_alone_gets_the_client_s_body() -> None:
    async with FakeTrtllm() as worker, running_router([worker]) as router:
        assert text_in(events_of(await streamed(router, CHAT))) == expected_text()
        assert worker.bodies == [{**CHAT, "stream": True}]
        load = router.router.workers.decode[0].health.load
        assert load is not None and (load.running, load.version) == (2, "1.3.0")


@pytest.mark.parametrize(
    ("status", "fallback"),
    [(500, Fallback.FAILED), (503, Fallback.BUSY), (429, Fallback.BUSY), (400, Fallback.REJECTED)],
)
async def test_failed_prefill_leaves_the_prompt_to_the_decode_worker(status: int, fallback: Fallback) -> None:
    async with (
        FakeTrtllm({}) as prefill,
        FakeTrtllm({}) as decode,
        running_router([decode], [prefill], **PAIRS_ALWAYS) as router,
    ):
        prefill.fail_with = status
        assert text_in(events_of(await streamed(router, CHAT))) == expected_text()
        assert (decode.computed, len(prefill.bodies)) == (1, 1)
        decisions = metrics.ROUTER_DECISIONS.name
        assert router.metric(decisions, path="fallback", reason=fallback) == 1
        assert router.metric(decisions, path="fallback") == 1


@pytest.mark.parametrize("case", ["no transceiver", "no parameters", "ends at its first token", "dead"])
async def test_prompt_without_a_handoff_is_computed_by_the_decode_worker(case: str) -> None:
    blocks: dict[int, list[int]] | None = None if case == "no transceiver" else {}
    async with (
        FakeTrtllm(blocks) as prefill,
        FakeTrtllm({}) as decode,
        running_router([decode], [prefill], **PAIRS_ALWAYS) as router,
    ):
        prefill.forgets = case == "no parameters"
        prefill.finishes = case == "ends at its first token"
        if case == "dead":
            await prefill.die()
        assert text_in(events_of(await streamed(router, CHAT))) == expected_text()
        assert decode.computed == 1 and not decode.violations


async def test_several_answers_are_left_to_the_decode_worker() -> None:
    async with (
        FakeTrtllm({}) as prefill,
        FakeTrtllm({}) as decode,
        running_router([decode], [prefill], **PAIRS_ALWAYS) as router,
    ):
        assert (await router.post({**CHAT, "n": 2})).status_code == 200
        assert (prefill.bodies, decode.computed) == ([], 1)


async def test_client_may_not_name_blocks() -> None:
    async with FakeTrtllm({}) as worker, running_router([worker]) as router:
        params = {"request_type": "generation_only", "ctx_info_endpoint": "tcp://elsewhere"}
        answer = await router.post({**CHAT, "disaggregated_params": params})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, UNSUPPORTED_PARAMETER)
        assert error["param"] == "disaggregated_params" and not worker.bodies


@pytest.mark.parametrize("pair", [True, False])
async def test_tenants_with_a_salt_have_chats_only(pair: bool, tmp_path: Path) -> None:
    """TensorRT-LLM knows no salt of a completion; without one, tenants would share a cache."""
    blocks: dict[int, list[int]] = {}
    async with (
        FakeTrtllm(blocks) as prefill,
        FakeTrtllm(blocks) as decode,
        running_router(
            [decode], [prefill] if pair else [], **PAIRS_ALWAYS, **tenants(tmp_path, acme={})
        ) as router,
    ):
        key = {"authorization": "Bearer acme"}
        chat = await router.client.post(CHATS, json=CHAT, headers=key)
        assert chat.status_code == 200 and text_of_answer(chat.json()) == expected_text()
        sent = [*prefill.bodies, *decode.bodies]
        assert len(sent) == 1 + pair and len({one["cache_salt"] for one in sent}) == 1
        completion = await router.client.post(COMPLETIONS, json=COMPLETION, headers=key)
        assert completion.status_code == 400
        assert "Use /v1/chat/completions" in completion.json()["error"]["message"]
        assert len(prefill.bodies) + len(decode.bodies) == len(sent)
        assert not prefill.violations and not decode.violations


def test_gateway_sends_no_completion_with_a_salt() -> None:
    spec, body = ENGINES[EngineKind.TRTLLM], b'{"model": "tiny", "prompt": "x"}'
    assert spec.single_body(COMPLETIONS, body, "") == body
    with pytest.raises(InvalidRequest, match="/v1/chat/completions"):
        spec.single_body(COMPLETIONS, body, "s")


async def test_workers_of_different_versions_are_no_pair() -> None:
    async with (
        FakeTrtllm({}, version="1.2.0") as prefill,
        FakeTrtllm({}) as decode,
        running_router([decode], [prefill], **PAIRS_ALWAYS) as router,
    ):
        assert text_in(events_of(await streamed(router, CHAT))) == expected_text()
        assert not prefill.bodies
        (warning,) = router.router.workers.decode[0].warnings
        assert "version 1.2.0" in warning and "1.3.0" in warning


@pytest.mark.parametrize("spec", ENGINES.values(), ids=[str(kind) for kind in ENGINES])
def test_law_single_body_has_the_salt_or_is_unchanged(spec: Any) -> None:
    """A gateway's worker gets the client's bytes, and no more than the salt behind them."""
    body = b'{"model": "tiny", "messages": []}'
    assert spec.single_body(CHATS, body, "") == body
    salted = spec.single_body(CHATS, body, "s")
    assert salted in (body, b'{"model": "tiny", "messages": [],"cache_salt":"s"}')
    assert spec.single_body(CHATS, b"[", "s") == b"["


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses"])
def test_gateway_adds_no_salt_to_what_has_none(path: str) -> None:
    """TensorRT-LLM refuses members that a request of this path does not have."""
    body = b'{"model": "tiny", "input": "x"}'
    assert ENGINES[EngineKind.TRTLLM].single_body(path, body, "s") == body
