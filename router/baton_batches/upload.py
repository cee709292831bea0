"""
One file on its way from a client into the store: hashed as it comes, written in a thread, never held whole.

It is there with its row, which is written last. Whatever goes wrong before, nothing of it is ever seen.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator
from contextlib import suppress
from functools import partial

from fastapi import Request

from baton_api.errors import (
    INVALID_VALUE,
    MISSING_REQUIRED_PARAMETER,
    BatonError,
    BodyTooLarge,
    InvalidRequest,
    QuotaExceeded,
)
from baton_batches import requests
from baton_batches.files import NewFile, Quota
from baton_batches.multipart import Form
from baton_batches.object_store import Writer, new_key
from baton_batches.storage import Storage
from baton_batches.values import StoredFile

WRITTEN_AT_ONCE = 1024 * 1024
"""Bytes that wait to be written; a client that is faster than the store waits for it."""

AROUND_A_FILE = 64 * 1024
"""Bytes that a form has besides its file."""

DRAINED = 64 * 1024 * 1024
"""Bytes of a refused body that are still read: who is cut off while sending does not read why."""


async def receive(storage: Storage, request: Request, owner: str, now: int, idle_s: float) -> StoredFile:
    """
    The file that a request brings. `idle_s` is how long the client may send nothing.

    Raises InvalidRequest, BodyTooLarge, QuotaExceeded, StorageFull and StorageUnavailable.
    """
    settings = storage.settings
    quota = Quota(settings.files_per_key, settings.file_bytes_per_key)
    body = _body(request, idle_s)
    try:
        form = Form(request.headers.get("content-type", ""), settings.file_limit)
        if int(request.headers.get("content-length", "0")) > settings.file_limit + AROUND_A_FILE:
            raise BodyTooLarge(settings.file_limit)
        await storage.run(partial(_check, storage, owner, now, quota))
        return await _Upload(storage, owner, now, quota).run(form, body)
    except BatonError:
        with suppress(BatonError):
            await _drain(body)
        raise


class _Upload:
    def __init__(self, storage: Storage, owner: str, now: int, quota: Quota) -> None:
        self._storage = storage
        self._owner = owner
        self._now = now
        self._quota = quota
        self._key = new_key(owner)
        self._hash = hashlib.sha256()
        self._alone = threading.Lock()
        """One thread at a time has the writer: a call goes on after its request was cancelled."""
        self._undone = False
        self._writer: Writer | None = None

    async def run(self, form: Form, body: AsyncIterator[bytes]) -> StoredFile:
        run, transfer = self._storage.run, self._storage.transfer
        try:
            await run(partial(self._storage.files.promise, self._key, self._now))
            await transfer(self._begin)
            waiting = 0
            async for data in body:
                form.feed(data)
                waiting += len(data)
                if waiting >= WRITTEN_AT_ONCE:
                    await transfer(partial(self._write, form.take()))
                    waiting = 0
            await transfer(partial(self._write, form.take()))
            file = self._described(form)
            await transfer(self._commit)
        except BaseException:
            # In the thread's own time: the request may have been cancelled.
            asyncio.get_running_loop().run_in_executor(None, self._undo)
            raise
        return await run(partial(self._keep, file))

    def _described(self, form: Form) -> NewFile:
        """Raises InvalidRequest if the form is not one of a file."""
        if not form.complete:
            raise InvalidRequest("The body ends before the form does.")
        if form.filename is None:
            raise InvalidRequest(
                "Missing required parameter: 'file'.", param="file", code=MISSING_REQUIRED_PARAMETER
            )
        purpose, expires_at = requests.upload(form.fields, self._now)
        if not form.size:
            raise InvalidRequest("The file is empty.", param="file", code=INVALID_VALUE)
        return NewFile(
            owner=self._owner,
            purpose=purpose,
            filename=form.filename,
            bytes=form.size,
            sha256=self._hash.hexdigest(),
            object=self._key,
            expires_at=expires_at,
        )

    # --- In threads ---

    def _begin(self) -> None:
        with self._alone:
            if not self._undone:
                self._writer = self._storage.objects.writer(self._key)

    def _write(self, data: bytes) -> None:
        with self._alone:
            if self._writer is not None and not self._undone:
                self._hash.update(data)
                self._writer.write(data)

    def _commit(self) -> None:
        with self._alone:
            if self._writer is not None and not self._undone:
                self._writer.commit()

    def _keep(self, file: NewFile) -> StoredFile:
        try:
            return self._storage.files.add(file, self._now, self._quota)
        except QuotaExceeded:
            self._remove()
            raise  # after any other error there may be a row all the same: what has none is swept up

    def _undo(self) -> None:
        with self._alone, suppress(BatonError):
            self._undone = True
            if self._writer is not None:
                self._writer.abort()
            self._remove()

    def _remove(self) -> None:
        with suppress(BatonError):
            self._storage.objects.delete(self._key)
            self._storage.files.withdraw(self._key)


def _check(storage: Storage, owner: str, now: int, quota: Quota) -> None:
    """Before much was sent: whether there can be room at all."""
    count, size = storage.files.held(owner, now)
    if quota.files and count >= quota.files:
        raise QuotaExceeded("files", count, quota.files)
    if quota.bytes and size >= quota.bytes:
        raise QuotaExceeded("bytes of files", size, quota.bytes)


async def _body(request: Request, idle_s: float) -> AsyncIterator[bytes]:
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(idle_s):
                data = await anext(stream, b"")
        except TimeoutError as error:
            raise InvalidRequest(f"Nothing of the request's body came for {idle_s:g} seconds.") from error
        if not data:
            return
        yield data


async def _drain(body: AsyncIterator[bytes]) -> None:
    size = 0
    async for data in body:
        size += len(data)
        if size > DRAINED:
            return
