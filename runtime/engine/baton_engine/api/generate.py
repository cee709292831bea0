"""
The handler of the endpoints that generate text: one JSON object, or a stream of events.

The response starts with the first output of the engine, so that every rejection has an HTTP status. Each
further output is one write to the connection; in a process of its own, all that have come meanwhile are one
output.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from baton_api import headers
from baton_api.errors import InvalidRequest, ModelNotFound, RequestAborted
from baton_api.hashing import client_salt, root_hash
from baton_api.otlp import Attributes
from baton_engine.api import bodies
from baton_engine.api.bodies import ClientGone, until_disconnect
from baton_engine.api.choices import Choices
from baton_engine.api.exchange import Exchange, exchange_of
from baton_engine.api.fields import Fields
from baton_engine.api.parameters import read_cache_salt
from baton_engine.api.request_log import RequestLog
from baton_engine.api.resuming import read_resumption, resumable, resume_start, resume_tokens, resumed
from baton_engine.api.running import read_names
from baton_engine.api.served import Served
from baton_engine.api.streaming import FAILURE, KEEP_ALIVE
from baton_engine.api.transcript import Piece
from baton_engine.api.work import Work, with_constraint_field, with_matchers
from baton_engine.requests import FinishReason, LoadedAdapter, RemotePrefill

KEEP_ALIVE_S = 15.0
"""Idle time of a stream after which a comment is sent, because proxies close idle connections."""

SALT_LIMIT = 128
"""Maximum characters of a salt. The router's salts have 32."""

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Prepare = Callable[[Fields, Served], Work]


def check_model(fields: Fields, served: Served) -> LoadedAdapter | None:
    """Return the requested adapter, if any. Raises ModelNotFound if the worker does not serve the model."""
    model = fields.text("model")
    adapter = served.adapters.get(model)
    if model is not None and model not in served.names and adapter is None:
        raise ModelNotFound(model, served.models)
    return adapter


def named_remote(scope: Scope, served: Served, request_id: str) -> RemotePrefill | None:
    """Return the prefill worker that the router selected; None without one, or if transfers are disabled."""
    given = dict(scope["headers"])
    address = given.get(headers.PREFILL.encode(), b"").decode("latin-1")
    if served.remote is None or not address:
        return None
    ticket = given.get(headers.TICKET.encode(), b"").decode("latin-1")
    return served.remote(address, ticket, request_id)


def salt_of(scope: Scope) -> str:
    """
    Return the router's salt of the prefix cache; empty for the shared cache.

    The salt needs no authentication, because only the router knows the salts of tenants. The client's own
    salt is added later.
    """
    given: bytes = dict(scope["headers"]).get(headers.SALT.encode(), b"")
    return given[:SALT_LIMIT].decode("latin-1")


def is_patient(scope: Scope) -> bool:
    """Return whether the request has the batch class, which only lowers its priority."""
    given: bytes = dict(scope["headers"]).get(headers.CLASS.encode(), b"")
    return given == headers.BATCH_CLASS.encode()


def require_generation(served: Served) -> None:
    """Raise InvalidRequest if the model cannot generate text."""
    if not served.generates:
        raise InvalidRequest(
            f"The model {served.name!r} is an embedding model without a language model head and cannot "
            "generate text. Use /v1/embeddings, or /v1/rerank.",
            param="model",
        )


async def collected(work: Work, choices: Choices) -> Any:
    """Wait for all choices and return the whole response. Raises the errors of the engine."""
    pieces: list[list[Piece]] = [[] for _ in choices.all]
    async with contextlib.aclosing(choices.pieces()) as gained:
        async for choice, piece in gained:
            pieces[choice.index].append(piece)
    answers = [(choice, Piece.joined(pieces[choice.index])) for choice in choices.all]
    return work.shape.answer(answers, choices.usage)


class Generate:
    """An endpoint that generates text. `prepare` reads its request bodies."""

    def __init__(
        self,
        served: Served,
        prepare: Prepare,
        keep_alive_s: float = KEEP_ALIVE_S,
        *,
        model_required: bool = True,
    ) -> None:
        self._served = served
        self._prepare = prepare
        self._model_required = model_required
        self._keep_alive_s = keep_alive_s
        self._log = RequestLog(served.settings, served.tokenizer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        with self._served.drain.request():
            body, salt = await bodies.read(scope, receive), salt_of(scope)
            async with until_disconnect(receive):
                work, names, salt = await bodies.on_thread(self._read, body, salt)
                work = await with_matchers(work, self._served.grammars, exchange.tenant)
            exchange.answer_id = work.shape.id
            exchange.stream = work.parameters.streaming.wanted
            scope[FAILURE] = work.failure
            if self._served.tracing is not None:
                exchange.spans = self._served.tracing.begin("worker", exchange.trace, exchange.started)
            remote = named_remote(scope, self._served, exchange.request_id)
            followed = headers.RESUMABLE.encode() in dict(scope["headers"])
            answer_log = self._log.read(exchange, work)
            choices = Choices(
                self._served, work, exchange, remote, answer_log, salt, patient=is_patient(scope)
            )
            names = (exchange.request_id, work.shape.id, *names)
            try:
                with self._served.running.entered(names, choices):
                    if work.parameters.streaming.wanted:
                        await self._stream(work, choices, followed, receive, send)
                    else:
                        await self._answer(work, choices, receive, send)
            except BaseException as error:
                reason = FinishReason.ABORT if isinstance(error, _GONE) else FinishReason.ERROR
                self._record(choices, exchange, reason)
                raise
            self._record(choices, exchange, FinishReason.ABORT if choices.aborted else FinishReason.ERROR)

    def _read(self, body: bytes, salt: str) -> tuple[Work, tuple[str, ...], str]:
        """Return the work, the ids that can abort it, and `salt` combined with the client's salt."""
        fields = bodies.parse(body)
        if self._model_required:
            fields.require("model")
        adapter = check_model(fields, self._served)
        require_generation(self._served)
        work = self._prepare(fields, self._served)
        if work.constrained_by is None:
            work = with_constraint_field(work, fields)
        resumption = read_resumption(fields, self._served.tokenizer.vocab_size)
        if resumption is not None:
            work = resumed(work, resumption)
        salt, hashes = client_salt(salt, read_cache_salt(fields)), self._served.engine.hashes
        root = root_hash(salt, "" if adapter is None else adapter.digest)
        prompts = [replace(prompt, hashes=hashes(prompt.tokens, root)) for prompt in work.prompts]
        return replace(work, prompts=tuple(prompts), adapter=adapter), read_names(fields), salt

    async def _answer(self, work: Work, choices: Choices, receive: Receive, send: Send) -> None:
        async with until_disconnect(receive):
            encoded = msgspec.json.encode(await collected(work, choices))
        fields = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(encoded)).encode()),
            (headers.USAGE.encode(), choices.count.encode()),
            *choices.headers,
        ]
        await send({"type": "http.response.start", "status": 200, "headers": fields})
        await send({"type": "http.response.body", "body": encoded})

    async def _stream(
        self, work: Work, choices: Choices, followed: bool, receive: Receive, send: Send
    ) -> None:
        async with until_disconnect(receive):
            writer: StreamWriter | None = None
            try:
                async with contextlib.aclosing(choices.pieces()) as gained:
                    async for choice, piece in gained:
                        if writer is None:
                            fields = [*STREAM_HEADERS, *choices.headers]
                            await send({"type": "http.response.start", "status": 200, "headers": fields})
                            writer = StreamWriter(send, self._keep_alive_s)
                            if followed and resumable(work):
                                await writer.write(resume_start(work, choices.usage.cached_tokens))
                        events = work.shape.events(choice, piece, lambda: choices.usage)
                        if followed:
                            events += resume_tokens(piece) if resumable(work) else choices.count.comment()
                        if events:
                            await writer.write(events)
            except RequestAborted as error:
                if writer is None:
                    raise
                # A requested abort ends the stream regularly.
                last = work.failure(error) + work.done
            else:
                last = work.shape.closing(choices.usage)
            finally:
                if writer is not None:
                    writer.close()
        await send({"type": "http.response.body", "body": last})

    def _record(self, choices: Choices, exchange: Exchange, otherwise: FinishReason) -> None:
        """Record the finish reason of each choice. The default is `otherwise`."""
        exchange.ended = time.monotonic()
        for choice in choices.all:
            reason = choice.transcript.finish or otherwise
            exchange.finish_reasons.append(reason)
            self._served.metrics.ended(
                reason,
                len(choice.request.prompt),
                choice.transcript.count,
                exchange.ended - exchange.started,
                choice.decode_s,
            )
        self._served.history.append(exchange)
        if exchange.spans is not None:
            exchange.spans.end(
                span_attributes(exchange), failed=FinishReason.ERROR in exchange.finish_reasons
            )
        if choices.answer_log is not None:
            choices.answer_log.ended(exchange.finish_reasons, choices.usage.completion_tokens)


def span_attributes(exchange: Exchange) -> Attributes:
    """Return the attributes of a request's span."""
    return {
        "baton.request_id": exchange.request_id,
        "url.path": exchange.path,
        "baton.tokens.prompt": exchange.prompt_tokens or 0,
        "baton.tokens.cached": exchange.cached_tokens,
        "baton.tokens.answer": exchange.completion_tokens,
        "baton.finish_reasons": ",".join(exchange.finish_reasons),
        "baton.relays": len(exchange.relays),
    }


_GONE = (ClientGone, RequestAborted, asyncio.CancelledError)


class StreamWriter:
    """Writes events, and comments while the stream is idle."""

    def __init__(self, send: Send, silence_s: float) -> None:
        self._send = send
        self._silence_s = silence_s
        self._wrote = True
        self._task = asyncio.create_task(self._keep_alive())

    async def write(self, event: bytes) -> None:
        self._wrote = True
        await self._send({"type": "http.response.body", "body": event, "more_body": True})

    def close(self) -> None:
        self._task.cancel()

    async def _keep_alive(self) -> None:
        while True:
            self._wrote = False
            await asyncio.sleep(self._silence_s)
            if not self._wrote:
                await self._send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
