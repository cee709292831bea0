"""
Endpoints that pool the hidden states of prompts: embeddings and scores.

Each input is one request to the engine, which batches it with others. One call has at most `AT_ONCE` inputs
in flight, so that a long list does not fill the queue. Workers of any role serve these endpoints: nothing is
generated, and no blocks are moved.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from starlette.types import Receive, Scope, Send

from baton_api import headers
from baton_api.errors import NotReady, RequestAborted
from baton_api.hashing import client_salt, root_hash
from baton_api.sampling import SamplingParams
from baton_api.stream_comments import AnswerUsage
from baton_engine.api import bodies
from baton_engine.api.bodies import ClientGone, send_json, until_disconnect
from baton_engine.api.exchange import Exchange, exchange_of
from baton_engine.api.fields import Fields
from baton_engine.api.generate import check_model, is_patient, salt_of, span_attributes
from baton_engine.api.parameters import read_cache_salt
from baton_engine.api.running import read_names
from baton_engine.api.served import Served
from baton_engine.requests import FinishReason, LoadedAdapter, Pooling, Request, Vector

AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class PooledInputs:
    """The inputs of one validated request, and its response."""

    kind: str
    """Prefix of the response's id."""
    inputs: Sequence[tuple[int, ...]]
    pooling: Pooling
    answer: Callable[[str, Sequence[Vector], dict[str, int]], Any]
    """Returns the response from its id, the vectors of the inputs in their order, and the usage."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.inputs))


@dataclass(frozen=True, slots=True)
class CacheKeys:
    """Names of the inputs of one request in the prefix cache."""

    salt: str
    """See `hashing.client_salt`."""
    adapter: LoadedAdapter | None
    hashes: Sequence[Sequence[bytes]]
    """`Request.hashes` of each input."""


Prepare = Callable[[Fields, Served], PooledInputs]


class PoolingEndpoint:
    """An endpoint for pooled prompts. `prepare` reads its request bodies."""

    def __init__(self, served: Served, prepare: Prepare) -> None:
        self._served = served
        self._prepare = prepare

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        with self._served.drain.request():
            body, salt = await bodies.read(scope, receive), salt_of(scope)
            async with until_disconnect(receive):
                pooled, names, keys = await bodies.on_thread(self._read, body, salt)
            exchange.answer_id = f"{pooled.kind}-{uuid.uuid4().hex}"
            exchange.prompt_tokens = pooled.tokens
            if self._served.tracing is not None:
                exchange.spans = self._served.tracing.begin("worker", exchange.trace, exchange.started)
            patient = is_patient(scope)
            computation = Computation(self._served, exchange, pooled, keys, patient=patient)
            try:
                with self._served.running.entered((exchange.request_id, *names), computation):
                    async with until_disconnect(receive):
                        vectors = await computation.vectors()
                        encoded = await asyncio.to_thread(_encoded, pooled, exchange.answer_id, vectors)
            except BaseException as error:
                aborted = isinstance(error, ClientGone | RequestAborted | asyncio.CancelledError)
                self._record(exchange, FinishReason.ABORT if aborted else FinishReason.ERROR)
                raise
            self._record(exchange, FinishReason.STOP)
            usage = AnswerUsage(pooled.tokens, 0).encode()
            await send_json(encoded, send, [(headers.USAGE.encode(), usage)])

    def _read(self, body: bytes, salt: str) -> tuple[PooledInputs, tuple[str, ...], CacheKeys]:
        """Return the inputs, the ids that can abort, and the names of the inputs in the prefix cache."""
        fields = bodies.parse(body)
        fields.require("model")
        adapter = check_model(fields, self._served)
        fields.text("user")
        pooled, salt = self._prepare(fields, self._served), client_salt(salt, read_cache_salt(fields))
        root = root_hash(salt, "" if adapter is None else adapter.digest)
        hashes = [self._served.engine.hashes(prompt, root) for prompt in pooled.inputs]
        return pooled, read_names(fields), CacheKeys(salt, adapter, hashes)

    def _record(self, exchange: Exchange, reason: FinishReason) -> None:
        exchange.ended = time.monotonic()
        exchange.finish_reasons.append(reason)
        self._served.metrics.ended(reason, exchange.prompt_tokens or 0, 0, exchange.ended - exchange.started)
        self._served.history.append(exchange)
        if exchange.spans is not None:
            exchange.spans.end(span_attributes(exchange), failed=reason is FinishReason.ERROR)


def _encoded(pooled: PooledInputs, id: str, vectors: Sequence[Vector]) -> bytes:
    usage = {"prompt_tokens": pooled.tokens, "total_tokens": pooled.tokens}
    return msgspec.json.encode(pooled.answer(id, vectors, usage))


class Computation:
    """Computation of the vectors of one request."""

    def __init__(
        self,
        served: Served,
        exchange: Exchange,
        pooled: PooledInputs,
        keys: CacheKeys,
        *,
        patient: bool = False,
    ) -> None:
        self._served = served
        self._patient = patient
        self._exchange = exchange
        self._pooled = pooled
        self._keys = keys
        self._under_way: set[str] = set()
        self._aborted = False

    def abort(self) -> None:
        """Abort the request from outside: `vectors` raises RequestAborted."""
        self._aborted = True
        for name in self._under_way:
            self._served.engine.abort(name)

    async def vectors(self) -> list[Vector]:
        """Return one vector for each input. Raises the errors of the engine."""
        inputs = self._pooled.inputs
        results: list[Vector] = [np.empty(0, dtype=np.float32)] * len(inputs)
        indexes = iter(range(len(inputs)))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(AT_ONCE, len(inputs))):
                    group.create_task(self._drive(indexes, results))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return results

    async def _drive(self, indexes: Iterator[int], results: list[Vector]) -> None:
        for index in indexes:
            results[index] = await self._one(index)

    async def _one(self, index: int) -> Vector:
        if self._aborted:
            raise RequestAborted
        request = Request(
            id=f"{self._exchange.answer_id}-{index}",
            prompt=self._pooled.inputs[index],
            sampling=SamplingParams(max_tokens=0),
            salt=self._keys.salt,
            adapter=self._keys.adapter,
            hashes=self._keys.hashes[index],
            pooling=self._pooled.pooling,
            tenant=self._exchange.tenant,
            patient=self._patient,
            step_summary=None if self._exchange.spans is None else self._exchange.spans.step_summary(),
        )
        async with contextlib.aclosing(self._served.engine.generate(request)) as outputs:
            self._under_way.add(request.id)
            try:
                output = await anext(outputs)
            finally:
                self._under_way.discard(request.id)
        if output.error is not None:
            raise output.error
        if self._aborted:
            raise RequestAborted
        if output.finish is FinishReason.ABORT:
            raise NotReady("This worker stopped before the answer was complete. Try again.")
        self._exchange.cached_tokens += output.cached_tokens
        assert isinstance(output.prompt_output, np.ndarray)
        return output.prompt_output
