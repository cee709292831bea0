"""
File uploads: multipart/form-data parsed as it arrives, hashed, and written to the object store, in threads.

The file is never held in memory as a whole. It exists once its database row is written, which is the last
step; a failed upload leaves nothing visible.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
import unicodedata
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial

from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from baton_api.errors import (
    INVALID_VALUE,
    MISSING_REQUIRED_PARAMETER,
    STRING_ABOVE_MAX_LENGTH,
    BatonError,
    BodyTooLarge,
    InvalidRequest,
    QuotaExceeded,
)
from baton_batches import api_objects
from baton_batches.files import FileQuota, NewFile
from baton_batches.object_store import ObjectWriter, new_key
from baton_batches.storage import Storage
from baton_batches.values import StoredFile
from baton_http.request_cycle import keep_received

FIELD_LIMIT = 1024
"""Maximum bytes of a field other than the file."""
PARTS_LIMIT = 33
"""Parts of a form: its fields and the file."""
NAME_LIMIT = 255
"""Characters of a file's name."""
DEFAULT_NAME = "upload"

# Characters that are seen as none, or change how those around them are seen.
_INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


class UploadForm:
    """A multipart form, as far as it was read."""

    def __init__(self, content_type: str, file_limit: int) -> None:
        """Raises InvalidRequest for another type of body."""
        kind, options = parse_options_header(content_type)
        if kind != b"multipart/form-data" or not options.get(b"boundary"):
            raise InvalidRequest("The body must be multipart/form-data, with a boundary in its Content-Type.")
        self.fields: dict[str, str] = {}
        self.filename: str | None = None
        """None as long as no file has begun."""
        self.pieces = bytearray()
        """Bytes of the file, not yet taken."""
        self.size = 0
        """Bytes of the file so far."""
        self._parts = 0
        self.complete = False
        self._file_limit = file_limit
        self._header = bytearray()
        self._value = bytearray()
        self._headers: dict[bytes, bytes] = {}
        self._name = ""
        self._text = bytearray()
        self._is_file = False
        try:
            self._parser = MultipartParser(
                options[b"boundary"],
                {
                    "on_part_begin": self._part_begins,
                    "on_header_field": self._header_goes_on,
                    "on_header_value": self._value_goes_on,
                    "on_header_end": self._header_ends,
                    "on_headers_finished": self._headers_end,
                    "on_part_data": self._data,
                    "on_part_end": self._part_ends,
                    "on_end": self._ends,
                },
            )
        except FormParserError as error:
            raise InvalidRequest("The boundary in the Content-Type is too long.") from error

    def feed(self, data: bytes) -> None:
        """Raises InvalidRequest, and BodyTooLarge if the file is."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(
                "The body is not the multipart/form-data that its Content-Type says."
            ) from error

    def take(self) -> bytes:
        """Return the bytes of the file that arrived since the last call."""
        taken, self.pieces = self.pieces, bytearray()
        return bytes(taken)

    # --- What the parser calls ---

    def _part_begins(self) -> None:
        self._parts += 1
        if self._parts > PARTS_LIMIT:
            raise InvalidRequest(f"The form has more than {PARTS_LIMIT} parts.")
        self._headers = {}
        self._text.clear()

    def _header_goes_on(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _value_goes_on(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_ends(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _headers_end(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition"))
        self._name = options.get(b"name", b"").decode(errors="replace")
        given = options.get(b"filename")
        self._is_file = self._name == "file" and given is not None
        if not self._is_file:
            return
        if self.filename is not None:
            raise InvalidRequest("The form has more than one file; send each by itself.", param="file")
        self.filename = sanitized((given or b"").decode(errors="replace"))

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self.size += end - start
            if self.size > self._file_limit:
                raise BodyTooLarge(self._file_limit)
            self.pieces += data[start:end]
            return
        self._text += data[start:end]
        if len(self._text) > FIELD_LIMIT:
            raise InvalidRequest(
                f"The field is over the limit of {FIELD_LIMIT} bytes.",
                param=self._name[:100],
                code=STRING_ABOVE_MAX_LENGTH,
            )

    def _part_ends(self) -> None:
        if not self._is_file:
            self.fields[self._name] = self._text.decode(errors="replace")

    def _ends(self) -> None:
        self.complete = True


def sanitized(name: str) -> str:
    """
    Return the displayable part of a name that a client gave; no object is stored under it.

    >>> sanitized("../../etc/passwd"), sanitized("C:\\\\in.jsonl"), sanitized("a\\x00\\u202eb.txt")
    ('passwd', 'in.jsonl', 'ab.txt')
    """
    last = name.replace("\\", "/").rpartition("/")[2]
    seen = "".join(letter for letter in last if unicodedata.category(letter) not in _INVISIBLE).strip()
    return DEFAULT_NAME if seen in ("", ".", "..") else seen[:NAME_LIMIT]


WRITE_BYTES = 256 * 1024
"""Maximum bytes that are received but not written. Beyond it, the client is not read."""

FORM_OVERHEAD = 64 * 1024
"""Bytes that a form has besides its file."""


async def receive(storage: Storage, request: Request, owner: str, now: int) -> StoredFile:
    """
    The file that a request brings.

    Raises InvalidRequest, BodyTooLarge, QuotaExceeded, StorageFull and StorageUnavailable.
    """
    settings = storage.settings
    quota = FileQuota(settings.files_per_key, settings.file_bytes_per_key)
    body = _body(request, settings.file_limit)
    form = UploadForm(request.headers.get("content-type", ""), settings.file_limit)
    if int(request.headers.get("content-length", "0")) > settings.file_limit + FORM_OVERHEAD:
        raise BodyTooLarge(settings.file_limit)
    await storage.run(partial(_check, storage, owner, now, quota))
    return await _FileUpload(storage, owner, now, quota).run(form, body, keep_received(request.scope))


class _FileUpload:
    def __init__(self, storage: Storage, owner: str, now: int, quota: FileQuota) -> None:
        self._storage = storage
        self._owner = owner
        self._now = now
        self._quota = quota
        self._key = new_key(owner)
        self._hash = hashlib.sha256()
        self._writer_lock = threading.Lock()
        """Serializes use of the writer: a call runs to its end after its request was cancelled."""
        self._undone = False
        self._writer: ObjectWriter | None = None

    async def run(
        self, form: UploadForm, body: AsyncIterator[bytes], free: Callable[[int], None]
    ) -> StoredFile:
        """`free` is called with the number of bytes of the body that have left memory."""
        run, transfer = self._storage.run, self._storage.transfer
        try:
            await run(partial(self._storage.files.begin_upload, self._key, self._now))
            await transfer(self._begin)
            waiting: list[bytes] = []
            size = 0
            async for data in body:
                waiting.append(data)
                size += len(data)
                if size >= WRITE_BYTES:
                    await transfer(partial(self._write, form, waiting))
                    free(size)
                    waiting, size = [], 0
            await transfer(partial(self._write, form, waiting))
            file = self._described(form)
            await transfer(self._commit)
        except BaseException:
            # In the thread's own time: the request may have been cancelled.
            asyncio.get_running_loop().run_in_executor(None, self._undo)
            raise
        return await run(partial(self._keep, file))

    def _described(self, form: UploadForm) -> NewFile:
        """Raises InvalidRequest if the form is not one of a file."""
        if not form.complete:
            raise InvalidRequest("The body ends before the form does.")
        if form.filename is None:
            raise InvalidRequest(
                "Missing required parameter: 'file'.", param="file", code=MISSING_REQUIRED_PARAMETER
            )
        purpose, expires_at = api_objects.parse_upload(form.fields, self._now)
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
        with self._writer_lock:
            if not self._undone:
                self._writer = self._storage.objects.writer(self._key)

    def _write(self, form: UploadForm, parts: list[bytes]) -> None:
        with self._writer_lock:
            if self._writer is not None and not self._undone:
                for part in parts:
                    form.feed(part)
                data = form.take()
                self._hash.update(data)
                self._writer.write(data)

    def _commit(self) -> None:
        with self._writer_lock:
            if self._writer is not None and not self._undone:
                self._writer.commit()

    def _keep(self, file: NewFile) -> StoredFile:
        try:
            return self._storage.files.add(file, self._now, self._quota)
        except QuotaExceeded:
            self._remove()
            raise  # after any other error a row may exist; the sweep removes objects without a row

    def _undo(self) -> None:
        with self._writer_lock, suppress(BatonError):
            self._undone = True
            if self._writer is not None:
                self._writer.abort()
            self._remove()

    def _remove(self) -> None:
        with suppress(BatonError):
            self._storage.objects.delete(self._key)
            self._storage.freeing(partial(self._storage.files.forget_upload, self._key))


def _check(storage: Storage, owner: str, now: int, quota: FileQuota) -> None:
    """Before much was sent: whether there can be room at all."""
    count, size = storage.files.held(owner, now)
    if quota.files and count >= quota.files:
        raise QuotaExceeded("files", count, quota.files)
    if quota.bytes and size >= quota.bytes:
        raise QuotaExceeded("bytes of files", size, quota.bytes)


async def _body(request: Request, file_limit: int) -> AsyncIterator[bytes]:
    """The parts of the body. Raises BodyTooLarge, however little of it is a file."""
    size = 0
    async for data in request.stream():
        size += len(data)
        if size > file_limit + FORM_OVERHEAD:
            raise BodyTooLarge(file_limit)
        if data:
            yield data
