"""One API per test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest

from baton_engine.api.http import HttpServer
from tests.engine.api.api import Api, open_api
from tests.plain_http import PLAIN


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with open_api() as api:
        yield api


@pytest.fixture
async def server(api: Api) -> AsyncIterator[HttpServer]:
    """The same API behind a real socket."""
    async with HttpServer(api.app, "127.0.0.1", 0, api.served.drain) as server:
        yield server


@pytest.fixture
async def sdk(server: HttpServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"http://{server.address}/v1",
        api_key="none",
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=PLAIN),
    ) as client:
        yield client
