"""Workers of other engines: what they answer, and the findings about it."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from baton_api.workers import EngineKind
from baton_cli.doctor import engines
from baton_cli.doctor.engines import engine_workers
from baton_cli.doctor.machine import EngineWorker, Level
from tests.cli.doctor.machines import but
from tests.observing.engine_series import Recording

PREFILL = EngineWorker(
    url="http://a:8000",
    role="prefill",
    engine=EngineKind.VLLM,
    version="0.32.0",
    connector=True,
    side_channel="a:5600",
    kv_events=True,
    prompt_tokens_details=True,
    block_size=16,
)
DECODE = dataclasses.replace(PREFILL, url="http://b:8000", role="decode", side_channel="b:5600")


def workers_at(answers: Mapping[str, Any], role: str = "prefill") -> list[EngineWorker]:
    """Return the workers at one server, which answers these paths and 404 otherwise."""

    def answer(request: httpx.Request) -> httpx.Response:
        body = answers.get(request.url.path)
        if isinstance(body, str):
            return httpx.Response(200, text=body)
        return httpx.Response(404) if body is None else httpx.Response(200, json=body)

    with httpx.Client(transport=httpx.MockTransport(answer)) as client:
        return list(engine_workers(client, [("http://127.0.0.1:8000", role)]))


def vllm(details: Any, params: Any) -> dict[str, Any]:
    """Return the answers of vLLM 0.32."""
    return {
        "/version": {"version": "0.32.0"},
        "/kv_event_sources": {"0": {"enable_kv_cache_events": True, "publisher": "zmq"}},
        "/v1/models": {"data": [{"id": "smollm2"}]},
        "/metrics": Recording.read("vllm_pair").text("prefill", 50),
        "/v1/completions": {
            "usage": {"prompt_tokens": 1, "prompt_tokens_details": details},
            "kv_transfer_params": params,
        },
    }


def test_vllm_worker_reports_what_a_pair_needs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as side_channel:
        port = side_channel.getsockname()[1]
        answers = vllm({"cached_tokens": 0}, {"remote_host": "127.0.0.1", "remote_port": port})
        (worker,) = workers_at(answers)
    assert worker == EngineWorker(
        url="http://127.0.0.1:8000",
        role="prefill",
        engine=EngineKind.VLLM,
        version="0.32.0",
        connector=True,
        side_channel=f"127.0.0.1:{port}",
        kv_events=True,
        prompt_tokens_details=True,
        block_size=128,
    )


def test_vllm_worker_without_flags_is_not_unknown() -> None:
    (worker,) = workers_at(vllm(None, None))
    assert (worker.connector, worker.prompt_tokens_details, worker.side_channel) == (False, False, "")


def test_vllm_worker_that_answers_little_is_unknown() -> None:
    (worker,) = workers_at({"/version": {"version": "0.32.0"}})
    unknown = (worker.connector, worker.kv_events, worker.prompt_tokens_details, worker.block_size)
    assert unknown == (None, None, None, None)
    assert {one.level for one in engines.workers(but(workers=(worker,)))} == {Level.NOTE}


def test_sglang_mock_reports_what_a_pair_needs() -> None:
    info = {
        "version": "0.5.23",
        "disaggregation_mode": "decode",
        "kv_events_config": '{"publisher": "zmq", "endpoint": "tcp://*:5557"}',
        "enable_cache_report": False,
        "page_size": 64,
    }
    (worker,) = workers_at({"/server_info": info}, role="decode")
    assert (worker.engine, worker.version, worker.block_size) == (EngineKind.SGLANG, "0.5.23", 64)
    assert (worker.connector, worker.kv_events, worker.prompt_tokens_details) == (True, True, False)


@pytest.mark.parametrize("answers", [{"/load": {"epoch": "x"}}, {"/v1/models": {"data": []}}, {}])
def test_engine_workers_other_servers_skipped(answers: dict[str, Any]) -> None:
    assert workers_at(answers) == []


def test_good_pair_has_only_good_findings() -> None:
    findings = list(engines.workers(but(workers=(PREFILL, DECODE))))
    assert [one.level for one in findings] == [Level.GOOD] * 2
    assert findings[0].measured == "http://a:8000 (prefill): vLLM 0.32.0, blocks of 16 tokens"


@pytest.mark.parametrize(
    ("changed", "level", "words"),
    [
        ({"version": None}, Level.NOTE, "version unknown"),
        ({"connector": False}, Level.ERROR, "http://a:8000 (prefill) has no KV connector"),
        ({"connector": False, "role": "decode"}, Level.WARNING, "has no KV connector"),
        ({"side_channel_trouble": "Connection refused"}, Level.WARNING, "a:5600 of http://a:8000 (prefill)"),
        ({"kv_events": False}, Level.WARNING, "publishes no KV events"),
        ({"kv_events": None}, Level.NOTE, "KV events unknown"),
        ({"prompt_tokens_details": False}, Level.WARNING, "does not report cached tokens"),
        ({"block_size": 32}, Level.ERROR, "16 tokens on http://b:8000 (decode), 32 tokens on http://a:8000"),
    ],
)
def test_workers_one_problem_one_finding(changed: dict[str, Any], level: Level, words: str) -> None:
    worker = dataclasses.replace(PREFILL, **changed)
    (finding,) = (
        one for one in engines.workers(but(workers=(worker, DECODE))) if one.level is not Level.GOOD
    )
    assert finding.level is level and words in finding.measured
    assert finding.why and (finding.remedy or level is Level.NOTE)


def test_tensorrt_llm_is_not_taken_for_vllm() -> None:
    card = {"id": "tiny", "owned_by": "tensorrt_llm"}
    assert not workers_at({"/version": {"version": "1.3.0"}, "/v1/models": {"data": [card]}})
