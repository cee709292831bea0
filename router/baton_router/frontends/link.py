"""
The protocol between frontend processes and the scheduler over a Unix socket.

Each message is a length of four bytes and msgpack. A frontend numbers its requests, and releases each number
once, whether or not it received a grant, so that neither side keeps what the other has forgotten.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec

from baton_api import errors
from baton_api.errors import BatonError, InternalError
from baton_api.prompt_report import PromptReport
from baton_router.metrics.registry import MetricFamily
from baton_router.requests.picker import Grant, PickRequest, RequestEnd, WorkerLoss

FRAME_LIMIT = 64 * 1024 * 1024
"""Bytes of one message: the chunks of the longest prompt are some hundred kilobytes."""


class LinkMessage(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of the messages below."""


class PickMessage(LinkMessage, frozen=True):
    number: int
    request: PickRequest


class AnswerBegan(LinkMessage, frozen=True):
    number: int
    report: PromptReport | None


class WorkerFailed(LinkMessage, frozen=True):
    number: int
    loss: WorkerLoss


class WorkerFull(LinkMessage, frozen=True):
    number: int


class RequestReleased(LinkMessage, frozen=True):
    """Releases a request, also one that is still queued, because its client left or the frontend gave up."""

    number: int
    end: RequestEnd


class FrontendMetrics(LinkMessage, frozen=True):
    """The metrics of a frontend process, once a second: families of Prometheus samples."""

    families: list[MetricFamily]


class PickQueued(LinkMessage, frozen=True):
    """The request waits with the scheduler for a worker."""

    number: int


class PickGranted(LinkMessage, frozen=True):
    grant: Grant
    """Its number is the one that the frontend assigned."""


class PickRejected(LinkMessage, frozen=True):
    number: int
    kind: str
    """The error's class."""
    message: str
    fields: dict[str, Any]


class WorkerRegistry(LinkMessage, frozen=True):
    """All workers, as a frontend process needs them to continue without the scheduler."""

    workers: tuple[RegisteredWorker, ...]


FrontendMessage = PickMessage | AnswerBegan | WorkerFailed | WorkerFull | RequestReleased | FrontendMetrics
SchedulerMessage = PickQueued | PickGranted | PickRejected | WorkerRegistry


def rejection_of(number: int, error: BatonError) -> PickRejected:
    return PickRejected(number, type(error).__name__, str(error), dict(vars(error)))


def error_of(refusal: PickRejected) -> BatonError:
    """The error as the scheduler raised it."""
    kind = getattr(errors, refusal.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, BatonError)):
        kind = InternalError  # one that this process does not know
    error = kind.__new__(kind, refusal.message)
    error.args = (refusal.message,)
    vars(error).update(refusal.fields)
    return error


class LinkProtocol(asyncio.Protocol):
    """
    One end of a connection: whole messages in and out.

    Messages sent within one iteration of the event loop go out in one write.
    """

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder()
        self._received = bytearray()
        self._sending = bytearray()

    def on_frame(self, frame: memoryview) -> None:
        """One message has come."""
        raise NotImplementedError

    def on_closed(self) -> None:
        """The connection is closed."""
        raise NotImplementedError

    def send(self, message: FrontendMessage | SchedulerMessage) -> None:
        """Send a message soon; it is dropped if the connection is closed."""
        if not self._sending:
            self._loop.call_soon(self._flush)
        encoded = self._encoder.encode(message)
        self._sending += len(encoded).to_bytes(4)
        self._sending += encoded

    def _flush(self) -> None:
        sending, self._sending = self._sending, bytearray()
        if not self.transport.is_closing():
            self.transport.write(sending)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        start, end = 0, len(received)
        with memoryview(received) as view:
            while end - start >= 4:
                size = int.from_bytes(view[start : start + 4])
                if size > FRAME_LIMIT:
                    self.transport.abort()
                    return
                if end - start - 4 < size:
                    break
                start += 4 + size
                self.on_frame(view[start - size : start])
        del received[:start]

    def connection_lost(self, exc: Exception | None) -> None:
        self.on_closed()


class RegisteredWorker(msgspec.Struct, frozen=True, array_like=True):
    """One worker."""

    name: str
    ready: bool
    down_since: float
    """Loop time since which it is down; 0 if it is not."""
    expired: bool = False
    """Whether its drain time is over."""
    secure: bool = False
    """Whether TLS is used."""
