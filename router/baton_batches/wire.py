"""
What a runner and the router say to one another about a batch, as msgpack over HTTP.

    POST /internal/batches/{id}/lease     Apply      -> Lease      with the token it was started with
    POST /internal/batches/{id}/renew     Progress   -> Renewal    all others with the lease's token
    GET  /internal/batches/{id}/lines?after={cursor} -> Slice
    POST /internal/batches/{id}/results   [Result]   -> Receipt
    POST /internal/batches/{id}/release              -> nothing

401 says that the token is not good (any more), 409 that the batch is another's now or has ended: both end
the runner. 503 says to come back.
"""

from __future__ import annotations

import enum

import msgspec

from baton_batches.values import Result

PATH = "/internal/batches/"

MSGPACK = "application/msgpack"

SLICE_LINES = 500
SLICE_BYTES = 1024 * 1024
"""Bounds of a slice; one line that is larger comes alone."""


class Order(enum.StrEnum):
    """What the runner is to do with what it has not sent yet."""

    GO_ON = "go_on"
    STOP = "stop"
    """The batch was cancelled, or its time is over: record what is done, let go of the rest."""


class Apply(msgspec.Struct, frozen=True):
    runner: str
    """What the ledger calls it; no two are called the same."""


class Lease(msgspec.Struct, frozen=True):
    """A runner's right to work, and how it is to."""

    epoch: int
    token: str
    lease_s: float
    """Seconds for which it is good unless it is renewed."""
    endpoint: str
    total: int
    done: int
    window: int
    """Most lines under way at once."""
    line_s: float
    """Seconds that one try at a line may take."""


class Progress(msgspec.Struct, frozen=True):
    """What a runner tells of itself, since it told so last."""

    retries: dict[str, int]
    """Lines that were tried again, by the `retrying.Outcome` of the try before."""


class Renewal(msgspec.Struct, frozen=True):
    token: str
    order: Order
    window: int
    """Most lines under way at once, from now on."""


class Line(msgspec.Struct, frozen=True, array_like=True):
    number: int
    """In the input file, from 1."""
    text: bytes


class Slice(msgspec.Struct, frozen=True):
    """Lines of the input that have no result, from `after` on."""

    lines: list[Line]
    cursor: str
    """Where the next one begins."""
    last: bool


class Receipt(msgspec.Struct, frozen=True):
    new: int
    order: Order
    window: int


encode = msgspec.msgpack.Encoder().encode

apply = msgspec.msgpack.Decoder(Apply).decode
lease = msgspec.msgpack.Decoder(Lease).decode
progress = msgspec.msgpack.Decoder(Progress).decode
renewal = msgspec.msgpack.Decoder(Renewal).decode
slice = msgspec.msgpack.Decoder(Slice).decode
results = msgspec.msgpack.Decoder(list[Result]).decode
receipt = msgspec.msgpack.Decoder(Receipt).decode
