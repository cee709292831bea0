"""
Every error that a client or an operator of Baton can meet: docs/reference/errors.md lists them.

Each class knows its HTTP status and its OpenAI type, code and param. So one function turns any error into a
response, and handlers do not mention statuses. Workers exchange `TransferFailed` and `IncompatiblePeer`; a
client sees them only when recovery was not allowed. `SetupError` ends a process at startup.

Each message is written here, once. The body is an error of OpenAI, with message, type, param and code
always present. The first paragraph of a class's docstring is the meaning, the rest is the remedy. The
reference of errors is generated from both.
"""

from __future__ import annotations

import math
import random
from typing import ClassVar

from baton_api.headers import PREDICTED, SHOULD_RETRY

MESSAGE_LIMIT = 2000
"""Maximum characters of a message in a response, so that a large invalid body is not echoed."""

RETRY_SPREAD_S = 4
"""Seconds over which `Retry-After` is spread, so that clients do not all retry at the same moment."""

RETRY_LIMIT_S = 120
"""Maximum `Retry-After` in seconds. OpenAI's clients ignore longer ones."""

MISSING_REQUIRED_PARAMETER = "missing_required_parameter"
INVALID_TYPE = "invalid_type"
INVALID_VALUE = "invalid_value"
INTEGER_BELOW_MIN_VALUE = "integer_below_min_value"
INTEGER_ABOVE_MAX_VALUE = "integer_above_max_value"
DECIMAL_BELOW_MIN_VALUE = "decimal_below_min_value"
DECIMAL_ABOVE_MAX_VALUE = "decimal_above_max_value"
EMPTY_ARRAY = "empty_array"
ARRAY_ABOVE_MAX_LENGTH = "array_above_max_length"
STRING_ABOVE_MAX_LENGTH = "string_above_max_length"
OBJECT_ABOVE_MAX_PROPERTIES = "object_above_max_properties"
CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
INVALID_FUNCTION_PARAMETERS = "invalid_function_parameters"
PREVIOUS_RESPONSE_NOT_FOUND = "previous_response_not_found"
UNSUPPORTED_PARAMETER = "unsupported_parameter"

CODES = {
    MISSING_REQUIRED_PARAMETER: "The field is required.",
    INVALID_TYPE: "The value has the wrong JSON type.",
    INVALID_VALUE: "The value is not one of the allowed values.",
    INTEGER_BELOW_MIN_VALUE: "The integer is below the minimum.",
    INTEGER_ABOVE_MAX_VALUE: "The integer is above the maximum.",
    DECIMAL_BELOW_MIN_VALUE: "The number is below the minimum.",
    DECIMAL_ABOVE_MAX_VALUE: "The number is above the maximum.",
    EMPTY_ARRAY: "The array needs at least one item.",
    ARRAY_ABOVE_MAX_LENGTH: "The array has too many items.",
    STRING_ABOVE_MAX_LENGTH: "The string has too many characters.",
    OBJECT_ABOVE_MAX_PROPERTIES: "The object has too many properties.",
    CONTEXT_LENGTH_EXCEEDED: "The prompt and the requested tokens exceed the model's context length.",
    INVALID_FUNCTION_PARAMETERS: "The JSON schema of a tool's parameters is invalid or too large.",
    PREVIOUS_RESPONSE_NOT_FOUND: "The previous response is not stored.",
    UNSUPPORTED_PARAMETER: "The field or its value is not supported. Remove it.",
}
"""Values of `code` of an `InvalidRequest`. The code is null when fields contradict each other."""


class BatonError(Exception):
    """The root of the tree."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None
    """Minimum seconds of the `Retry-After` header, at least 1. None: a retry does not help."""
    retriable: ClassVar[bool] = True
    """False: OpenAI's clients must not retry, although they do after this status."""
    public: str = ""
    """Message for clients that do not operate the service, without internal addresses. Empty: the message has
    no addresses."""

    @property
    def message(self) -> str:
        text = str(self)
        return text if len(text) <= MESSAGE_LIMIT else text[: MESSAGE_LIMIT - 1] + "…"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of the response besides type and length. `Retry-After` is random within its spread."""
        given = {} if self.retriable else {SHOULD_RETRY: "false"}
        if self.retry_after is not None:
            wait = random.randint(self.retry_after, self.retry_after + RETRY_SPREAD_S)
            given["retry-after"] = str(min(wait, RETRY_LIMIT_S))
        return given

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return the JSON body of a response, or of an error event in a stream."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class ClientError(BatonError):
    """What the client can correct: statuses 400 to 499."""

    status = 400
    type = "invalid_request_error"


class InvalidRequest(ClientError):
    """
    A field of the request is missing, has the wrong type, or is out of range.

    Correct the field that `param` names, as the message says. A retry without a change fails again.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextTooLong(InvalidRequest):
    """
    The prompt, or the prompt and the requested tokens, exceed the model's context length.

    Shorten the prompt, or request fewer tokens. `/tokenize` counts the tokens of a prompt.
    """

    code = CONTEXT_LENGTH_EXCEEDED

    def __init__(self, prompt: int, wanted: int, limit: int, *, param: str, least: bool = False) -> None:
        """`least`: the prompt was not tokenized, and has `prompt` tokens or more."""
        requested = f"{'at least ' if least else ''}{prompt} prompt tokens"
        requested += f" and {wanted} to generate" if wanted else ""
        super().__init__(
            f"This model's maximum context length is {limit} tokens, but the request has {requested}. "
            "Shorten the prompt or lower max_tokens.",
            param=param,
            code=self.code,
        )


class PromptTooLarge(InvalidRequest):
    """
    The prompt fits the model's context length, but not the worker's KV cache, even when that is empty.

    Shorten the prompt, or start the worker with a larger `--kv-cache-memory`.
    """

    code = CONTEXT_LENGTH_EXCEEDED

    def __init__(self, needed: int, blocks: int, block_size: int) -> None:
        super().__init__(
            f"The request needs {needed} KV blocks of {block_size} tokens, but the whole cache has "
            f"{blocks}. Shorten the prompt or start the worker with a larger --kv-cache-memory.",
            code=self.code,
        )


class PreviousResponseNotFound(InvalidRequest):
    """
    The response to continue is not stored: unknown, of another key, or expired.

    Send the conversation as `input` instead of `previous_response_id`.
    """

    code = PREVIOUS_RESPONSE_NOT_FOUND

    def __init__(self, id: str) -> None:
        super().__init__(
            f"Previous response with id {id[:100]!r} not found.",
            param="previous_response_id",
            code=self.code,
        )


class Unauthorized(ClientError):
    """
    The API key is missing or unknown, or the token is invalid.

    Send `Authorization: Bearer <key>` with a key of `--api-key`, of the key file or of a tenant, or with a
    token of the issuer that the router trusts.
    """

    status = 401
    code = "invalid_api_key"

    def __init__(self, given: bool = True, token: str = "") -> None:
        """`token` is the predicate of a sentence about an invalid token, such as "has expired"."""
        super().__init__(
            f"The token {token}."
            if token
            else "Incorrect API key provided."
            if given
            else "You didn't provide an API key. Send it as 'Authorization: Bearer <key>'."
        )

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, "www-authenticate": 'Bearer realm="baton"'}


class Forbidden(ClientError):
    """
    The key is valid, but its tenant lacks this permission.

    Use the key of another tenant, or grant the permission in the tenants file: `admin`, `classes`.
    """

    status = 403
    code = "forbidden"

    def __init__(self, what: str, tenant: str) -> None:
        super().__init__(f"The tenant {tenant!r} may not {what}.")


class ModelNotFound(ClientError):
    """
    The model is not served here.

    Use one of the models in the message and in `GET /v1/models`.
    """

    status = 404
    code = "model_not_found"
    param = "model"

    def __init__(self, model: str, served: tuple[str, ...] = ()) -> None:
        names = f" Served here: {', '.join(served)}." if served else ""
        super().__init__(f"The model {model[:200]!r} does not exist.{names}")
        self.model = model[:200]
        self.served = served


class AdapterNotFound(ClientError):
    """
    The LoRA adapter is not loaded, or its files do not exist.

    `GET /v1/models` lists the loaded adapters. Check the path in the worker's container.
    """

    status = 404


class ResponseNotFound(ClientError):
    """
    The response is not stored: unknown, of another key, or expired.

    Create it again. Responses are stored for a limited time, in limited number, and lost at a restart
    unless routers share a store (`--response-store`).
    """

    status = 404
    param = "id"

    def __init__(self, id: str) -> None:
        super().__init__(f"Response with id {id[:100]!r} not found.")


class FileNotFound(ClientError):
    """
    The file does not exist: unknown, of another key, deleted, or expired.

    List the files with `GET /v1/files`, or upload it again.
    """

    status = 404
    param = "id"

    def __init__(self, id: str, param: str = "id") -> None:
        super().__init__(f"No such File object: {id[:100]}")
        self.param = param


class BatchNotFound(ClientError):
    """
    The batch does not exist: unknown, of another key, or removed after its end.

    List the batches with `GET /v1/batches`.
    """

    status = 404
    param = "id"

    def __init__(self, id: str) -> None:
        super().__init__(f"No batch found with id '{id[:100]}'.")


class RouteNotFound(ClientError):
    """
    The path does not exist.

    `/openapi.json` lists the paths. A base URL ends in `/v1`.
    """

    status = 404

    def __init__(self, method: str, path: str) -> None:
        super().__init__(f"Unknown request URL: {method} {path[:200]}.")


class MethodNotAllowed(ClientError):
    """
    The path exists, but not with this method.

    Use a method that `/openapi.json` lists for the path.
    """

    status = 405

    def __init__(self, method: str, path: str, allowed: str = "") -> None:
        """`allowed` are the methods of the path, separated by commas."""
        super().__init__(f"Method {method[:20]} is not allowed on {path[:200]}. Allowed: {allowed}.")
        self.allowed = allowed

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, "allow": self.allowed}


class BatchEnded(ClientError):
    """
    The batch has already ended and cannot be cancelled.

    No action is needed. Its status and its files are final.
    """

    status = 409
    retriable = False  # OpenAI's clients retry a 409

    def __init__(self, status: str) -> None:
        super().__init__(f"Cannot cancel a batch with status '{status}'.")


class StaleLease(ClientError):
    """
    The runner's lease on a batch is over: another runner has the batch, or the batch has ended.

    Stop working on it. Results recorded earlier count, later ones are rejected.
    """

    status = 409
    code = "stale_lease"
    retriable = False

    def __init__(self, batch: str, given: int, current: int, status: str) -> None:
        super().__init__(
            f"The lease {given} on {batch[:100]} is over: the batch is {status} and its lease is {current}."
        )


class BodyTooSlow(ClientError):
    """
    The body of the request arrived too slowly.

    Send the request again. If it persists, the connection is too slow for the size of the body.
    """

    status = 408

    def __init__(self, seconds: float) -> None:
        """`seconds` is the longest time without a byte."""
        super().__init__(f"The request's body stopped for {seconds:g} seconds, or arrived too slowly.")


class BodyTooLarge(ClientError):
    """
    The body of the request exceeds the limit.

    Send a smaller body. Split a list of prompts over several requests.
    """

    status = 413
    code = "content_size_limit_exceeded"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is over the limit of {limit} bytes.")


class RangeNotSatisfiable(ClientError):
    """
    The `Range` header requests bytes after the end of the file.

    Request a range that starts inside the file. `Content-Range` of the response has the file's size.
    """

    status = 416

    def __init__(self, size: int) -> None:
        super().__init__(f"The range starts after the end of the file, which has {size} bytes.")
        self.size = size

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, "content-range": f"bytes */{self.size}"}


class HeadTooLarge(ClientError):
    """
    The request line and the headers together exceed the limit.

    Send fewer or shorter headers. Large cookies are a common cause.
    """

    status = 431

    def __init__(self, limit: int) -> None:
        super().__init__(f"The head of the request is over the limit of {limit} bytes.")


class QuotaExceeded(ClientError):
    """
    The key has reached its limit of files or of file bytes.

    Delete files, or start the router with a larger `--files-per-key` or `--file-bytes-per-key`.
    """

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"
    retriable = False  # a wait frees no space

    def __init__(self, what: str, stored: int, limit: int) -> None:
        super().__init__(
            f"This key stores {stored} {what}; its limit is {limit}. Delete files to store more."
        )


class RateLimited(ClientError):
    """
    The tenant has reached its limit of requests or tokens per minute, or of open requests.

    Wait for the seconds of `Retry-After` and retry. The tenants file sets the limits.
    """

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"

    def __init__(self, most: int, unit: str, retry_after: int) -> None:
        """`unit`: of `most`, such as "requests at once"."""
        super().__init__(f"Rate limit reached: {most} {unit}. Try again in {retry_after} s.")
        self.retry_after = max(1, min(RETRY_LIMIT_S, retry_after))


class RequestAborted(ClientError):
    """
    The request was aborted by its id before it was complete.

    No action is needed if that was intended. Output that was streamed before stays valid.
    """

    status = 499  # as proxies report requests that the client gave up; clients do not retry
    code = "request_aborted"

    def __init__(self) -> None:
        super().__init__("The request was aborted by its id before it was complete.")


# What the service must correct: statuses 500 to 599, and failures at startup.


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
    retriable = False

    def __init__(self, where: str) -> None:
        super().__init__(f"No space is left in {where}; this request was not stored.")


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
    retriable = False

    def __init__(self, workers: int) -> None:
        super().__init__(
            f"{workers} workers were lost while they served this request. The router does not send it to "
            "another one. Do not retry; the logs of the lost workers have the cause."
        )


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

    Start both workers with the same version, model, `--dtype`, `--speculation` and cache settings.
    """

    status = 503
    code = "worker_error"


class SetupError(BatonError):
    """
    A process cannot start, or cannot continue, without a change of its configuration.

    Follow the message, which names the setting and its value.
    """
