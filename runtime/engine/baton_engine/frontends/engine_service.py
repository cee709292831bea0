"""
The computing process's side of the connections to its frontends.

A frontend that ends has all its requests aborted. What this process asks of frontends, it asks all of them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from baton_api.errors import AdapterNotFound, BatonError, InternalError
from baton_engine.adapters import AdapterRegistry
from baton_engine.api.served import OtherProcesses, Served
from baton_engine.client import AsyncEngine
from baton_engine.frontends import messages
from baton_engine.frontends.messages import (
    Abort,
    Adapter,
    Finish,
    FromFrontend,
    Hello,
    Outcome,
    PackedLogprobs,
    Prepare,
    Reply,
    Serving,
    Submit,
    Tokens,
    Unprepare,
)
from baton_engine.metrics.exposition import Sample
from baton_engine.requests import FinishReason, GrammarMatcher, LoadedAdapter, Output, PromptLogprobs, Request
from baton_engine.tracing import StepSummary
from baton_http.link import LinkProtocol, RemoteError

log = logging.getLogger(__name__)

REPLY_S = 5.0
"""Seconds to wait for a frontend's reply, unless it drains."""


class EngineService(OtherProcesses):
    """Serves one engine to frontends."""

    def __init__(self) -> None:
        self.served: Served | None = None
        self.connections: set[FrontendConnection] = set()
        self.draining = False
        self.past: list[Sample] = []
        """The last metrics of frontends that have ended: counters never fall."""

    @property
    def engine(self) -> AsyncEngine:
        assert self.served is not None
        return self.served.computing

    async def samples(self) -> list[Sample]:
        """The metrics of all frontends."""
        await self._ask(lambda number: messages.Report(number))
        return [*self.past, *(sample for connection in self.connections for sample in connection.samples)]

    async def requests(self) -> list[dict[str, Any]]:
        """The latest requests of all frontends, as `Exchange.body`."""
        replies = await self._ask(lambda number: messages.Report(number))
        return [body for reply in replies for body in reply.requests]

    async def abort(self, names: Sequence[str] | None) -> int:
        """Abort the requests with these names, or all. Returns their number."""
        given = None if names is None else tuple(names)
        return sum(
            reply.aborted for reply in await self._ask(lambda number: messages.AbortNamed(number, given))
        )

    async def adapters_changed(self) -> None:
        """Return when all frontends know the adapters."""
        assert self.served is not None
        listed = adapters_of(self.served.adapters)
        await self._ask(lambda number: messages.Adapters(number, listed))

    def catch_up(self, connection: FrontendConnection) -> None:
        """Tell a frontend that begins to serve what changed since the start of the worker."""
        assert self.served is not None
        listed = adapters_of(self.served.adapters)
        connection.ask(lambda number: messages.Adapters(number, listed))
        if self.draining:
            connection.ask(lambda number: messages.Drain(number, 0))

    async def drain(self, seconds: float) -> None:
        """Return when no frontend has a request, at most after `seconds`."""
        self.draining = True
        await self._ask(lambda number: messages.Drain(number, seconds), seconds + REPLY_S)

    async def _ask(
        self, question: Callable[[int], messages.Message], seconds: float = REPLY_S
    ) -> list[Reply]:
        """Ask all frontends. One that does not reply in time, or ends, has an empty reply."""
        replies = [connection.ask(question) for connection in self.connections if connection.serving.is_set()]
        if replies:
            await asyncio.wait(replies, timeout=seconds)
        return [reply.result() for reply in replies if reply.done()]


def summed(samples: Sequence[Sample]) -> list[Sample]:
    """Return one sample for each series."""
    sums: dict[tuple[str, str, tuple[tuple[str, str], ...]], float] = {}
    for family, name, labels, value in samples:
        key = family, name, tuple(labels.items())
        sums[key] = sums.get(key, 0.0) + value
    return [(family, name, dict(labels), value) for (family, name, labels), value in sums.items()]


def adapters_of(registry: AdapterRegistry) -> tuple[Adapter, ...]:
    """The adapters as messages name them."""
    loaded = [registry.get(name) for name in registry.names]
    return tuple(
        Adapter(adapter.name, adapter.path, adapter.digest, adapter.rank)
        for adapter in loaded
        if adapter is not None
    )


class FrontendConnection(LinkProtocol):
    def __init__(self, service: EngineService) -> None:
        super().__init__()
        self._service = service
        self._decoder = msgspec.msgpack.Decoder(FromFrontend)
        self._sinks: dict[int, RemoteSink] = {}
        self._prepared: dict[int, Callable[[], GrammarMatcher]] = {}
        self._preparing: dict[int, asyncio.Task[None]] = {}
        self._questions: dict[int, asyncio.Future[Reply]] = {}
        self._asked = 0
        self._numbers: list[int] = []
        self._tokens: list[int] = []
        self.samples: list[Sample] = []
        """The metrics of the frontend's last reply: a slow one still counts."""
        self.serving = asyncio.Event()
        """Set when the frontend accepts connections."""
        self.closed: asyncio.Future[None] = self._loop.create_future()

    # --- To the frontend ---

    def hello(self, hello: Hello) -> None:
        self.send(hello)
        self._service.connections.add(self)
        self._service.engine.delivered.add(self.send_outputs)

    def ask(self, question: Callable[[int], messages.Message]) -> asyncio.Future[Reply]:
        """Send a question, and return the future of its reply."""
        self._asked += 1
        reply = self._questions[self._asked] = self._loop.create_future()
        self.send(question(self._asked))
        return reply

    def add_token(self, number: int, token: int) -> None:
        """Send a token with those of other requests of this step."""
        self._numbers.append(number)
        self._tokens.append(token)

    def send_tokens(self) -> None:
        """Send the tokens that are left."""
        if self._numbers:
            self.send(Tokens(self._numbers, self._tokens))
            self._numbers, self._tokens = [], []

    def send_outputs(self) -> None:
        """
        Write the outputs of a step at once.

        In the next turn of the event loop, the engine's thread might hold the interpreter meanwhile, while it
        launches the next pass.
        """
        self.send_tokens()
        self.flush()

    def forget(self, number: int) -> None:
        self._sinks.pop(number, None)

    # --- From the frontend ---

    def on_frame(self, frame: memoryview) -> None:
        message = self._decoder.decode(frame)
        match message:
            case Submit():
                self._submit(message)
            case Finish(number):
                if number in self._sinks:
                    self._service.engine.finish(self._sinks[number].request.id)
            case Abort(number):
                if number in self._sinks:
                    self._service.engine.abort(self._sinks[number].request.id)
            case Prepare():
                task = self._preparing[message.number] = self._loop.create_task(self._prepare(message))
                # Not at the end of the task, which may be cancelled before it begins.
                task.add_done_callback(lambda _: self._preparing.pop(message.number, None))
            case Unprepare(number):
                self._prepared.pop(number, None)
                if number in self._preparing:
                    self._preparing[number].cancel()
            case Reply():
                self.samples = message.samples or self.samples
                question = self._questions.pop(message.number, None)
                if question is not None and not question.done():
                    question.set_result(message)
            case Serving():
                self.serving.set()
                self._service.catch_up(self)

    def on_closed(self) -> None:
        self._service.connections.discard(self)
        self._service.engine.delivered.discard(self.send_outputs)
        self._service.past = summed([*self._service.past, *self.samples])
        for task in self._preparing.values():
            task.cancel()
        for sink in self._sinks.values():
            self._service.engine.drop(sink.request.id, sink)
        self._sinks.clear()
        for question in self._questions.values():
            if not question.done():
                question.set_result(Reply(0, samples=[]))
        if not self.closed.done():
            self.closed.set_result(None)

    def _submit(self, message: Submit) -> None:
        number, served = message.number, self._service.served
        assert served is not None
        try:
            remote = None
            if message.prefill is not None and served.remote is not None:
                remote = served.remote(*message.prefill)
            request = Request(
                id=message.id,
                prompt=message.prompt,
                sampling=message.sampling,
                salt=message.salt,
                adapter=self._adapter(message.adapter),
                hashes=message.hashes,
                matcher=self._prepared[message.prepared]() if message.prepared else None,
                client_id=message.client_id,
                trace=message.trace,
                step_summary=StepSummary() if message.traced else None,
                prediction=message.prediction,
                tenant=message.tenant,
                patient=message.patient,
                remote=remote,
            )
            sink = RemoteSink(self, number, request)
            self._service.engine.submit_for(request, sink)
        except Exception as error:
            if not isinstance(error, BatonError):
                log.exception("A request of a frontend cannot be submitted.")
            self.send(rejection(number, error))
        else:
            self._sinks[number] = sink
            self.send(messages.Accepted(number))

    def _adapter(self, named: tuple[str, str] | None) -> LoadedAdapter | None:
        if named is None:
            return None
        assert self._service.served is not None
        name, digest = named
        adapters = self._service.served.adapters
        adapter = adapters.get(name)
        if adapter is None or adapter.digest != digest:
            adapter = adapters.of_digest(digest)
        if adapter is None:  # unloaded since the frontend read the request
            raise AdapterNotFound(f"The lora adapter '{name}' cannot be found.")
        return adapter

    async def _prepare(self, message: Prepare) -> None:
        assert self._service.served is not None
        grammars, number, failure = self._service.served.grammars, message.number, None
        try:
            self._prepared[number] = await grammars.prepare(
                message.constraint, message.thinking, message.tenant
            )
        except Exception as error:
            if not isinstance(error, BatonError):
                log.exception("A constraint of a frontend cannot be prepared.")
            failure = remote_error(error)
        self.send(messages.Prepared(number, failure))


class RemoteSink:
    """Sends the outputs of one request to its frontend."""

    __slots__ = ("_begun", "_connection", "_number", "request")

    def __init__(self, connection: FrontendConnection, number: int, request: Request) -> None:
        self._connection = connection
        self._number = number
        self._begun = False
        self.request = request

    def append(self, output: Output) -> None:
        connection = self._connection
        if self._begun and messages.is_plain(output):
            connection.add_token(self._number, output.tokens[0].token)
            return
        self._begun = True
        connection.send_tokens()  # this request's last token may be among them
        connection.send(outcome(self._number, output, self.request.step_summary))
        if output.finish is not None:
            connection.forget(self._number)


def outcome(number: int, output: Output, summary: StepSummary | None = None) -> Outcome:
    """`output` as a message, with the summary if it is the last one of its request."""
    scores = output.prompt_output
    return Outcome(
        number,
        tokens=output.tokens,
        finish=output.finish,
        stop_id=output.stop_id,
        cached_tokens=output.cached_tokens,
        peer_tokens=output.peer_tokens,
        tier_tokens=output.tier_tokens,
        error=None if output.error is None else remote_error(output.error),
        relay=output.relay,
        timing=output.timing,
        scores=PackedLogprobs.of(scores) if isinstance(scores, PromptLogprobs) else None,
        tail=output.tail,
        fallback=output.fallback,
        summary=None if output.finish is None else summary,
    )


def remote_error(error: Exception) -> RemoteError:
    return RemoteError.of(error if isinstance(error, BatonError) else InternalError())


def rejection(number: int, error: Exception) -> Outcome:
    """The end of a request that the engine has not accepted."""
    return outcome(number, Output("", finish=FinishReason.ERROR, error=error))
