"""One API per test. Some files' tests run twice: with all in one process, and with a frontend."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator

import openai
import pytest

from baton_engine.api.http import HttpServer
from tests.engine.api import api as apis
from tests.engine.api.api import Api, open_api
from tests.plain_http import PLAIN

BOTH_MODES = frozenset(
    {
        "chat.test_chat",
        "chat.test_tools",
        "messages.test_messages",
        "test_aborting",
        "test_adapters",
        "test_completions",
        "test_disconnect",
        "test_metrics",
        "test_overload",
        "test_prompt_logprobs",
        "test_resuming",
        "test_sglang_generate",
        "test_stop_strings",
        "test_streaming",
        "test_structured_output",
        "test_validation",
    }
)
"""Files whose tests run in both modes, but those with the mark `one_process`."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    name = metafunc.module.__name__.removeprefix(f"{__package__}.")
    marked = metafunc.definition.get_closest_marker("one_process")
    if name in BOTH_MODES and marked is None and inspect.iscoroutinefunction(metafunc.function):
        metafunc.parametrize("split", [False, True], ids=["one", "split"], indirect=True)


@pytest.fixture(autouse=True)
def split(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a frontend serves the APIs of this test."""
    chosen: bool = getattr(request, "param", False)
    monkeypatch.setattr(apis, "split_by_default", chosen)
    return chosen


@pytest.fixture
async def api(split: bool) -> AsyncIterator[Api]:
    async with open_api(split=split) as api:
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
