"""
Values that the ledger holds: files, batches with their status, and results of lines.

The id of a line's request follows from batch and line, so it is the same in every runner and at every retry.
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

import msgspec

from baton_api.errors import INVALID_VALUE, InvalidRequest, WorkerLost
from baton_batches.retries import GROUPS, AttemptOutcome, LineAttempts

BAD_REQUEST = 400


class _InputLine(msgspec.Struct):
    body: msgspec.Raw


_input = msgspec.json.Decoder(_InputLine).decode
_raw = msgspec.json.Decoder(msgspec.Raw).decode


def request_id(batch: str, line: int) -> str:
    """Return the request id in the output file; in the logs it is the prefix of the request's name."""
    return f"req_{hashlib.sha256(f'{batch}:{line}'.encode()).hexdigest()[:24]}"


def body_of(text: bytes) -> bytes:
    """The body of the request that an input line is."""
    return bytes(_input(text).body)


def stream_result(line: int, name: str) -> LineResult:
    """The result of a line that was answered by a stream."""
    error = InvalidRequest(
        "A request of a batch cannot be streamed: leave `stream` out.", param="stream", code=INVALID_VALUE
    )
    return LineResult(line, BAD_REQUEST, msgspec.json.encode(error.body()), name)


def answered_result(line: int, name: str, status: int, body: bytes) -> LineResult | None:
    """The service's answer as the line's result; None if it is not the JSON that it should be."""
    try:
        whole = bytes(_raw(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if b"\n" in whole or b"\r" in whole:  # outside of strings; a line of the output is one line
        whole = msgspec.json.format(whole, indent=-1)
    return LineResult(line, status, whole, name)


def failed_result(
    line: int, name: str, outcome: AttemptOutcome, attempts: LineAttempts, status: int, body: bytes
) -> LineResult:
    """The result of a line that is not sent again."""
    if (
        outcome in (AttemptOutcome.FAULT, AttemptOutcome.OUTAGE)
        and (last := answered_result(line, name, status, body)) is not None
    ):
        return last
    match outcome:
        case AttemptOutcome.SLOW:
            code = "request_timeout"
            message = f"There was no answer in time, {attempts.timeouts} times over."
        case AttemptOutcome.LOST:
            code = WorkerLost.code
            message = (
                f"The request was given up: its worker or its connection was lost {attempts.losses} times, "
                f"the last {GROUPS.count(1)} times while no other request of the batch was in flight. "
                f"Look for {name} in the logs of the workers."
            )
        case _:
            code = "server_error"
            times = attempts.faults + attempts.outages
            message = f"The service answered with status {status} and no JSON, {times} times over."
    return LineResult(line, 0, msgspec.json.encode({"code": code, "message": message}), name)


VALIDATION_LIMIT = 100
"""Maximum reported errors of one input file."""


class BatchStatus(enum.StrEnum):
    """The status of a batch, with OpenAI's names."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self in ENDED


ENDED = frozenset({BatchStatus.COMPLETED, BatchStatus.FAILED, BatchStatus.EXPIRED, BatchStatus.CANCELLED})


class LineError(msgspec.Struct, frozen=True):
    """An error of one line that makes the input file invalid; `line` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class LineResult(msgspec.Struct, frozen=True):
    """
    How one line ended, once and for all.

    With a `status` it was answered over HTTP, and `body` is the JSON of that answer; 2xx counts as completed
    and goes to the output file. With 0 there was no answer, and `body` is `{"code": ..., "message": ...}`.
    """

    line: int
    """Number of the line in the input file, from 1; blank lines count."""
    status: int
    body: bytes
    request_id: str = ""

    @property
    def completed(self) -> bool:
        return 200 <= self.status < 300


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One file. Its owner and the location of its bytes never leave the router."""

    seq: int
    """Grows from file to file, so that files of the same second have an order."""
    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    sha256: str
    object: str
    """Key of the bytes in the store of objects."""
    created_at: int
    expires_at: int | None
    deleted_at: int | None


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch. Times are in seconds of the Unix epoch; None if the event has not happened."""

    seq: int
    id: str
    owner: str
    endpoint: str
    input_file: str
    input_object: str
    input_bytes: int
    completion_window: str
    metadata: dict[str, str] | None
    output_seconds: int | None
    """How long after the creation of the output files they are deleted; None: as any file of that purpose."""
    status: BatchStatus
    model: str | None
    errors: tuple[LineError, ...]
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    total: int
    """Lines to be answered; 0 until the file was validated."""
    completed: int
    failed: int
    output_file: str | None
    error_file: str | None
    usage: dict[str, int] | None
    runner: str
    epoch: int
    leased_until: float
    job: str
    """The BatchJob that runs it, or that is to be updated at its end; empty without one."""
    models: frozenset[str] | None
    """Models that its creator could use; None if only the owner's rights apply."""
    cut_bytes: int
    cut_lines: int
    """The part of the input that was cut into ranges for runners."""

    @property
    def done(self) -> int:
        return self.completed + self.failed


class RecordOutcome(msgspec.Struct, frozen=True):
    """The outcome of recording results."""

    new: int
    """How many lines had no result before."""
    status: BatchStatus
    """Of the batch now: finalizing once every line has a result."""
    completed: int = 0
    """Of the new ones, how many were answered well."""
    working: int = 1
    """Runners that have lines of the batch, at least 1."""
