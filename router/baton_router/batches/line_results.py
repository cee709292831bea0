"""
What stands in the ledger for a line: the service's answer, or why there is none.

Pure, and the same whichever runner it was and however often the line was sent: the id of its request is made
of the batch and the line.
"""

from __future__ import annotations

import hashlib

import msgspec

from baton_api.errors import INVALID_VALUE, InvalidRequest, WorkerLost
from baton_router.batches.retrying import GROUPS, Outcome, Tries
from baton_router.batches.values import Result

BAD_REQUEST = 400


class _Input(msgspec.Struct):
    body: msgspec.Raw


_input = msgspec.json.Decoder(_Input).decode
_raw = msgspec.json.Decoder(msgspec.Raw).decode


def request_id(batch: str, line: int) -> str:
    """What the request is called in the output, and how its name begins in the logs."""
    return f"req_{hashlib.sha256(f'{batch}:{line}'.encode()).hexdigest()[:24]}"


def body_of(text: bytes) -> bytes:
    """The body of the request that an input line is."""
    return bytes(_input(text).body)


def no_stream(line: int, name: str) -> Result:
    """The result of a line that was answered by a stream."""
    error = InvalidRequest(
        "A request of a batch cannot be streamed: leave `stream` out.", param="stream", code=INVALID_VALUE
    )
    return Result(line, BAD_REQUEST, msgspec.json.encode(error.body()), name)


def answered(line: int, name: str, status: int, body: bytes) -> Result | None:
    """The service's answer as the line's result; None if it is not the JSON that it should be."""
    try:
        whole = bytes(_raw(body))
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    if b"\n" in whole or b"\r" in whole:  # outside of strings; a line of the output is one line
        whole = msgspec.json.format(whole, indent=-1)
    return Result(line, status, whole, name)


def given_up(line: int, name: str, outcome: Outcome, tries: Tries, status: int, body: bytes) -> Result:
    """The result of a line that is not sent again."""
    if (
        outcome in (Outcome.FAULT, Outcome.OUTAGE)
        and (last := answered(line, name, status, body)) is not None
    ):
        return last
    match outcome:
        case Outcome.SLOW:
            code = "request_timeout"
            message = f"There was no answer in time, {tries.timeouts} times over."
        case Outcome.LOST:
            code = WorkerLost.code
            message = (
                f"The request was given up: its worker or its connection was lost {tries.losses} times, the "
                f"last {GROUPS.count(1)} times while no other request of the batch was under way. Look for "
                f"{name} in the logs of the workers."
            )
        case _:
            code = "server_error"
            times = tries.faults + tries.outages
            message = f"The service answered with status {status} and no JSON, {times} times over."
    return Result(line, 0, msgspec.json.encode({"code": code, "message": message}), name)
