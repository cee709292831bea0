"""
What has passed of a stream of server-sent events: whole lines only, and whether the end was among them.

Clients take a stream that ends cleanly for a complete one, so the end must be earned: `data: [DONE]`, or
the last event of a response. And an error event that follows half a line would be read as that line's
rest, so half a line waits for its other half; it is of no use to a client before that anyway.
"""

from __future__ import annotations

import json
import re
from typing import Any

from baton_api.errors import BatonError

DONE = (b"\ndata: [DONE]", b"\ndata:[DONE]")

LAST_RESPONSE = tuple(b"event: response.%b\n" % how for how in (b"completed", b"incomplete", b"failed"))
"""The lines that begin the last event of `/v1/responses`. Nothing else can be read as one of them: what JSON
says has no line's end in it."""

KEEP_ALIVE = b"\n: keep-alive\n\n"

_NUMBER = re.compile(rb" ?[0-9]{1,9}")

LINE_LIMIT = 1024 * 1024
"""Bytes of a line that may wait for its end; a longer one passes in parts."""


class EventStream:
    """The lines of one stream, on their way."""

    __slots__ = ("_rest", "_tail", "tokens")

    def __init__(self) -> None:
        self.tokens = 0
        """Of the answer so far, as far as its worker says."""
        self._rest = b""
        self._tail = b"\n\n"

    @property
    def waiting(self) -> bool:
        """Whether something has come that did not pass yet."""
        return bool(self._rest)

    @property
    def complete(self) -> bool:
        """Whether the last event that passed says that there is no other."""
        return self._tail.rstrip().endswith(DONE)

    @property
    def idles(self) -> bool:
        """Whether what passed last is a comment that says that the worker lives, and nothing else."""
        return self._tail.endswith(KEEP_ALIVE)

    def push(self, piece: bytes) -> bytes:
        """What of the bytes so far can pass on now; perhaps nothing."""
        if self._rest:
            piece = self._rest + piece
            self._rest = b""
        if piece[-1:] != b"\n" and len(piece) <= LINE_LIMIT:
            end = piece.rfind(b"\n") + 1
            self._rest = piece[end:]
            piece = piece[:end]
        self._tail = (self._tail + piece[-32:])[-32:]
        return piece

    def finish(self) -> bytes:
        """The worker has sent all: what waits for the end of its line need not wait any more."""
        piece, self._rest = self._rest, b""
        self._tail = (self._tail + piece[-32:])[-32:]
        return piece

    def error(self, error: BatonError) -> bytes:
        """`error` as an event of its own, whatever passed before."""
        return self._apart() + b"data: " + json.dumps({"error": _error_fields(error)}).encode() + b"\n\n"

    def _apart(self) -> bytes:
        """What ends the event that passed last, if it was not whole."""
        ends = len(self._tail) - len(self._tail.rstrip(b"\n"))  # two of them end an event
        return b"\n" * (2 - ends)


class ResponseStream(EventStream):
    """The typed, numbered events of `/v1/responses`, whose last one says how the response ended."""

    __slots__ = ("_count", "_ending")

    def __init__(self) -> None:
        super().__init__()
        self._count = 0
        """Of the events whose first line has passed."""
        self._ending = False

    @property
    def complete(self) -> bool:
        return self._ending and self._tail.endswith(b"\n\n")

    def push(self, piece: bytes) -> bytes:
        passing = super().push(piece)
        self._count += passing.count(b"\nevent: ") + passing.startswith(b"event: ")
        self._ending = self._ending or last_response_event(passing) >= 0
        if self._ending and not self.tokens:
            self.tokens = usage_tokens(passing)
        return passing

    def error(self, error: BatonError) -> bytes:
        """OpenAI's event for this stream, with the object in it by which clients know any error."""
        fields = _error_fields(error)
        event = {**fields, "type": "error", "sequence_number": self._count, "error": fields}
        return self._apart() + b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"


def _error_fields(error: BatonError) -> dict[str, Any]:
    """In a stream no header can say that it may help to try again."""
    return {**error.body()["error"], "retryable": error.retry_after is not None}


def usage_tokens(answer: bytes) -> int:
    """How many tokens an answer has, as its usage says; 0 if it does not. No text in JSON can say it."""
    at = max(answer.rfind(b'"completion_tokens":'), answer.rfind(b'"output_tokens":'))
    number = _NUMBER.match(answer, answer.find(b":", at) + 1) if at >= 0 else None
    return int(number[0]) if number else 0


def last_response_event(piece: bytes) -> int:
    """Where in whole lines the stream's last event begins, after which there is none; -1 if it does not."""
    start = piece.rfind(b"\nevent: ") + 1
    return start if piece.startswith(LAST_RESPONSE, start) else -1
