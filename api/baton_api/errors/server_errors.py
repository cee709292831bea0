"""Errors that the service must correct: statuses 500 to 599, and failures at startup."""

from __future__ import annotations

import math

from baton_api.errors.base import RETRY_LIMIT_S, BatonError
from baton_api.headers import PREDICTED, SHOULD_RETRY


class Overloaded(BatonError):
    """
    The queue is full, for all tenants or for this one.

    Wait for the seconds of `Retry-After` and retry, as OpenAI's clients do. If it persists, add workers.
    """

    status = 503
    code = "overloaded"

    def __init__(self, queued: int, limit: int, retry_after: int = 1, what: str = "requests") -> None:
        super().__init__(f"{queued} {what} are waiting and the limit is {limit}; try again later.")
        self.retry_after = max(1, min(RETRY_LIMIT_S, retry_after))


class NotInTime(BatonError):
    """
    The first token would exceed the request's deadline, so the request was not started.

    Wait for the seconds of `Retry-After` and retry, extend the deadline with `x-slo-ttft-ms`, or change the
    class with `x-baton-class`. If it persists, add workers.
    """

    status = 503
    code = "overloaded"

    def __init__(self, expected_s: float, wanted_s: float, *, waited: bool = False) -> None:
        """With `waited`, the request was queued and has waited for `expected_s`."""
        super().__init__(
            f"No worker became free within {expected_s:.1f} s; try again later."
            if waited
            else f"The first token is expected after {expected_s:.1f} s; the deadline is {wanted_s:.1f} s."
        )
        self.expected_s = expected_s
        self.retry_after = 1 if waited else max(1, math.ceil(min(RETRY_LIMIT_S, expected_s - wanted_s)))

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, PREDICTED: str(round(1000 * min(self.expected_s, 1e6)))}


class NotReady(BatonError):
    """
    The server is starting or draining, or has no healthy worker.

    Wait for the seconds of `Retry-After` and retry. If it persists, `/ready` reports what is missing.
    """

    status = 503
    code = "overloaded"
    retry_after = 1

    def __init__(self, message: str, public: str = "") -> None:
        super().__init__(message)
        self.public = public


class StorageUnavailable(BatonError):
    """
    The database or the object store of files and batches, or the shared store of responses, does not respond.

    Wait for the seconds of `Retry-After` and retry. If it persists, see the router's log for the cause.
    Accepted requests are not lost.
    """

    status = 503
    code = "storage_unavailable"
    retry_after = 2


class StorageFull(BatonError):
    """
    The storage of files and batches is full. The request was not stored.

    Delete files, or enlarge the router's state folder or database.
    """

    status = 507
    code = "storage_full"

    def __init__(self, where: str) -> None:
        super().__init__(f"No space is left in {where}; this request was not stored.")

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, SHOULD_RETRY: "false"}


class WorkerLost(BatonError):
    """
    The request's worker was lost, and no other worker can continue the request.

    Retry: another worker serves the request. The log of the lost worker has the cause.
    """

    status = 503
    code = "upstream_lost"
    retry_after = 1

    def __init__(self, worker: str) -> None:
        super().__init__(f"The worker {worker} was lost while it served this request.")
        self.public = "The worker was lost while it served this request."


class PoisonRequest(BatonError):
    """
    Several workers died while they served this request, so the router does not send it to another one.

    Do not send it again: the router rejects it for ten minutes after the last loss. The logs of the lost
    workers have the cause.
    """

    code = "poison_request"

    def __init__(self, workers: int) -> None:
        super().__init__(
            f"{workers} workers were lost while they served this request. The router does not send it to "
            "another one. Do not retry; the logs of the lost workers have the cause."
        )

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, SHOULD_RETRY: "false"}


class InternalError(BatonError):
    """
    An unexpected failure. The server's log has the details under the request's id.

    Search the log for the response's `x-request-id`, and report the log entry.
    """

    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("Internal server error; the server's log has the details.")


class ConstraintBroken(BatonError):
    """
    A generated token violates the request's constraint: two workers disagree about the constraint.

    Discard the output, which may not have the requested format. Retry the request.
    """

    code = "internal_error"

    def __init__(self, token: int) -> None:
        super().__init__(
            f"The response cannot continue: the constraint does not allow its last token, {token}."
        )


class TransferFailed(BatonError):
    """
    KV blocks did not arrive, or arrived damaged. Blocks that arrived earlier stay valid.

    Retry. If it persists, check the network between prefill and decode workers.
    """

    status = 503
    code = "worker_error"
    retry_after = 1


class IncompatiblePeer(BatonError):
    """
    Two workers cannot share KV blocks: their protocol, model, dtype or cache layout differs.

    Start both workers with the same version, model, `--dtype` and cache settings.
    """

    status = 503
    code = "worker_error"


class SetupError(BatonError):
    """
    A process cannot start, or cannot continue, without a change of its configuration.

    Follow the message, which names the setting and its value.
    """
