"""
Server-sent events on their way to the client: whole lines only, and whether the stream is complete.

Clients take a stream that ends cleanly for a complete one, so completeness is checked: `data: [DONE]`, or the
last event of a response. A partial line waits for its rest, so that an error event never follows half a line.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from baton_api.errors import BatonError
from baton_api.stream_comments import AnswerUsage, take_comments
from baton_http.request_heads import Headers

DONE = (b"\ndata: [DONE]", b"\ndata:[DONE]")
MESSAGE_STOP = (b'\ndata: {"type":"message_stop"}', b'\ndata: {"type": "message_stop"}')
"""Last lines of a stream of `/v1/messages`; vLLM adds the one of a stream of chunks."""

TAIL = 64
"""Bytes at the end of a stream that show whether it is complete."""

LAST_RESPONSE = tuple(b"event: response.%b\n" % how for how in (b"completed", b"incomplete", b"failed"))
"""First lines of the last event of `/v1/responses`. Other data cannot begin with them, because JSON has no
line ends."""

KEEP_ALIVE = b"\n: keep-alive\n\n"

_NUMBER = re.compile(rb" ?[0-9]{1,9}")
_INDEX = re.compile(rb'"index": ?([0-9]{1,9})')

LINE_LIMIT = 1024 * 1024
"""Bytes of a line that may wait for its end; a longer one passes in parts."""


def is_event_stream(headers: Headers) -> bool:
    """Whether a response with these headers is a stream of events."""
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers)


class EventStream:
    """The lines of one stream."""

    __slots__ = ("_rest", "_tail", "tokens", "usage")

    ends: ClassVar[tuple[bytes, ...]] = DONE
    """Last lines of a complete stream."""

    def __init__(self) -> None:
        self.tokens = 0
        """Tokens of the response so far, as the worker reports."""
        self.usage: AnswerUsage | None = None
        """The worker's last report; None if it makes none."""
        self._rest = b""
        self._tail = b"\n\n"

    @property
    def waiting(self) -> bool:
        """Whether a partial line waits."""
        return bool(self._rest)

    @property
    def generated(self) -> int | None:
        """Tokens that this worker has generated; None if it does not report them."""
        return self.tokens or None if self.usage is None else self.usage.generated

    @property
    def complete(self) -> bool:
        """Whether the last event that passed ends the stream."""
        return self._tail.rstrip().endswith(self.ends)

    @property
    def idles(self) -> bool:
        """Whether the last lines that passed are only a keep-alive comment."""
        return self._tail.endswith(KEEP_ALIVE)

    def push(self, piece: bytes) -> bytes:
        """The lines that can pass now; may be empty."""
        if self._rest:
            piece = self._rest + piece
            self._rest = b""
        if piece[-1:] != b"\n" and len(piece) <= LINE_LIMIT:
            end = piece.rfind(b"\n") + 1
            self._rest = piece[end:]
            piece = piece[:end]
        piece = self._take_counts(piece)
        self._tail = piece[-TAIL:] if len(piece) >= TAIL else (self._tail + piece)[-TAIL:]
        return piece

    def _take_counts(self, lines: bytes) -> bytes:
        """Note what whole lines say of tokens. Returns the lines for the client."""
        lines, usage = take_comments(lines)
        if usage is not None:
            self.usage = usage
            self.tokens = usage.generated
        elif self.usage is None and lines.find(TOKEN_COUNT) >= 0:
            self._read_usage(lines)
        return lines

    def _read_usage(self, piece: bytes) -> None:
        """Read the tokens from the usage of an engine that reports it to the client."""
        self.tokens = usage_tokens(piece) or self.tokens

    def finish(self) -> bytes:
        """The rest after the worker's last byte."""
        piece, self._rest = self._rest, b""
        self._tail = (self._tail + piece[-TAIL:])[-TAIL:]
        return piece

    def error(self, error: BatonError) -> bytes:
        """`error` as a separate event, whatever passed before."""
        return self._apart() + b"data: " + json.dumps({"error": _error_fields(error)}).encode() + b"\n\n"

    def _apart(self) -> bytes:
        """Line ends that complete the last event."""
        ends = len(self._tail) - len(self._tail.rstrip(b"\n"))  # two of them end an event
        return b"\n" * (2 - ends)


class GenerateStream(EventStream):
    """The events of `/generate`, each with the tokens of its choice so far."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        super().__init__()
        self._counts: dict[int, int] = {}
        """By the choice's index."""

    def _read_usage(self, piece: bytes) -> None:
        for line in piece.split(b"\n"):
            if tokens := usage_tokens(line):
                index = _INDEX.search(line)
                self._counts[int(index[1]) if index else 0] = tokens
        self.tokens = sum(self._counts.values())


class ResponseStream(EventStream):
    """The typed, numbered events of `/v1/responses`; the last one holds the final status."""

    __slots__ = ("_count", "_ending")

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        """Events whose first line has passed."""
        self._ending = False

    @property
    def complete(self) -> bool:
        return self._ending and self._tail.endswith(b"\n\n")

    def push(self, piece: bytes) -> bytes:
        passing = super().push(piece)
        self._count += passing.count(b"\nevent: ") + passing.startswith(b"event: ")
        self._ending = self._ending or last_response_event(passing) >= 0
        return passing

    def error(self, error: BatonError) -> bytes:
        """OpenAI's error event for this stream, with the error object that clients expect."""
        fields = _error_fields(error)
        event = {**fields, "type": "error", "sequence_number": self._count, "error": fields}
        return self._apart() + b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"


def _error_fields(error: BatonError) -> dict[str, Any]:
    """The error with `retryable`, because a stream has no Retry-After header."""
    return {**error.body()["error"], "retryable": error.retry_after is not None}


TOKEN_COUNT = b'_tokens":'
"""The end of the names of counts of tokens, for a quick look."""


def usage_tokens(answer: bytes) -> int:
    """Tokens of a response by its usage; 0 without one. Text inside JSON cannot match."""
    at = max(answer.rfind(b'"completion_tokens":'), answer.rfind(b'"output_tokens":'))
    number = _NUMBER.match(answer, answer.find(b":", at) + 1) if at >= 0 else None
    return int(number[0]) if number else 0


def last_response_event(piece: bytes) -> int:
    """Position of the stream's last event in whole lines; -1 if it is not among them."""
    start = piece.rfind(b"\nevent: ") + 1
    return start if piece.startswith(LAST_RESPONSE, start) else -1
