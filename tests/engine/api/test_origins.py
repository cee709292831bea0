"""Browsers: which pages may call a worker, and which headers they get."""

from __future__ import annotations

from typing import Any

import httpx

from baton_api import headers as header_names
from baton_api.keys import KeyDigest, Keys
from baton_engine.settings import WorkerSettings
from tests.engine.api.api import MODEL, USER, Api, open_api

PAGE = "https://chat.example.org"
KEYS = Keys((KeyDigest.of("k"),))


async def preflight(api: Api, origin: str = PAGE) -> httpx.Response:
    return await api.http.options(
        "/v1/chat/completions",
        headers={
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type,x-stainless-lang",
        },
    )


async def ask(api: Api, **headers: str) -> httpx.Response:
    body: dict[str, Any] = {"model": MODEL, "messages": USER, "max_tokens": 2}
    return await api.http.post("/v1/chat/completions", json=body, headers={"origin": PAGE, **headers})


async def test_origins_without_key_are_closed_unless_allowed() -> None:
    async with open_api() as api:
        assert "access-control-allow-origin" not in (await preflight(api)).headers
        assert "access-control-allow-origin" not in (await ask(api)).headers
    async with open_api(settings=WorkerSettings(allowed_origins=(PAGE,))) as api:
        assert (await preflight(api)).status_code == 200
        assert (await ask(api)).headers["access-control-allow-origin"] == PAGE
        assert (await preflight(api, "https://evil.example")).status_code == 400
        assert "access-control-allow-origin" not in (await ask(api, origin="https://evil.example")).headers


async def test_origins_with_keys_preflights_need_no_key() -> None:
    async with open_api(keys=KEYS) as api:
        answer = await preflight(api)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "x-stainless-lang" in answer.headers["access-control-allow-headers"]
        assert "DELETE" in answer.headers["access-control-allow-methods"]


async def test_origins_page_may_read_errors_and_request_id() -> None:
    async with open_api(keys=KEYS) as api:
        refused, answered = await ask(api), await ask(api, authorization="Bearer k")
        assert (refused.status_code, answered.status_code) == (401, 200)
        for answer in (refused, answered):
            assert answer.headers["access-control-allow-origin"] == "*"
            assert header_names.REQUEST_ID in answer.headers["access-control-expose-headers"]
            assert answer.headers[header_names.REQUEST_ID]
        assert refused.headers["www-authenticate"] == 'Bearer realm="baton"'


async def test_options_without_a_preflight_is_a_method_like_any_other() -> None:
    async with open_api(keys=KEYS) as api:
        assert (await api.http.options("/v1/models")).status_code == 401
