"""
`POST /v1/embeddings`: texts or token ids in, one vector for each, in order.

Each input is one request to the engine, which batches it with others. One call has at most `AT_ONCE` inputs
in flight, so that a long list does not fill the queue. Workers of any role serve embeddings: nothing is
generated, and no blocks are moved. Vectors are truncated, normalized, and written as numbers or base64.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from starlette.types import Receive, Scope, Send

from baton_api import limits
from baton_api.errors import (
    INVALID_VALUE,
    UNSUPPORTED_PARAMETER,
    ContextTooLong,
    InvalidRequest,
    NotReady,
    RequestAborted,
)
from baton_api.hashing import client_salt
from baton_api.sampling import SamplingParams
from baton_engine.api import bodies
from baton_engine.api.bodies import ClientGone, send_json, until_disconnect
from baton_engine.api.exchange import Exchange, exchange_of
from baton_engine.api.fields import Fields
from baton_engine.api.generate import check_model, is_patient, salt_of, span_attributes
from baton_engine.api.parameters import read_cache_salt
from baton_engine.api.prompts import read_prompts
from baton_engine.api.running import read_names
from baton_engine.api.served import Served
from baton_engine.model.embedder import Embedder, Unable
from baton_engine.requests import FinishReason, Pooling, Request, Vector

AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class EmbeddingsRequest:
    """One validated request."""

    inputs: Sequence[tuple[int, ...]]
    hashes: Sequence[Sequence[bytes]]
    """`Request.hashes` of each input."""
    pooling: Pooling
    format: VectorFormat
    names: tuple[str, ...]
    salt: str = ""
    """Salt of the prefix cache, see `hashing.client_salt`."""

    @property
    def tokens(self) -> int:
        return sum(map(len, self.inputs))


class Embeddings:
    """The endpoint `/v1/embeddings`."""

    def __init__(self, served: Served) -> None:
        self._served = served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        with self._served.drain.request():
            body, salt = await bodies.read(scope, receive), salt_of(scope)
            async with until_disconnect(receive):
                spec = await asyncio.to_thread(self._read, body, salt)
            exchange.answer_id = f"embd-{uuid.uuid4().hex}"
            exchange.prompt_tokens = spec.tokens
            if self._served.tracing is not None:
                exchange.spans = self._served.tracing.begin("worker", exchange.trace, exchange.started)
            computation = Computation(self._served, exchange, spec, patient=is_patient(scope))
            try:
                with self._served.running.entered((exchange.request_id, *spec.names), computation):
                    async with until_disconnect(receive):
                        vectors = await computation.vectors()
                        encoded = await asyncio.to_thread(self._encoded, spec, vectors)
            except BaseException as error:
                gone = isinstance(error, ClientGone | RequestAborted | asyncio.CancelledError)
                self._record(exchange, FinishReason.ABORT if gone else FinishReason.ERROR)
                raise
            self._record(exchange, FinishReason.STOP)
            await send_json(encoded, send)

    def _read(self, body: bytes, salt: str) -> EmbeddingsRequest:
        fields = bodies.parse(body)
        fields.require("model")
        check_model(fields, self._served)
        embedder = able(self._served)
        fields.text("user")
        salt = client_salt(salt, read_cache_salt(fields))
        shape = read_format(fields, embedder, self._served.hidden)
        inputs = read_prompts(fields, "input", self._served.tokenizer, limits.INPUTS.most)
        for position, given in enumerate(inputs):
            param = f"input[{position}]" if len(inputs) > 1 else "input"
            if given.text == "":
                raise InvalidRequest(
                    f"Invalid '{param}': the text is empty. Expected at least 1 character.",
                    param=param,
                    code=INVALID_VALUE,
                )
            if len(given.tokens) > self._served.max_model_len:
                raise ContextTooLong(len(given.tokens), 0, self._served.max_model_len, param=param)
        tokens = [given.tokens for given in inputs]
        hashes = [self._served.engine.hashes(prompt, salt) for prompt in tokens]
        return EmbeddingsRequest(tokens, hashes, embedder.pooling, shape, read_names(fields), salt)

    def _encoded(self, spec: EmbeddingsRequest, vectors: Sequence[Vector]) -> bytes:
        data = [
            {"object": "embedding", "index": index, "embedding": spec.format.shown(vector)}
            for index, vector in enumerate(vectors)
        ]
        usage = {"prompt_tokens": spec.tokens, "total_tokens": spec.tokens}
        return msgspec.json.encode(
            {"object": "list", "data": data, "model": self._served.name, "usage": usage}
        )

    def _record(self, exchange: Exchange, reason: FinishReason) -> None:
        exchange.ended = time.monotonic()
        exchange.finish_reasons.append(reason)
        self._served.metrics.ended(reason, exchange.prompt_tokens or 0, 0, exchange.ended - exchange.started)
        self._served.history.append(exchange)
        if exchange.spans is not None:
            exchange.spans.end(span_attributes(exchange), failed=reason is FinishReason.ERROR)


def able(served: Served) -> Embedder:
    """Return the embedding configuration of the model. Raises InvalidRequest if it does not support any."""
    embedder = served.embedder
    if isinstance(embedder, Unable):
        raise InvalidRequest(
            f"The model {served.name!r} does not compute embeddings: {embedder.reason}.", param="model"
        )
    return embedder


class Computation:
    """Computation of the vectors of one request."""

    def __init__(
        self, served: Served, exchange: Exchange, spec: EmbeddingsRequest, *, patient: bool = False
    ) -> None:
        self._served = served
        self._patient = patient
        self._exchange = exchange
        self._spec = spec
        self._under_way: set[str] = set()
        self._aborted = False

    def abort(self) -> None:
        """Abort the request from outside: `vectors` raises RequestAborted."""
        self._aborted = True
        for name in self._under_way:
            self._served.engine.abort(name)

    async def vectors(self) -> list[Vector]:
        """Return one vector for each input. Raises the errors of the engine."""
        inputs = self._spec.inputs
        results: list[Vector] = [np.empty(0, dtype=np.float32)] * len(inputs)
        left = iter(range(len(inputs)))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(AT_ONCE, len(inputs))):
                    group.create_task(self._drive(left, results))
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return results

    async def _drive(self, left: Iterator[int], results: list[Vector]) -> None:
        for index in left:
            results[index] = await self._one(index)

    async def _one(self, index: int) -> Vector:
        if self._aborted:
            raise RequestAborted
        request = Request(
            id=f"{self._exchange.answer_id}-{index}",
            prompt=self._spec.inputs[index],
            sampling=SamplingParams(max_tokens=0),
            salt=self._spec.salt,
            hashes=self._spec.hashes[index],
            pooling=self._spec.pooling,
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


FORMATS = ("float", "base64")


@dataclass(frozen=True, slots=True)
class VectorFormat:
    """Requested format of vectors."""

    dimensions: int | None
    """None: all dimensions of the model."""
    normalized: bool
    encoded: bool
    """Base64 of little-endian float32, the default of OpenAI's SDK, instead of a list of numbers."""

    def shown(self, vector: Vector) -> list[float] | str:
        values = vector[: self.dimensions].astype(np.float64)
        if self.normalized:
            length = np.linalg.norm(values)
            values = values / length if length else values
        if self.encoded:
            return base64.b64encode(values.astype("<f4").tobytes()).decode()
        numbers: list[float] = values.astype(np.float32).tolist()
        return numbers


def read_format(fields: Fields, embedder: Embedder, hidden: int) -> VectorFormat:
    """Read `encoding_format` and `dimensions`. Raises InvalidRequest for unsupported dimensions."""
    encoded = fields.choice("encoding_format", FORMATS) == "base64"
    dimensions = fields.integer("dimensions", 1, hidden)
    if dimensions is None or dimensions == hidden:
        return VectorFormat(None, embedder.normalized, encoded)
    if not embedder.shortens:
        raise InvalidRequest(
            f"This model's embeddings have {hidden} dimensions and cannot be truncated. Omit 'dimensions', "
            "or start the worker with --matryoshka if the model was trained for truncated embeddings.",
            param="dimensions",
            code=UNSUPPORTED_PARAMETER,
        )
    if embedder.lengths and dimensions not in embedder.lengths:
        lengths = ", ".join(map(str, embedder.lengths))
        fields.wrong_value("dimensions", f"this model supports {lengths}, but got {dimensions}")
    return VectorFormat(dimensions, True, encoded)
