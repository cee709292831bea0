"""Texts of megabytes: refused before they are tokenized if they cannot fit, and other requests never wait."""

from __future__ import annotations

import asyncio
import re
import threading
from typing import Any

import pytest
from starlette.types import Scope

from baton_api.errors import CONTEXT_LENGTH_EXCEEDED
from baton_engine.api.bodies import LONG, VERY_LONG, JsonEndpoint
from baton_engine.api.fields import Fields
from baton_engine.api.served import Served
from baton_engine.model.embedder import Embedder
from baton_engine.requests import Pooling
from baton_engine.settings import WorkerSettings
from tests.engine.api.api import CONTEXT, MODEL, TOKENIZER, USER, Api, open_api
from tests.engine.api.test_validation import assert_error

LONGEST = len("<|assistant|>")
"""Characters of the tokenizer's longest token."""
FITS = CONTEXT * LONGEST
"""Most characters of a text that might fit."""


def bodies(text: str) -> dict[str, tuple[str, dict[str, Any], str]]:
    """Path, body and the field with the text, of every way into the tokenizer with a limit."""
    user = [{"role": "user", "content": text}]
    return {
        "chat": ("/v1/chat/completions", {"messages": user}, "messages"),
        "prediction": (
            "/v1/chat/completions",
            {"messages": USER, "prediction": {"type": "content", "content": text}},
            "prediction.content",
        ),
        "completions": ("/v1/completions", {"prompt": text}, "prompt"),
        "completions, several": ("/v1/completions", {"prompt": ["a", text]}, "prompt[1]"),
        "responses": ("/v1/responses", {"input": text}, "input"),
        "messages": ("/v1/messages", {"messages": user, "max_tokens": 1}, "messages"),
        "generate": ("/generate", {"text": text}, "text"),
        "embeddings": ("/v1/embeddings", {"input": text}, "input"),
        "score": ("/v1/score", {"text_1": "a", "text_2": ["b", text]}, "text_2[1]"),
        "rerank": ("/v1/rerank", {"query": "a", "documents": [text]}, "documents[0]"),
    }


@pytest.mark.parametrize("kind", bodies(""))
async def test_text_that_cannot_fit_is_refused_untokenized(kind: str) -> None:
    """The message says "at least": nobody counted."""
    path, body, param = bodies("x" * (FITS + 1))[kind]
    async with open_api(embedder=Embedder(pooling=Pooling.MEAN), hidden=TOKENIZER.vocab_size) as api:
        response = await api.http.post(path, json={"model": MODEL} | body)
        assert response.status_code == 400, response.text
        assert re.search(r"has at least 51[3-6] prompt tokens", response.json()["error"]["message"])
        if path != "/v1/messages":  # Anthropic's errors have no more
            assert_error(response, 400, CONTEXT_LENGTH_EXCEEDED, param)


@pytest.mark.parametrize("kind", bodies(""))
async def test_text_that_may_fit_is_counted(kind: str) -> None:
    path, body, _ = bodies("x" * (FITS - 100))[kind]
    async with open_api(embedder=Embedder(pooling=Pooling.MEAN), hidden=TOKENIZER.vocab_size) as api:
        response = await api.http.post(path, json={"model": MODEL} | body)
        assert "at least" not in response.text


async def test_longest_text_of_the_context_is_answered() -> None:
    async with open_api() as api:
        text = "<|assistant|>" * (CONTEXT - 1)
        answer = await api.complete(prompt=text, max_tokens=1)
        assert answer.json()["usage"]["prompt_tokens"] == CONTEXT - 1


async def test_text_of_any_length_is_cut_if_the_worker_cuts() -> None:
    async with open_api(settings=WorkerSettings(allow_auto_truncate=True)) as api:
        answer = await api.complete(prompt="x" * 2 * FITS, max_tokens=1)
        assert answer.status_code == 200, answer.text


async def test_tokens_of_any_text_are_counted(api: Api) -> None:
    text = "x" * 2 * FITS
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    counted = await api.http.post("/v1/messages/count_tokens", json=body)
    assert counted.json()["input_tokens"] > len(text)
    assert (await api.http.post("/tokenize", json={"prompt": text})).json()["count"] == len(text)


MANY = 100
"""More than there are threads."""


@pytest.mark.parametrize("size, others", [(LONG, 100), (VERY_LONG, 100), (VERY_LONG, LONG)])
async def test_body_does_not_wait_for_much_longer_ones(api: Api, size: int, others: int) -> None:
    """`size` and `others` in bytes."""
    go, begun = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def work(fields: Fields, served: Served) -> int:
        if fields.get("waits"):
            loop.call_soon_threadsafe(begun.set)
            assert go.wait(300)
        return len(fields.text("text") or "")

    endpoint = JsonEndpoint(api.served, work)
    waiting = [asyncio.create_task(call(endpoint, size, waits=True)) for _ in range(MANY)]
    await begun.wait()
    try:
        async with asyncio.timeout(60):
            assert await call(endpoint, others) == str(others).encode()
    finally:
        go.set()
        assert await asyncio.gather(*waiting) == [str(size).encode()] * MANY


async def call(endpoint: JsonEndpoint, size: int, waits: bool = False) -> bytes:
    """Post a text of so many bytes, and return the answer's body."""
    body = b'{"waits":%s,"text":"%s"}' % (b"true" if waits else b"false", b"x" * size)
    sent: list[bytes] = []
    received = [{"type": "http.request", "body": body}]

    async def receive() -> Any:
        return received.pop() if received else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    scope: Scope = {"type": "http", "headers": [(b"content-type", b"application/json")]}
    await endpoint(scope, receive, send)
    return b"".join(sent)
