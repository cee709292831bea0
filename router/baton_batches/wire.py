"""
Messages between a runner and the router about a batch, as msgpack over HTTP.

    POST /internal/batches/{id}/lease     Apply      -> Lease      with the token it was started with
    POST /internal/batches/{id}/renew     Progress   -> Renewal    all others with the lease's token
    GET  /internal/batches/{id}/lines?after={cursor} -> Slice      leases them; repeated, the same lines
    POST /internal/batches/{id}/results   [Result]   -> Receipt
    POST /internal/batches/{id}/give_back            -> nothing    frees lines that must be sent alone
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
"""Maximum lines and bytes of a slice. A longer line is a slice by itself."""


class RunnerOrder(enum.StrEnum):
    """The router's order for the lines that the runner has not sent yet."""

    GO_ON = "go_on"
    STOP = "stop"
    """The batch was cancelled or has expired: record the finished lines and drop the rest."""


class LeaseRequest(msgspec.Struct, frozen=True):
    runner: str
    """The unique name of the runner in the ledger."""


class RunnerLease(msgspec.Struct, frozen=True):
    """A runner's lease of a batch, and the parameters of its work."""

    epoch: int
    token: str
    lease_s: float
    """Seconds until it expires unless it is renewed."""
    endpoint: str
    total: int
    done: int
    window: int
    """Most lines under way at once."""
    line_s: float
    """Maximum seconds of one attempt at a line."""


class RunnerProgress(msgspec.Struct, frozen=True):
    """A runner's counters since its last report."""

    retries: dict[str, int]
    """Lines sent again, by the `AttemptOutcome` of the attempt before."""


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
    """Lines of the input that have no result and belong to this runner now."""

    lines: list[InputLine]
    """May be empty although others are left: other runners have them."""
    cursor: str
    """For the next request."""
    last: bool
    """Whether no lines are left, except for those that this runner has."""


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
