"""
Workers without a model, to measure routers in front of them: the endpoints of all routers, on one core.

A stream has as many tokens as the body's `max_tokens` says, and each is one event in a write of its own. The
first comes at once, the others with the worker's steps, `STEP_S` apart, each for all of its streams. A router
that asks for Baton's resume state gets it in the same writes. A prefill worker generates one token. A chat
with `"hold": true` is a stream that sends one event and then waits for `GET /release`.
Answers of /v1/responses come whole.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import re
import resource
from collections.abc import Sequence
from functools import lru_cache, partial
from multiprocessing import Process
from typing import cast

import httptools
import uvloop

from baton_api import headers
from baton_api.prompt_report import PromptReport
from baton_api.stream_comments import Beginning, begin_line, tokens_line

PREFILL_PORTS, DECODE_PORTS = (9101, 9102), (9103, 9104)
PLAIN_PORTS = (9105, 9106, 9107, 9108)
STEP_S = 0.005
"""Seconds between two tokens of a stream."""

BYTES_PER_TOKEN = 4
OWN_BYTES = 200
"""Bytes at the end of a prompt that no other one has. The part before them is cached from the second time on,
and a whole prompt too."""

COMPUTE_S, TOKEN_S = 1e-4, 2e-5
"""Reported time of a prompt and of each of its tokens. With 0, no cache would seem useful."""


def _answer(status: bytes, kind: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (status, kind, len(body)) + body


def _chunked(parts: Sequence[bytes]) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts)


_CHUNK = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
_CHOICE = {"index": 0, "delta": {"content": "word "}, "finish_reason": None}
EVENT = b"data: " + json.dumps({**_CHUNK, "choices": [_CHOICE]}).encode() + b"\n\n"
WORD = b'"word "'
"""The text of each event, once."""

LAST = b"data: [DONE]\n\n"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-baton-prompt: %b\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
BEGINNING = begin_line(Beginning("c", 1, 1, 0))
TOKENS = tokens_line([42], ended=False)
LAST_TOKENS = tokens_line([42], ended=True)
WHOLE = json.dumps(
    {
        "id": "c", "object": "chat.completion", "created": 1, "model": "m",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12},
        "kv_transfer_params": {"remote_block_ids": [1], "remote_engine_id": "e", "remote_port": 1,
                               "remote_host": "127.0.0.1", "do_remote_prefill": True,
                               "do_remote_decode": False},
    }
).encode()  # fmt: skip
WHOLE_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-baton-prompt: %%b\r\ncontent-length: %d\r\n\r\n"
    % len(WHOLE)
)


RESPONSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-baton-prompt: %b\r\n"
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens":(\d+)')
_numbers = itertools.count()


@lru_cache(1024)
def prompt_report(tokens: int, cached: int, remote: bool) -> bytes:
    """What Baton's workers say of a prompt, so that the router learns as much as from real ones."""
    compute_s = COMPUTE_S + (tokens - cached) * TOKEN_S
    report = PromptReport(
        tokens=tokens,
        cached=cached,
        held=0,
        queue_s=0.0,
        compute_s=compute_s,
        transfer_s=1e-4,
        remote=remote,
    )
    return report.encode().encode()


@lru_cache(1024)
def rendered(tokens: int) -> bytes:
    """The prompt's tokens, for which vllm-router asks vLLM before it chooses a worker."""
    body = {"request_id": "c", "model": "m", "token_ids": [1] * tokens, "sampling_params": {}}
    return _answer(b"200 OK", b"application/json", json.dumps(body).encode())


def response() -> bytes:
    """One to /v1/responses, with its length."""
    body = json.dumps(
        {
            "id": f"resp_{next(_numbers)}", "object": "response", "created_at": 1, "status": "completed",
            "model": "m", "output": [], "usage": {"input_tokens": 10, "output_tokens": 2, "total_tokens": 12},
        }
    ).encode()  # fmt: skip
    return b"content-length: %d\r\n\r\n" % len(body) + body


class Steps:
    """The streams of one worker: each step writes one event of each."""

    def __init__(self) -> None:
        self._streams: dict[asyncio.Transport, tuple[int, bool]] = {}
        """Tokens to come, and whether the router follows them."""

    def add(self, transport: asyncio.Transport, tokens: int, follows: bool) -> None:
        if not self._streams:
            asyncio.get_running_loop().call_later(STEP_S, self._step)
        self._streams[transport] = tokens, follows

    def _step(self) -> None:
        due = asyncio.get_running_loop().time() + STEP_S
        for transport, (tokens, follows) in list(self._streams.items()):
            if tokens == 1 or transport.is_closing():
                del self._streams[transport]
            else:
                self._streams[transport] = tokens - 1, follows
            transport.write(_token(follows, last=tokens == 1))
        if self._streams:
            asyncio.get_running_loop().call_at(due, self._step)


def _token(follows: bool, last: bool) -> bytes:
    """The write with one token, and with the end of the stream behind the last one."""
    if not last:
        return _FOLLOWED if follows else _PLAIN
    return _FOLLOWED_LAST if follows else _PLAIN_LAST


_PLAIN, _FOLLOWED = _chunked([EVENT]), _chunked([EVENT + TOKENS])
_PLAIN_LAST = _chunked([EVENT, LAST, b""])
_FOLLOWED_LAST = _chunked([EVENT + LAST_TOKENS, LAST, b""])


class MockWorker(asyncio.Protocol):
    """One connection to a worker of a role."""

    def __init__(
        self, role: str, port: int, holding: set[MockWorker], cached: set[int], steps: Steps
    ) -> None:
        """`holding` are those whose streams wait, `cached` the beginnings that the worker has seen."""
        load = {
            "role": role, "model": "m", "total_blocks": 100_000, "free_blocks": 100_000,
            "compatibility": "c", "epoch": "1", "control": f"127.0.0.1:{port}" if role == "prefill" else "",
        }  # fmt: skip
        about = {
            "model_path": "/none", "tokenizer_path": "/none", "is_generation": True, "served_model_name": "m",
            "model_id": "m", "version": "0", "internal_states": [{}], "dp_size": 1, "tp_size": 1,
        }  # fmt: skip
        model = {"id": "m", "object": "model", "created": 1, "owned_by": "x", "max_model_len": 131072}

        def page(content: object) -> bytes:
            return _answer(b"200 OK", b"application/json", json.dumps(content).encode())

        self._prefills = role == "prefill"
        self._holding = holding
        self._cached = cached
        self._steps = steps
        self._pages = {b"/load": page(load), b"/v1/models": page({"object": "list", "data": [model]})}
        self._other = page(about)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are not subclasses
        self._parser = httptools.HttpRequestParser(self)
        self._body: list[bytes] = []
        self._path = b""
        self._remote, self._follows = False, False

    def connection_lost(self, exc: Exception | None) -> None:
        self._holding.discard(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path = url

    def on_header(self, name: bytes, value: bytes) -> None:
        if name == headers.PREFILL.encode():
            self._remote = True
        elif name == headers.RESUMABLE.encode():
            self._follows = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        if self._parser.get_method() == b"POST":
            self._answer(b"".join(self._body))
        else:
            if self._path == b"/release":
                self._release()
            self._transport.write(self._pages.get(self._path, self._other))
        self._body.clear()
        self._path, self._remote, self._follows = b"", False, False

    def _answer(self, body: bytes) -> None:
        tokens = len(body) // BYTES_PER_TOKEN + 1
        report = prompt_report(tokens, self._cached_tokens(body, tokens), self._remote)
        fields = (body[:200] + body[-500:]).replace(b" ", b"")  # routers may order them as they like
        if self._path.endswith(b"/render"):
            self._transport.write(rendered(tokens))
        elif self._path == b"/v1/responses":
            self._transport.write(RESPONSE_HEAD % report + response())
        elif b'"stream":true' not in fields:
            self._transport.write(WHOLE_HEAD % report + WHOLE)
        elif b'"hold":true' in fields:
            self._holding.add(self)
            self._transport.write(STREAM_HEAD % report + _chunked([EVENT]))
        else:
            self._stream(report, fields)

    def _cached_tokens(self, body: bytes, tokens: int) -> int:
        """All but the last token of a prompt that came before, else those of its beginning if that came."""
        whole, beginning = hash(body), hash(body[:-OWN_BYTES])
        if whole in self._cached:
            return tokens - 1
        cached = max(0, tokens - OWN_BYTES // BYTES_PER_TOKEN) if beginning in self._cached else 0
        self._cached |= {whole, beginning}
        return cached

    def _stream(self, report: bytes, fields: bytes) -> None:
        given = None if self._prefills else _MAX_TOKENS.search(fields)
        tokens = int(given[1]) if given else 1
        beginning = _chunked([BEGINNING]) if self._follows else b""
        self._transport.write(STREAM_HEAD % report + beginning + _token(self._follows, last=tokens == 1))
        if tokens > 1:
            self._steps.add(self._transport, tokens - 1, self._follows)

    def _release(self) -> None:
        for one in self._holding:
            one._transport.write(_chunked([EVENT, LAST, b""]))
        self._holding.clear()


def started(core: int) -> Process:
    """All of them in one process on this core."""
    process = Process(target=_serve, args=(core,), daemon=True)
    process.start()
    return process


def more_files() -> None:
    """As many open files as may be."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _serve(core: int) -> None:
    os.sched_setaffinity(0, {core})
    more_files()

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        holding: set[MockWorker] = set()
        for role, ports in (("prefill", PREFILL_PORTS), ("decode", DECODE_PORTS), ("both", PLAIN_PORTS)):
            for port in ports:
                make = partial(MockWorker, role, port, holding, set(), Steps())
                await loop.create_server(make, "127.0.0.1", port, backlog=4096)
        await asyncio.Event().wait()

    uvloop.run(serve())
