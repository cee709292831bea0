"""A prompt shares KV blocks with prompts of the same salt only, whatever path it came by."""

from __future__ import annotations

from typing import Any

import pytest

from baton_api.headers import PROMPT, SALT
from baton_api.reports import PromptReport
from tests.engine.server.api import MODEL, Api

TEXT = "once upon a time there was a cache, and nobody knew whose it was; " * 3

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "n": 2},
    "/v1/completions": {"prompt": TEXT},
    "/v1/responses": {"input": TEXT},
    "/generate": {"text": TEXT},
}


async def cached(api: Api, path: str, salt: str) -> int:
    """Tokens of the prompt that were in the cache."""
    headers = {SALT: salt} if salt else {}
    answer = await api.http.post(path, json={"model": MODEL, **PATHS[path]}, headers=headers)
    report = PromptReport.decode(answer.raise_for_status().headers[PROMPT])
    assert report is not None
    return report.cached


@pytest.mark.parametrize("path", PATHS)
async def test_two_salts_share_no_block_and_one_salt_does(api: Api, path: str) -> None:
    found = [await cached(api, path, salt) for salt in ("a", "b", "", "a", "b", "")]
    assert found[:3] == [0, 0, 0]
    assert min(found[3:]) > 0 and len(set(found[3:])) == 1


async def test_a_path_makes_no_difference_but_for_the_prompt(api: Api) -> None:
    assert await cached(api, "/v1/completions", "a") == 0
    assert await cached(api, "/generate", "a") > 0
    assert await cached(api, "/generate", "b") == 0


async def test_a_clients_own_field_is_refused(api: Api) -> None:
    body = {"model": MODEL, "prompt": TEXT, "cache_salt": "a"}
    answer = await api.http.post("/v1/completions", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"
