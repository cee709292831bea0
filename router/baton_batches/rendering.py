"""
The output and error files of a batch: one result per line, in the order of the input.

Results and input lines are read side by side, so that neither is held as a whole. Each row has the
`custom_id` of its input line. A line without a result gets an error if the batch expired.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton_api.errors import BatonError
from baton_api.json_text import on_one_line
from baton_batches.files import OUTPUT, NewFile
from baton_batches.object_store import ObjectWriter, new_key
from baton_batches.storage import Storage
from baton_batches.values import BatchRecord, LineResult

EXPIRED = (
    b'{"code":"batch_expired","message":'
    b'"This request could not be executed before the completion window expired."}'
)
_json = msgspec.json.Encoder()


class NamedLine(msgspec.Struct):
    """The name of an input line."""

    custom_id: str


class _TokenDetails(msgspec.Struct):
    cached_tokens: int | None = 0
    reasoning_tokens: int | None = 0


class _UsageFields(msgspec.Struct):
    """Usage of chat, completions and embeddings, or of responses."""

    prompt_tokens: int | None = 0
    completion_tokens: int | None = 0
    input_tokens: int | None = 0
    output_tokens: int | None = 0
    total_tokens: int | None = 0
    prompt_tokens_details: _TokenDetails | None = None
    completion_tokens_details: _TokenDetails | None = None
    input_tokens_details: _TokenDetails | None = None
    output_tokens_details: _TokenDetails | None = None


class _ReplyWithUsage(msgspec.Struct):
    usage: _UsageFields | None = None


_name_decoder = msgspec.json.Decoder(NamedLine)
_usage_decoder = msgspec.json.Decoder(_ReplyWithUsage)


@dataclass(slots=True)
class BatchUsage:
    """Tokens of all completed lines."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    total_tokens: int = 0

    def add(self, body: bytes) -> None:
        """Add the usage of one reply, if it has any."""
        try:
            usage = _usage_decoder.decode(body).usage
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        if usage is None:
            return
        input_details = usage.prompt_tokens_details or usage.input_tokens_details or _TokenDetails()
        output_details = usage.completion_tokens_details or usage.output_tokens_details or _TokenDetails()
        self.input_tokens += (usage.prompt_tokens or 0) + (usage.input_tokens or 0)
        self.output_tokens += (usage.completion_tokens or 0) + (usage.output_tokens or 0)
        self.total_tokens += usage.total_tokens or 0
        self.cached_tokens += input_details.cached_tokens or 0
        self.reasoning_tokens += output_details.reasoning_tokens or 0

    def counts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(slots=True)
class FileDigest:
    """Size, lines and hash of a file."""

    size: int = 0
    lines: int = 0
    hash: Any = field(default_factory=hashlib.sha256)

    def add(self, row: bytes) -> None:
        self.size += len(row)
        self.lines += 1
        self.hash.update(row)


def rows(
    batch: str, numbered: Iterable[tuple[int, bytes]], results: Iterator[LineResult], expired: bool
) -> Iterator[tuple[LineResult, bytes]]:
    """
    Each result and its row, in the order of input lines.

    Lines without a result are left out, or become errors if the batch has `expired`.
    """
    result = next(results, None)
    for number, text in numbered:
        if result is not None and result.line == number:
            yield result, _row(batch, result, _name_decoder.decode(text).custom_id)
            result = next(results, None)
        elif expired:
            unfinished = LineResult(number, 0, EXPIRED)
            yield unfinished, _row(batch, unfinished, _name_decoder.decode(text).custom_id)


def _row(batch: str, result: LineResult, custom_id: str) -> bytes:
    answer = b"null"
    error = b"null"
    if result.status:
        request = _json.encode(result.request_id)
        answer = b'{"status_code":%d,"request_id":%b,"body":%b}' % (
            result.status,
            request,
            _one_line(result.body),
        )
    else:
        error = _one_line(result.body)
    id = f"batch_req_{batch.removeprefix('batch_')}_{result.line}".encode()
    name = _json.encode(custom_id)
    return on_one_line(b'{"id":"%b","custom_id":%b,"response":%b,"error":%b}\n' % (id, name, answer, error))


def _one_line(body: bytes) -> bytes:
    """JSON on one line; invalid JSON becomes a string."""
    try:
        return msgspec.json.format(body, indent=-1) if b"\n" in body or b"\r" in body else _checked(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _json.encode(body.decode(errors="replace"))


def _checked(body: bytes) -> bytes:
    msgspec.json.decode(body, type=msgspec.Raw)
    return body


WRITE_BYTES = 256 * 1024
"""Bytes per write."""


class OutputFile:
    """A file that is created with its first row."""

    def __init__(self, storage: Storage, batch: BatchRecord, kind: str, now: int) -> None:
        self._storage = storage
        self._batch = batch
        self._kind = kind
        self._now = now
        self._digest = FileDigest()
        self._rows = bytearray()
        self._key = ""
        self._writer: ObjectWriter | None = None
        self._committed = False

    def add(self, row: bytes) -> None:
        self._digest.add(row)
        self._rows += row
        if len(self._rows) >= WRITE_BYTES:
            self._write()

    def finished(self, expires_at: int) -> NewFile | None:
        """The stored file, kept until this time; None if it would be empty."""
        if not self._digest.lines:
            return None
        self._write().commit()
        self._committed = True
        return NewFile(
            owner=self._batch.owner,
            purpose=OUTPUT,
            filename=f"{self._batch.id}_{self._kind}.jsonl",
            bytes=self._digest.size,
            sha256=self._digest.hash.hexdigest(),
            object=self._key,
            expires_at=expires_at,
        )

    def drop(self) -> None:
        """Remove the file, unless it was committed. A committed file without a row is swept later."""
        with suppress(BatonError):
            if self._writer is not None and not self._committed:
                self._writer.abort()
                self._storage.files.forget_upload(self._key)

    def _write(self) -> ObjectWriter:
        if self._writer is None:
            self._key = new_key(self._batch.owner)
            self._storage.files.begin_upload(self._key, self._now)
            self._writer = self._storage.objects.writer(self._key)
        self._writer.write(bytes(self._rows))
        self._rows.clear()
        return self._writer
