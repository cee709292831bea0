"""A prompt shares KV blocks with prompts of the same salt only, whatever path it came by."""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

import pytest

from baton_api.headers import PROMPT, SALT
from baton_api.prompt_report import PromptReport
from tests.engine.api.api import MODEL, Api

TEXT = "once upon a time there was a cache, and nobody knew whose it was; " * 3

PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}], "n": 2, "max_tokens": 4},
    "/v1/completions": {"prompt": TEXT, "max_tokens": 4},
    "/v1/responses": {"input": TEXT, "max_output_tokens": 4},
    "/generate": {"text": TEXT, "sampling_params": {"max_new_tokens": 4}},
}


async def cached(api: Api, path: str, salt: str, **more: str) -> int:
    """Tokens of the prompt that were in the cache."""
    headers = {SALT: salt} if salt else {}
    answer = await api.http.post(path, json={"model": MODEL, **PATHS[path], **more}, headers=headers)
    report = PromptReport.decode(answer.raise_for_status().headers[PROMPT])
    assert report is not None and report.cached is not None
    return report.cached


@pytest.mark.parametrize("path", PATHS)
async def test_two_salts_share_no_block_and_one_salt_does(api: Api, path: str) -> None:
    counts = [await cached(api, path, salt) for salt in ("a", "b", "", "a", "b", "")]
    assert counts[:3] == [0, 0, 0]
    assert min(counts[3:]) > 0 and len(set(counts[3:])) == 1


async def test_cache_salt_is_shared_by_endpoints(api: Api) -> None:
    assert await cached(api, "/v1/completions", "a") == 0
    assert await cached(api, "/generate", "a") > 0
    assert await cached(api, "/generate", "b") == 0


@pytest.mark.parametrize("path", PATHS)
async def test_client_salt_splits_the_cache_of_its_tenant(api: Api, path: str) -> None:
    """Each pair of the router's salt and the client's has blocks of its own, with and without tenants."""
    pairs = [("", "mine"), ("acme", "mine"), ("acme", "")]

    async def look(pair: tuple[str, str]) -> int:
        return await cached(api, path, pair[0], **({"cache_salt": pair[1]} if pair[1] else {}))

    assert [await look(pair) for pair in pairs] == [0] * 3
    assert min([await look(pair) for pair in pairs]) > 0


async def test_client_cannot_name_the_cache_of_a_tenant(api: Api) -> None:
    """Not by the tenant's salt itself, and not by what that salt is made of when routers have no secret."""
    salt = hmac.new(b"", b"baton-cache-salt|own|acme", hashlib.sha256).hexdigest()[:32]
    assert await cached(api, "/v1/completions", salt) == 0
    for forged in (salt, "baton-cache-salt|own|acme", "another"):
        assert await cached(api, "/v1/completions", "", cache_salt=forged) == 0
    assert await cached(api, "/v1/completions", salt) > 0
