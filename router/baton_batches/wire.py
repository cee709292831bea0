"""
Messages between a runner and the router about a batch, as msgpack over HTTP.

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

from baton_batches.values import LineResult

PATH = "/internal/batches/"

MSGPACK = "application/msgpack"

SLICE_LINES = 500
SLICE_BYTES = 1024 * 1024
"""Bounds of a slice; one line that is larger comes alone."""


class RunnerOrder(enum.StrEnum):
    """What the runner is to do with what it has not sent yet."""

    GO_ON = "go_on"
    STOP = "stop"
    """The batch was cancelled, or its time is over: record what is done, let go of the rest."""


class LeaseRequest(msgspec.Struct, frozen=True):
    runner: str
    """What the ledger calls it; no two are called the same."""


class RunnerLease(msgspec.Struct, frozen=True):
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


class RunnerProgress(msgspec.Struct, frozen=True):
    """What a runner tells of itself, since it told so last."""

    retries: dict[str, int]
    """Lines that were tried again, by the `retrying.Outcome` of the try before."""


class LeaseRenewal(msgspec.Struct, frozen=True):
    token: str
    order: RunnerOrder
    window: int
    """Most lines under way at once, from now on."""


class InputLine(msgspec.Struct, frozen=True, array_like=True):
    number: int
    """In the input file, from 1."""
    text: bytes


class InputSlice(msgspec.Struct, frozen=True):
    """Lines of the input that have no result, from `after` on."""

    lines: list[InputLine]
    cursor: str
    """Where the next one begins."""
    last: bool


class ResultReceipt(msgspec.Struct, frozen=True):
    new: int
    order: RunnerOrder
    window: int


encode = msgspec.msgpack.Encoder().encode

decode_lease_request = msgspec.msgpack.Decoder(LeaseRequest).decode
decode_lease = msgspec.msgpack.Decoder(RunnerLease).decode
decode_progress = msgspec.msgpack.Decoder(RunnerProgress).decode
decode_renewal = msgspec.msgpack.Decoder(LeaseRenewal).decode
decode_slice = msgspec.msgpack.Decoder(InputSlice).decode
decode_results = msgspec.msgpack.Decoder(list[LineResult]).decode
decode_receipt = msgspec.msgpack.Decoder(ResultReceipt).decode
