"""
A frontend's side of the connection: the engine of another process, as the API uses it.

If the connection is lost, all requests end with an error: the process that computed them is gone.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import msgspec

from baton_api.errors import InvalidRequest, NotReady
from baton_api.messages import TokenChoice
from baton_api.sampling import Constraint, Thinking
from baton_engine.client import EngineClient
from baton_engine.frontends import messages
from baton_engine.frontends.messages import Accepted, Hello, Outcome, Prepared, ToFrontend, Tokens
from baton_engine.requests import FinishReason, GrammarMatcher, Output, RemotePrefill, Request
from baton_http.link import LinkProtocol, RemoteError

GONE = "The process that computes has ended. Try again."


@dataclass(frozen=True, slots=True)
class PrefillAddress:
    """A prefill worker, which the other process connects to. Stands for a `RemotePrefill`."""

    address: str
    ticket: str
    request_id: str


class PreparedConstraint:
    """A constraint that the other process has compiled. Stands for the function that creates matchers."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self) -> GrammarMatcher:
        return cast(GrammarMatcher, self)


class EngineLink(LinkProtocol):
    """The connection to the process that computes."""

    def __init__(self) -> None:
        super().__init__()
        self._decoder = msgspec.msgpack.Decoder(ToFrontend)
        self.hello: asyncio.Future[Hello] = self._loop.create_future()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self.engine: RemoteEngine | None = None
        self.on_question: Callable[
            [messages.Report | messages.AbortNamed | messages.Adapters | messages.Drain], None
        ]
        """Called with what the other process asks. Set it before the first question."""

    def on_frame(self, frame: memoryview) -> None:
        message = self._decoder.decode(frame)
        match message:
            case Hello():
                self.hello.set_result(message)
            case Tokens() | Outcome() | Accepted() | Prepared():
                assert self.engine is not None
                self.engine.receive(message)
            case _:
                self.on_question(message)

    def on_closed(self) -> None:
        if self.engine is not None:
            self.engine.lose()
        if not self.closed.done():
            self.closed.set_result(None)
        if not self.hello.done():
            self.hello.set_exception(NotReady(GONE))
            self.hello.exception()


class RemoteEngine(EngineClient):
    """The engine of the other process. Its method `prepare` is that of `Grammars`."""

    joins = True

    def __init__(self, link: EngineLink, block_size: int) -> None:
        super().__init__(block_size)
        self._link = link
        link.engine = self
        self._numbers = itertools.count(1)
        self._requests: dict[int, Request] = {}
        """By number, until their end."""
        self._number_of: dict[str, int] = {}
        self._accepting: dict[int, asyncio.Future[None]] = {}
        self._preparing: dict[int, asyncio.Future[None]] = {}
        self._lost = False

    async def prepare(
        self, constraint: Constraint | None, thinking: Thinking | None, tenant: str = ""
    ) -> Callable[[], GrammarMatcher]:
        """See `Grammars.prepare`."""
        self._check()
        number = next(self._numbers)
        ready = self._preparing[number] = asyncio.get_running_loop().create_future()
        self._link.send(messages.Prepare(number, constraint, thinking, tenant))
        try:
            await ready
        except asyncio.CancelledError:
            self._link.send(messages.Unprepare(number))
            raise
        finally:
            del self._preparing[number]
        prepared = PreparedConstraint(number)
        # Its requests are submitted before it is collected, and the messages keep their order. The collector
        # runs on any thread.
        loop = asyncio.get_running_loop()
        unprepare = messages.Unprepare(number)
        weakref.finalize(prepared, loop.call_soon_threadsafe, self._link.send, unprepare).atexit = False
        return prepared

    def finish(self, request_id: str) -> None:
        if (number := self._number_of.get(request_id)) is not None:
            self._link.send(messages.Finish(number))

    def abort(self, request_id: str) -> None:
        if (number := self._number_of.get(request_id)) is not None:
            self._link.send(messages.Abort(number))

    def receive(self, message: Tokens | Outcome | Accepted | Prepared) -> None:
        """Take a message of the other process."""
        match message:
            case Tokens(numbers, tokens):
                for number, token in zip(numbers, tokens, strict=True):
                    request = self._requests.get(number)
                    if request is not None:
                        self._streams[request.id].append(Output(request.id, (TokenChoice(token=token),)))
            case Outcome():
                self._end_or_continue(message)
            case Accepted(number):
                self._settle(number, None)
            case Prepared(number, error):
                ready = self._preparing.get(number)
                if ready is not None and not ready.done():
                    if error is None:
                        ready.set_result(None)
                    else:
                        ready.set_exception(error.error())

    def lose(self) -> None:
        """End all requests: the other process is gone."""
        self._lost = True
        for number in list(self._requests):
            self._end_or_continue(_lost(number))
        for ready in self._preparing.values():
            if not ready.done():
                ready.set_exception(NotReady(GONE))

    def _check(self) -> None:
        if self._lost:
            raise NotReady(GONE)

    def _submit(self, request: Request) -> asyncio.Future[None]:
        self._check()
        if request.id in self._streams:
            raise InvalidRequest(f"A request with the id {request.id[:128]!r} is already being served.")
        number = next(self._numbers)
        matcher, remote, adapter = request.matcher, request.remote, request.adapter
        prefill = cast("PrefillAddress | None", remote)
        self._link.send(
            messages.Submit(
                number,
                request.id,
                request.prompt,
                request.sampling,
                request.salt,
                None if adapter is None else (adapter.name, adapter.digest),
                None if request.hashes is None else tuple(request.hashes),
                0 if matcher is None else cast(PreparedConstraint, matcher).number,
                request.client_id,
                request.trace,
                request.step_summary is not None,
                request.prediction,
                request.tenant,
                request.patient,
                None if prefill is None else (prefill.address, prefill.ticket, prefill.request_id),
            )
        )
        self._requests[number] = request
        self._number_of[request.id] = number
        accepted = self._accepting[number] = asyncio.get_running_loop().create_future()
        return accepted

    def _end_or_continue(self, message: Outcome) -> None:
        number = message.number
        request = self._requests.get(number)
        error = None if message.error is None else message.error.error()
        self._settle(number, error)
        if request is None:
            return
        if message.summary is not None and request.step_summary is not None:
            for name in ("arrived", "first_chunk", "prompt", "decode"):
                setattr(request.step_summary, name, getattr(message.summary, name))
        output = Output(
            request.id,
            tokens=message.tokens,
            finish=message.finish,
            stop_id=message.stop_id,
            cached_tokens=message.cached_tokens,
            peer_tokens=message.peer_tokens,
            tier_tokens=message.tier_tokens,
            tail=message.tail,
            fallback=message.fallback,
            error=error,
            relay=message.relay,
            timing=message.timing,
            prompt_output=None if message.scores is None else message.scores.unpacked(),
        )
        self._deliver([output])
        if message.finish is not None:
            self._requests.pop(number, None)

    def _forget(self, request_id: str) -> None:
        super()._forget(request_id)
        number = self._number_of[request_id]
        self._requests.pop(number, None)
        # `drop` aborts after this, so the number stays until the next turn of the loop.
        asyncio.get_running_loop().call_soon(self._forget_number, request_id, number)

    def _forget_number(self, request_id: str, number: int) -> None:
        if self._number_of.get(request_id) == number:
            del self._number_of[request_id]

    def _settle(self, number: int, error: Exception | None) -> None:
        waiting = self._accepting.pop(number, None)
        if waiting is None or waiting.done():
            return
        if error is None:
            waiting.set_result(None)
        else:
            waiting.set_exception(error)
            waiting.exception()  # the iterator raises it too


def _lost(number: int) -> Outcome:
    return Outcome(number, finish=FinishReason.ERROR, error=RemoteError.of(NotReady(GONE)))


def remote_prefill(address: str, ticket: str, request_id: str) -> RemotePrefill:
    """What stands for the prefill worker of a request."""
    return cast(RemotePrefill, PrefillAddress(address, ticket, request_id))
