"""
The process of one frontend: `python -m baton_engine.frontends.process LINK PORT`.

It accepts connections from the worker's port, and serves the endpoints that generate text: it validates
requests, renders templates, tokenizes, detokenizes and streams. The process that computes serves all other
paths, and is asked over the link. Both are inherited descriptors.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
import signal
import socket
import sys

import uvloop
from starlette.types import ASGIApp, Receive, Scope, Send

from baton_api import collector, logs, mutual_tls
from baton_api.errors import NotReady
from baton_api.keys import Keys
from baton_api.workers import Load
from baton_engine.adapters import AdapterRegistry
from baton_engine.api.app import create_generating
from baton_engine.api.http import HttpServer, RequestDrain
from baton_engine.api.operations import abort_named
from baton_engine.api.parameters import defaults_of
from baton_engine.api.responses import endpoint as responses
from baton_engine.api.served import Served
from baton_engine.frontends import messages
from baton_engine.frontends.messages import (
    AbortNamed,
    Adapter,
    Adapters,
    Drain,
    Hello,
    Question,
    Reply,
    Report,
)
from baton_engine.frontends.remote_engine import EngineLink, RemoteEngine, remote_prefill
from baton_engine.metrics.exposition import ApiMetrics
from baton_engine.model.checkpoint import load_spec
from baton_engine.model.resolve import resolve
from baton_engine.model.tokenizer import Tokenizer, load_tokenizer
from baton_engine.requests import LoadedAdapter
from baton_engine.tracing import tracing_of
from baton_http.control_proxy import ControlProxy

log = logging.getLogger(__name__)

GENERATING = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/generate"})
"""Paths that a frontend serves; `baton_engine.api.app.create_generating` has their routes."""


def is_served(scope: Scope) -> bool:
    """
    Return whether a frontend serves a request itself.

    It does not serve a response that this worker stores: the next request may reach another frontend.
    """
    if scope["method"] != "POST":
        return False
    path: str = scope["path"]
    return path in GENERATING or (path == responses.PATH and responses.items_of_router(scope) is not None)


LAST_S = 5.0
"""Seconds for the answers to reach their clients after the process that computes is gone."""


class Dispatch:
    """Serves the generating endpoints, and forwards other requests to the process that computes."""

    def __init__(self, generating: ASGIApp, control: str) -> None:
        self._generating = generating
        self._control = ControlProxy(control, "This worker is stopping, or has just started")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if is_served(scope):
            await self._generating(scope, receive, send)
        else:
            await self._control(scope, receive, send)


class Frontend:
    """One frontend, from the first message on."""

    def __init__(self, link: EngineLink, hello: Hello, tokenizer: Tokenizer) -> None:
        self._link = link
        self.settings = settings = pickle.loads(hello.settings)  # noqa: S301  # of the parent process
        self.drain = RequestDrain()
        self.tls = mutual_tls.server(settings.tls_folder, settings.tls_name)
        keys = Keys(settings.api_key, settings.api_key_file)
        engine = RemoteEngine(link, hello.block_size)
        self._tasks: set[asyncio.Task[None]] = set()
        self.tracing = tracing_of(settings.tracing_endpoint, hello.worker)
        self.served = Served(
            names=hello.names,
            tokenizer=tokenizer,
            grammars=engine,
            engine=engine,
            max_model_len=hello.max_model_len,
            settings=settings,
            metrics=ApiMetrics(),
            load=_no_load,
            adapters=AdapterRegistry(),
            remote=remote_prefill if hello.fetches else None,
            tracing=self.tracing,
            keys=keys,
            defaults=defaults_of(settings, hello.sampling),
            created=hello.created,
            drain=self.drain,
        )
        self._list(hello.adapters)
        link.on_question = self._answer
        self.generating = create_generating(self.served)

    def _answer(self, question: Question) -> None:
        served = self.served
        match question:
            case Report(number):
                bodies = [exchange.body() for exchange in served.history]
                self._link.send(Reply(number, samples=served.metrics.samples(), requests=bodies))
            case AbortNamed(number, names):
                self._link.send(Reply(number, aborted=abort_named(names, served.running)))
            case Adapters(number, adapters):
                self._list(adapters)
                self._link.send(Reply(number))
            case Drain(number, seconds):
                task = asyncio.get_running_loop().create_task(self._drain(number, seconds))
                self._tasks.add(task)

    def _list(self, adapters: tuple[Adapter, ...]) -> None:
        self.served.adapters.list(
            [
                LoadedAdapter(adapter.name, adapter.path, adapter.digest, adapter.rank, None)
                for adapter in adapters
            ]
        )

    async def _drain(self, number: int, seconds: float) -> None:
        await self.drain.drain(seconds)
        self._link.send(Reply(number))


def _no_load() -> Load:
    raise AssertionError("The process that computes serves this path.")


async def run(link_socket: socket.socket, listening: socket.socket) -> None:
    """Serve until the process that computes closes the connection."""
    loop = asyncio.get_running_loop()
    _, link = await loop.create_connection(EngineLink, sock=link_socket)
    try:
        hello = await link.hello
    except NotReady:
        return  # the worker ends, or needs no frontend
    checkpoint = resolve(hello.checkpoint)
    tokenizer = await asyncio.to_thread(load_tokenizer, checkpoint, load_spec(checkpoint))
    frontend = Frontend(link, hello, tokenizer)
    server = HttpServer(
        Dispatch(frontend.generating, hello.control),
        frontend.settings.host,
        0,
        frontend.drain,
        frontend.tls,
        listening=listening,
    )
    async with server:
        link.send(messages.Serving())
        await link.closed
        with contextlib.suppress(TimeoutError):
            await frontend.drain.drain(LAST_S)
    if frontend.tracing is not None:
        await frontend.tracing.close()


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that computes ends this one in its turn
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:3])
    logs.begin(logs.read_format(sys.argv[3]), sys.argv[4])
    for opened in (link, listening):
        opened.setblocking(False)
    collector.run_rarely()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(link, listening))


if __name__ == "__main__":
    main()
