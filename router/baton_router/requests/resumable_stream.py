"""
A stream's resume state: the tokens that were sent, and how the answer began.

The worker reports both in comments between its events (`baton_api.stream_comments`). The router removes the
comments, and forwards an event only once its tokens are known. The text that the client has and the text
that is resumed are therefore the same, wherever the connection breaks.
"""

from __future__ import annotations

import re
from typing import ClassVar

import msgspec

from baton_api import anthropic
from baton_api.errors import BatonError
from baton_api.stream_comments import (
    BEGINS,
    COMMENT,
    TOKENS,
    Beginning,
    Resumption,
    read_line,
    read_numbers,
    take_comments,
)
from baton_http.sse import DONE, MESSAGE_STOP, TAIL, EventStream

WAITING_LIMIT = 1024 * 1024
"""Bytes of events that wait for their tokens; a worker that sends more has stopped reporting tokens."""

_COMMENT = b"\n: baton-"
_USUAL = re.compile(rb"(data: [^\n]{%d,}\n\n)%b([0-9]+)\n\n" % (TAIL, TOKENS))
"""One event and its token, as most of a stream arrives."""
_BEGINS = b"\n" + BEGINS
_beginning = msgspec.json.Decoder(Beginning)


class ResumableStream(EventStream):
    """A stream of events whose worker was asked to report its tokens."""

    __slots__ = ("_before", "_begun", "_ended", "_numbers", "_waiting", "_watching")

    failures: ClassVar[bytes] = b'\ndata: {"error"'
    """Beginning of the event with which a worker ends a failed stream."""

    def __init__(self, before: Resumption | None = None) -> None:
        """`before` is the part of the answer that had been forwarded before the stream was resumed."""
        super().__init__()
        self._begun: Beginning | None = None
        self._before = before.tokens if before else []
        self._numbers = bytearray()
        """This worker's tokens, a comma after each: they are read only if the stream breaks."""
        self.tokens = len(self._before)
        self._ended = False
        self._watching = True
        """Whether there may be comments to take out."""
        self._waiting = b"\n"
        """Bytes not forwarded yet, after the line end before them."""

    @property
    def generated(self) -> int | None:
        """Tokens that this worker reports as generated; None if it does not report them."""
        return self.tokens - len(self._before) if self._begun is not None else super().generated

    @property
    def waiting(self) -> bool:
        return super().waiting or len(self._waiting) > 1

    @property
    def resumption(self) -> Resumption | None:
        """Where another worker would continue; None if this one did not report it, or no worker could."""
        if self._begun is None or b'"invalid_request_error"' in self._failure:
            return None
        tokens = self._before + read_numbers(bytes(self._numbers[:-1]))
        return Resumption(self._begun, tokens, self._ended)

    def push(self, piece: bytes) -> bytes:
        if self._begun is not None and len(self._waiting) == 1 and not self._rest:
            usual = _USUAL.fullmatch(piece)
            if usual is not None:  # the same as below, in half of the time
                events, number = usual.groups()
                self._numbers += number + b","
                self.tokens += 1
                self._tail = events[-TAIL:]
                return events
        return super().push(self._with_tokens(piece) if self._watching else piece)

    def finish(self) -> bytes:
        rest, self._waiting = self._waiting[1:], b"\n"
        return super().push(rest) + super().finish()

    def _take_counts(self, lines: bytes) -> bytes:
        return super()._take_counts(lines) if self._begun is None else lines  # its comments were noted

    def error(self, error: BatonError) -> bytes:
        """Return the worker's own error, if it reported one."""
        return self._apart() + self._failure[1:] if self._failure else super().error(error)

    @property
    def _failure(self) -> bytes:
        at = self._waiting.find(self.failures)
        return self._waiting[at:] if at >= 0 and self._waiting.endswith(b"\n\n") else b""

    def _with_tokens(self, piece: bytes) -> bytes:
        """Return the received events whose tokens are known."""
        waiting = self._waiting + piece
        passing = b""
        while (at := waiting.find(_COMMENT)) >= 0 and (end := waiting.find(b"\n\n", at + 1)) >= 0:
            passing += waiting[1 : at + 1]
            self._note(waiting[at + 1 : end])
            waiting = waiting[end + 1 :]
        if self._begun is None and not _BEGINS.startswith(waiting[: len(_BEGINS)]):
            self._watching = False  # it has nothing to say
        if len(waiting) > 1 and (not self._watching or self._passes(waiting)):
            passing += waiting[1:]
            waiting = b"\n"
        self._waiting = waiting
        return passing

    def _passes(self, waiting: bytes) -> bool:
        """Whether this needs no tokens: the end of the stream, a comment, or more than can wait."""
        comment = waiting.startswith(b"\n:") and waiting.endswith(b"\n\n") and b"\ndata:" not in waiting
        own = waiting.startswith(_COMMENT)
        return self.ends[0] in waiting or (comment and not own) or len(waiting) > WAITING_LIMIT

    def _note(self, line: bytes) -> None:
        if line.startswith(TOKENS):
            numbers, ended = read_line(line)
            if numbers:
                self._numbers += numbers + b","
                self.tokens += numbers.count(b",") + 1
            self._ended = self._ended or ended
        elif line.startswith(COMMENT):
            _, self.usage = take_comments(line + b"\n")
            self.tokens = self.usage.generated if self.usage is not None else self.tokens
        elif line.startswith(BEGINS):
            self._begun = _beginning.decode(line.removeprefix(BEGINS))


class MessageStream(ResumableStream):
    """The typed events of `/v1/messages`; the last one says that the message is complete."""

    __slots__ = ()

    ends = (*MESSAGE_STOP, *DONE)
    failures = b"\nevent: error\n"

    def error(self, error: BatonError) -> bytes:
        return super().error(error) if self._failure else self._apart() + anthropic.error_event(error)
