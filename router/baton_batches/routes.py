"""
`/v1/files` and `/v1/batches`: what clients send is checked, and what is kept for them is shown.

Each key sees its own files and batches; another's are as if they were not there.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from urllib.parse import quote

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from baton_api import limits
from baton_api.errors import INVALID_VALUE, BodyTooLarge, InvalidRequest, RangeNotSatisfiable
from baton_batches import api_objects, upload
from baton_batches.api_objects import NewBatch
from baton_batches.controller import BatchController
from baton_batches.storage import Storage
from baton_batches.values import BatchRecord, StoredFile
from baton_http.replies import Scope

FILES = "/v1/files"
BATCHES = "/v1/batches"

BODY_LIMIT = 64 * 1024
"""Bytes of a request for a batch."""


def routes(
    storage: Storage,
    controller: BatchController,
    owner_of: Callable[[Scope], bytes],
    models_of: Callable[[Scope], frozenset[str] | None],
    clock: Callable[[], float] = time.time,
) -> APIRouter:
    api = APIRouter()
    context = _Context(storage, owner_of, clock)
    _add_files(api, context, controller)
    _add_batches(api, context, controller, models_of)
    return api


@dataclass(frozen=True, slots=True)
class _Context:
    storage: Storage
    owner_of: Callable[[Scope], bytes]
    clock: Callable[[], float]

    def owner(self, request: Request) -> str:
        return self.owner_of(request.scope).hex()

    def now(self) -> int:
        return int(self.clock())


def _add_files(api: APIRouter, context: _Context, controller: BatchController) -> None:
    storage, owner, now = context.storage, context.owner, context.now

    @api.post(FILES)
    async def new_file(request: Request) -> Response:
        stored = await upload.receive(storage, request, owner(request), now())
        return JSONResponse(api_objects.render_file(stored))

    @api.get(FILES)
    async def list_files(request: Request) -> Response:
        part = api_objects.parse_page(request.query_params, limits.FILES_PAGE, limits.FILES_PAGE.most)
        listed = partial(
            storage.files.page,
            owner(request),
            now(),
            limit=part.limit,
            after=part.after,
            purpose=part.purpose,
            newest_first=part.newest_first,
        )
        objects, has_more = await storage.run(listed)
        return JSONResponse(api_objects.render_page(map(api_objects.render_file, objects), has_more))

    @api.get(FILES + "/{id}")
    async def file(id: str, request: Request) -> Response:
        stored = await storage.run(partial(storage.files.get, owner(request), id, now()))
        return JSONResponse(api_objects.render_file(stored))

    @api.get(FILES + "/{id}/content")
    async def content(id: str, request: Request) -> Response:
        stored = await storage.run(partial(storage.files.get, owner(request), id, now()))
        return await _content(storage, stored, request)

    @api.delete(FILES + "/{id}")
    async def delete(id: str, request: Request) -> Response:
        await storage.free(partial(storage.files.delete, owner(request), id, now()))
        controller.sweep()
        return JSONResponse(api_objects.render_deleted(id))


def _add_batches(
    api: APIRouter,
    context: _Context,
    controller: BatchController,
    models_of: Callable[[Scope], frozenset[str] | None],
) -> None:
    storage, owner, now = context.storage, context.owner, context.now

    @api.post(BATCHES)
    async def new_batch(request: Request) -> Response:
        query = api_objects.parse_new_batch(await _body(request))
        models = models_of(request.scope)
        record = await storage.run(partial(_create, storage, owner(request), query, now(), models))
        controller.wake()
        return JSONResponse(api_objects.render_batch(record))

    @api.get(BATCHES)
    async def list_batches(request: Request) -> Response:
        part = api_objects.parse_page(request.query_params, limits.BATCHES_PAGE, 20)
        listed = partial(storage.ledger.page, owner(request), limit=part.limit, after=part.after)
        objects, has_more = await storage.run(listed)
        return JSONResponse(api_objects.render_page(map(api_objects.render_batch, objects), has_more))

    @api.get(BATCHES + "/{id}")
    async def batch(id: str, request: Request) -> Response:
        record = await storage.run(partial(storage.ledger.get, owner(request), id))
        return JSONResponse(api_objects.render_batch(record))

    @api.post(BATCHES + "/{id}/cancel")
    async def cancel(id: str, request: Request) -> Response:
        record = await storage.free(partial(storage.ledger.request_cancel, owner(request), id, now()))
        controller.wake()
        return JSONResponse(api_objects.render_batch(record))


def _create(
    storage: Storage, owner: str, query: NewBatch, now: int, models: frozenset[str] | None
) -> BatchRecord:
    file = storage.files.get(owner, query.input_file_id, now, param="input_file_id")
    if file.purpose != "batch":
        raise InvalidRequest(
            f"The file {file.id} has the purpose {file.purpose!r}; a batch's input has 'batch'.",
            param="input_file_id",
            code=INVALID_VALUE,
        )
    storage.volume.check()
    return storage.ledger.create(
        owner,
        query.endpoint,
        file,
        now,
        window=query.completion_window,
        metadata=query.metadata,
        output_seconds=query.output_seconds,
        models=models,
    )


async def _body(request: Request) -> bytes:
    """Read the body. Raises BodyTooLarge, and InvalidRequest if its type is not JSON."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise InvalidRequest("The body must be JSON, with `Content-Type: application/json`.")
    body = bytearray()
    async for data in request.stream():
        body += data
        if len(body) > BODY_LIMIT:
            raise BodyTooLarge(BODY_LIMIT)
    return bytes(body)


async def _content(storage: Storage, stored: StoredFile, request: Request) -> Response:
    """The bytes, or the part of them that was asked for."""
    tag = f'"{stored.sha256}"'
    headers = {
        "accept-ranges": "bytes",
        "etag": tag,
        "content-disposition": f"attachment; filename*=utf-8''{quote(stored.filename)}",
        "x-content-type-options": "nosniff",
    }
    query = request.headers.get("range", "") if request.headers.get("if-range", tag) == tag else ""
    part = api_objects.parse_byte_range(query, stored.bytes)
    if part is None:
        raise RangeNotSatisfiable(stored.bytes)
    start, end = part
    headers["content-length"] = str(end - start)
    whole = (start, end) == (0, stored.bytes)
    if not whole:
        headers["content-range"] = f"bytes {start}-{end - 1}/{stored.bytes}"
    pieces = storage.objects.read(stored.object, start, end)
    # Read before the status is sent: a missing object is an error.
    first = await storage.transfer(partial(next, pieces, b""))

    async def streamed() -> AsyncIterator[bytes]:
        piece = first
        while piece:
            yield piece
            piece = await storage.transfer(partial(next, pieces, b""))

    status = 200 if whole else 206
    return StreamingResponse(streamed(), status, headers, media_type="application/octet-stream")
