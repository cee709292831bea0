"""The request log: nothing, counts, parameters, or text, each only if configured."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from baton_api.keys import KeyDigest, Keys
from baton_engine.settings import WorkerSettings
from tests.engine.api.api import MODEL, Api, open_api

SECRET = "my secret\nWARNING: forged"


async def lines(
    caplog: pytest.LogCaptureFixture, body: dict[str, Any], **settings: Any
) -> tuple[list[str], dict[str, Any]]:
    """The request's own lines, and its answer."""
    caplog.set_level(logging.INFO)
    chosen = WorkerSettings.model_validate({"log_requests": True, **settings})
    async with open_api(settings=chosen) as api:
        api.model.script = "the answer"
        response = await api.chat(messages=[{"role": "user", "content": SECRET}], **body)
        assert response.status_code == 200, response.text
    own = [record.message for record in caplog.records if record.message.startswith("request ")]
    return own, {} if body.get("stream") else response.json()


def assert_silent(logged: list[str]) -> None:
    assert not any("secret" in line or "the answer" in line for line in logged)


async def test_request_log_off_logs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    logged, _ = await lines(caplog, {}, log_requests=False, log_requests_level=2)
    assert logged == []
    assert_silent([record.message for record in caplog.records])


async def test_request_log_default_has_only_counts_and_names(caplog: pytest.LogCaptureFixture) -> None:
    (read, ended), answer = await lines(caplog, {"max_tokens": 32, "temperature": 0.25})
    name = answer["id"]
    assert f"id={name}" in read and "path=/v1/chat/completions" in read
    assert f"prompts=1 tokens={answer['usage']['prompt_tokens']} n=1 max_tokens=32 stream=no" in read
    assert "temperature" not in read
    assert ended.endswith(f"finish=stop completion={answer['usage']['completion_tokens']}")
    assert_silent([read, ended])


async def test_sampling_parameters_that_are_not_the_usual_ones(caplog: pytest.LogCaptureFixture) -> None:
    body = {"temperature": 0.25, "seed": 7, "top_k": 3, "n": 2, "max_tokens": 32}
    (read, ended), _ = await lines(caplog, body, log_requests_level=1)
    assert "seed=7" in read and "temperature=0.25" in read and "top_k=3" in read and "n=2" in read
    assert "top_p" not in read and "min_p" not in read
    assert "finish=stop,stop" in ended
    assert_silent([read, ended])


@pytest.mark.parametrize("stream", [False, True])
async def test_request_log_text_is_quoted_so_it_cannot_forge_lines(
    caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    body = {"max_tokens": 32, "stream": stream}
    (read, ended), _ = await lines(caplog, body, log_requests_level=2)
    prompt = json.loads(read.partition("prompt[0]=")[2])
    assert SECRET in prompt
    assert "\n" not in read
    assert ended.endswith('answer[0]="the answer"')


async def test_text_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    (read, ended), _ = await lines(caplog, {"max_tokens": 32}, log_requests_level=2, log_requests_length=5)
    assert len(json.loads(read.partition("prompt[0]=")[2])) == 5
    assert ended.endswith('answer[0]="the a"')


async def test_request_log_named_key_shows_its_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    keys = Keys((KeyDigest.of("k-alice", "alice"), KeyDigest.of("k-nobody")))
    async with open_api(keys=keys, settings=WorkerSettings(log_requests=True)) as api:
        assert (await ask(api, "k-alice")).status_code == 200
        assert (await ask(api, "k-nobody")).status_code == 200
        assert (await ask(api, "k-wrong")).status_code == 401
    logged = [record.message for record in caplog.records]
    assert sum("client=alice" in line for line in logged) == 2  # when read, and in the access log
    assert not any("k-" in line for line in logged)


async def ask(api: Api, key: str) -> Any:
    return await api.http.post(
        "/v1/completions",
        json={"model": MODEL, "prompt": "Hi", "max_tokens": 2},
        headers={"authorization": f"Bearer {key}"},
    )
