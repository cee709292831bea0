"""
Every error that Baton puts into words.

* BatonError                    500
  x InvalidRequest              400
    + ContextTooLong            400
    + PromptTooLarge            400
    + PreviousResponseNotFound  400
  x Unauthorized                401
  x Forbidden                   403
  x ModelNotFound               404
  x ResponseNotFound            404
  x FileNotFound                404
  x BatchNotFound               404
  x RouteNotFound               404
  x MethodNotAllowed            405
  x BatchEnded                  409
  x StaleLease                  409
  x BodyTooLarge                413
  x RangeNotSatisfiable         416
  x HeadTooLarge                431
  x QuotaExceeded               429
  x RateLimited                 429
  x RequestAborted              499
  x Overloaded                  503
  x NotInTime                   503
  x NotReady                    503
  x StorageUnavailable          503
  x StorageFull                 507
  x WorkerLost                  503
  x PoisonRequest               500
  x InternalError               500
  x ConstraintBroken            500
  x TransferFailed              503
  x IncompatiblePeer            503
  x SetupError                  500

The first group is what a client of the API can meet: each class knows its HTTP status and its
OpenAI type, code and param, so one function turns any of them into a response and no handler
mentions a status. `TransferFailed` and `IncompatiblePeer` pass between workers; a client sees them
only where recovery was forbidden. `SetupError` ends a process at start: what is wrong, with which
number, and the way out.

The wording of each lives here, once. The shape on the wire is OpenAI's `ErrorResponse`: message,
type, param and code, all four always present. A class's docstring says first what it means and then what
to do; the page of errors is made of these.
"""

from __future__ import annotations

import math
import random
from typing import ClassVar

from baton_api.headers import PREDICTED, SHOULD_RETRY

MESSAGE_LIMIT = 2000
"""Characters of a message that reach a client; a bad body is never echoed whole."""

RETRY_SPREAD_S = 4
"""Seconds over which `Retry-After` is spread: those who are refused together would come back together."""

RETRY_LIMIT_S = 120
"""OpenAI's clients ignore a longer `Retry-After`."""

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
    MISSING_REQUIRED_PARAMETER: "The field must be there.",
    INVALID_TYPE: "The value is of another JSON type than the field's.",
    INVALID_VALUE: "The value is none of those that the field may have.",
    INTEGER_BELOW_MIN_VALUE: "The whole number is too low.",
    INTEGER_ABOVE_MAX_VALUE: "The whole number is too high.",
    DECIMAL_BELOW_MIN_VALUE: "The number is too low.",
    DECIMAL_ABOVE_MAX_VALUE: "The number is too high.",
    EMPTY_ARRAY: "There must be at least one item.",
    ARRAY_ABOVE_MAX_LENGTH: "There are too many items.",
    STRING_ABOVE_MAX_LENGTH: "There are too many characters.",
    OBJECT_ABOVE_MAX_PROPERTIES: "There are too many members.",
    CONTEXT_LENGTH_EXCEEDED: "The prompt, or it and the tokens asked for, do not fit the model's context.",
    INVALID_FUNCTION_PARAMETERS: "The schema of a tool's arguments is none, or too large.",
    PREVIOUS_RESPONSE_NOT_FOUND: "The response to continue is not kept.",
    UNSUPPORTED_PARAMETER: "The field asks for something that is not served; leave it out.",
}
"""What an InvalidRequest may say as `code`; it says null where fields contradict one another."""


class BatonError(Exception):
    """The root of the tree."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None
    """The least seconds for the `Retry-After` header, from 1 on; None where to try again does not help."""
    public: str = ""
    """What clients that do not run the service read instead of a message that names addresses; empty if the
    message names none."""

    @property
    def message(self) -> str:
        text = str(self)
        return text if len(text) <= MESSAGE_LIMIT else text[: MESSAGE_LIMIT - 1] + "…"

    @property
    def headers(self) -> dict[str, str]:
        """What goes with the body besides its type and length; `Retry-After` is drawn for each client."""
        if self.retry_after is None:
            return {}
        wait = random.randint(self.retry_after, self.retry_after + RETRY_SPREAD_S)
        return {"retry-after": str(min(wait, RETRY_LIMIT_S))}

    def body(self) -> dict[str, dict[str, str | None]]:
        """The JSON body of the response, or of an error event in a stream."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class InvalidRequest(BatonError):
    """
    A field of the request is missing, of the wrong type, or out of its range.

    Change the field that `param` names as the message says. To send it again as it is cannot help.
    """

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextTooLong(InvalidRequest):
    """
    The prompt, or the prompt and the tokens asked for, do not fit the model's context.

    Shorten the prompt, or ask for fewer tokens. `/tokenize` counts a prompt's tokens.
    """

    code = CONTEXT_LENGTH_EXCEEDED

    def __init__(self, prompt: int, wanted: int, limit: int, *, param: str) -> None:
        asked = f"{prompt} prompt tokens" + (f" and {wanted} to generate" if wanted else "")
        super().__init__(
            f"This model's maximum context length is {limit} tokens, but the request has {asked}. "
            "Shorten the prompt or lower max_tokens.",
            param=param,
            code=self.code,
        )


class PromptTooLarge(InvalidRequest):
    """
    The prompt fits the model's context but not the worker's KV cache, however empty.

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
    The response that the request continues is not kept: never was, not for this key, or no more.

    Send the conversation so far as `input` in place of `previous_response_id`.
    """

    code = PREVIOUS_RESPONSE_NOT_FOUND

    def __init__(self, id: str) -> None:
        super().__init__(
            f"Previous response with id {id[:100]!r} not found.",
            param="previous_response_id",
            code=self.code,
        )


class Unauthorized(BatonError):
    """
    No API key, or one that is not known; or a token that is not good here, and why.

    Send `Authorization: Bearer <key>` with a key of `--api-key`, of the key file or of a tenant, or with a
    token of the issuer that the router trusts.
    """

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def __init__(self, given: bool = True, token: str = "") -> None:
        """`token` says what is wrong with one, as the end of a sentence about it."""
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


class Forbidden(BatonError):
    """
    The key is good, but not for this: it concerns other tenants too, or its tenant may not have it.

    Use a key of a tenant that may: `admin` and `classes` in the file of tenants say who.
    """

    status = 403
    type = "invalid_request_error"
    code = "forbidden"

    def __init__(self, what: str, tenant: str) -> None:
        super().__init__(f"The tenant {tenant!r} may not {what}.")


class ModelNotFound(BatonError):
    """
    No model of that name is served here.

    Use one of the names that the message and `GET /v1/models` list.
    """

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"
    param = "model"

    def __init__(self, model: str, served: tuple[str, ...] = ()) -> None:
        names = f" Served here: {', '.join(served)}." if served else ""
        super().__init__(f"The model {model[:200]!r} does not exist.{names}")
        self.model = model[:200]
        self.served = served


class ResponseNotFound(BatonError):
    """
    No response of that id is kept: it never was, not for this key, or is no more.

    Ask for it anew: responses are kept for a bounded time, in bounded number, and not across restarts.
    """

    status = 404
    type = "invalid_request_error"
    param = "id"

    def __init__(self, id: str) -> None:
        super().__init__(f"Response with id {id[:100]!r} not found.")


class FileNotFound(BatonError):
    """
    No file of that id is here: it never was, not for this key, was deleted, or has expired.

    See `GET /v1/files` for those that there are, or upload it again.
    """

    status = 404
    type = "invalid_request_error"
    param = "id"

    def __init__(self, id: str, param: str = "id") -> None:
        super().__init__(f"No such File object: {id[:100]}")
        self.param = param


class BatchNotFound(BatonError):
    """
    No batch of that id is here: it never was, not for this key, or was forgotten a while after its end.

    See `GET /v1/batches` for those that there are.
    """

    status = 404
    type = "invalid_request_error"
    param = "id"

    def __init__(self, id: str) -> None:
        super().__init__(f"No batch found with id '{id[:100]}'.")


class RouteNotFound(BatonError):
    """
    No such path.

    See the list of paths at `/openapi.json`; a base URL ends in `/v1`.
    """

    status = 404
    type = "invalid_request_error"

    def __init__(self, method: str, path: str) -> None:
        super().__init__(f"Unknown request URL: {method} {path[:200]}.")


class MethodNotAllowed(BatonError):
    """
    The path exists, the method does not.

    Use the method that `/openapi.json` gives for the path.
    """

    status = 405
    type = "invalid_request_error"

    def __init__(self, method: str, path: str, allowed: str = "") -> None:
        """`allowed` are the methods that there are, with commas between."""
        super().__init__(f"Not allowed: {method[:20]} on {path[:200]}; it takes {allowed}.")
        self.allowed = allowed

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, "allow": self.allowed}


class BatchEnded(BatonError):
    """
    The batch has ended; there is nothing to cancel.

    Nothing: its status and the files that it has are what there will be.
    """

    status = 409
    type = "invalid_request_error"

    def __init__(self, status: str) -> None:
        super().__init__(f"Cannot cancel a batch with status '{status}'.")

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, SHOULD_RETRY: "false"}  # OpenAI's clients try again after a 409


class StaleLease(BatonError):
    """
    Whoever works on a batch does so no longer: another has taken it over, or the batch has ended.

    Stop working on it. What was recorded before counts; what comes later is refused.
    """

    status = 409
    type = "invalid_request_error"
    code = "stale_lease"

    def __init__(self, batch: str, given: int, current: int, status: str) -> None:
        super().__init__(
            f"The lease {given} on {batch[:100]} is over: the batch is {status} and its lease is {current}."
        )

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, SHOULD_RETRY: "false"}


class BodyTooLarge(BatonError):
    """
    The request's body is over the limit.

    Send less; a list of prompts may be sent in several requests.
    """

    status = 413
    type = "invalid_request_error"
    code = "content_size_limit_exceeded"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is over the limit of {limit} bytes.")


class RangeNotSatisfiable(BatonError):
    """
    The part of a file that `Range` asks for lies behind its end.

    Ask for a part that begins before the file's end; `Content-Range` of the answer says how long it is.
    """

    status = 416
    type = "invalid_request_error"

    def __init__(self, size: int) -> None:
        super().__init__(f"The range begins behind the file's end: it has {size} bytes.")
        self.size = size

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, "content-range": f"bytes */{self.size}"}


class HeadTooLarge(BatonError):
    """
    The request line and the headers together are over the limit.

    Send fewer or shorter headers; cookies are what grows unseen.
    """

    status = 431
    type = "invalid_request_error"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The head of the request is over the limit of {limit} bytes.")


class QuotaExceeded(BatonError):
    """
    This key keeps as many files, or as many bytes of files, as it may.

    Delete files that are no longer needed, or have the router started with a larger `--files-per-key` or
    `--file-bytes-per-key`.
    """

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"

    def __init__(self, what: str, held: int, limit: int) -> None:
        super().__init__(
            f"This key keeps {held} {what} and may keep {limit}. Delete some that are not needed."
        )

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, SHOULD_RETRY: "false"}  # waiting does not make room


class RateLimited(BatonError):
    """
    The tenant has used what it may in a minute, or has as many requests open as it may.

    Wait for the seconds of `Retry-After` and try again. The limits stand in the file of tenants.
    """

    status = 429
    type = "requests"
    code = "rate_limit_exceeded"

    def __init__(self, limit: str, most: int, retry_after: int) -> None:
        """`limit` is requests, tokens or streams."""
        wanted = "at once" if limit == "streams" else "per minute"
        what = "requests" if limit == "streams" else limit
        super().__init__(f"Rate limit reached: {most} {what} {wanted}. Try again in {retry_after} s.")
        self.retry_after = max(1, min(RETRY_LIMIT_S, retry_after))


class RequestAborted(BatonError):
    """
    Somebody ended the request by its id before it was complete.

    Nothing, if it was meant; what was streamed before stays valid.
    """

    status = 499  # as proxies say it of requests that were given up; clients do not try again
    type = "invalid_request_error"
    code = "request_aborted"

    def __init__(self) -> None:
        super().__init__("The request was aborted by its id before it was complete.")


class Overloaded(BatonError):
    """
    No room in the queue, or none left for this tenant: come back later.

    Wait for the seconds of `Retry-After` and try again, as OpenAI's clients do. If it lasts, add workers.
    """

    status = 503
    code = "overloaded"

    def __init__(self, queued: int, limit: int, retry_after: int = 1, what: str = "requests") -> None:
        super().__init__(f"{queued} {what} are waiting and the limit is {limit}; try again later.")
        self.retry_after = max(1, min(RETRY_LIMIT_S, retry_after))


class NotInTime(BatonError):
    """
    There is too much to do: the first token would come later than it is wanted, so nothing was begun.

    Wait for the seconds of `Retry-After` and try again, or wait longer: by `x-slo-ttft-ms`, or by another
    class (`x-baton-class`). If it lasts, add workers.
    """

    status = 503
    code = "overloaded"

    def __init__(self, expected_s: float, wanted_s: float, *, waited: bool = False) -> None:
        """`waited`: it was let in, and has waited for so long already."""
        super().__init__(
            f"No worker became free within {expected_s:.1f} s; try again later."
            if waited
            else f"The first token is expected after {expected_s:.1f} s, but wanted within {wanted_s:.1f} s."
        )
        self.expected_s = expected_s
        self.retry_after = 1 if waited else max(1, math.ceil(min(RETRY_LIMIT_S, expected_s - wanted_s)))

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, PREDICTED: str(round(1000 * min(self.expected_s, 1e6)))}


class NotReady(BatonError):
    """
    Nobody can serve this now: still starting, draining, or no healthy worker is left.

    Wait for the seconds of `Retry-After` and try again. If it lasts, `/ready` says what is missing.
    """

    status = 503
    code = "overloaded"
    retry_after = 1

    def __init__(self, message: str, public: str = "") -> None:
        super().__init__(message)
        self.public = public


class StorageUnavailable(BatonError):
    """
    Files and batches cannot be read or written now: the database or the object store does not answer.

    Wait for the seconds of `Retry-After` and try again. If it lasts, the router's log names the cause. What
    was accepted before is not lost.
    """

    status = 503
    code = "storage_unavailable"
    retry_after = 2


class StorageFull(BatonError):
    """
    There is no room left where files and batches are kept; nothing of the request was kept.

    Delete files, or give the router's state folder or database more room.
    """

    status = 507
    code = "storage_full"

    def __init__(self, where: str) -> None:
        super().__init__(f"No room is left in {where}; nothing of this request was kept.")

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, SHOULD_RETRY: "false"}


class WorkerLost(BatonError):
    """
    The worker that had the request is gone, and the request cannot go on elsewhere.

    Try again: another worker answers. The log of the lost one says why it ended.
    """

    status = 503
    code = "upstream_lost"
    retry_after = 1

    def __init__(self, worker: str) -> None:
        super().__init__(f"The worker {worker} was lost while it served this request.")
        self.public = "The worker was lost while it served this request."


class PoisonRequest(BatonError):
    """
    Several workers died while they served this request, so no other worker gets it.

    Do not send it again: the answer stays the same for ten minutes after the last loss. The logs of the lost
    workers say why they ended.
    """

    code = "poison_request"

    def __init__(self, workers: int) -> None:
        super().__init__(
            f"{workers} workers were lost while they served this request, so it is sent to no other one. "
            "Do not send it again; the logs of the workers say why they ended."
        )

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, SHOULD_RETRY: "false"}


class InternalError(BatonError):
    """
    Something broke inside; the log has the details under the request's id.

    Look for the answer's `x-request-id` in the server's log, and report what stands there.
    """

    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("Internal server error; the server's log has the details.")


class ConstraintBroken(BatonError):
    """
    An answer got a token that its constraint forbids: two workers do not agree about the constraint.

    Nothing of the answer can be trusted to have the form that was asked for. Send the request again.
    """

    code = "internal_error"

    def __init__(self, token: int) -> None:
        super().__init__(f"The answer cannot go on: the constraint does not allow its last token, {token}.")


class TransferFailed(BatonError):
    """
    KV blocks did not arrive, or arrived damaged; what had arrived before is still good.

    Try again. If it lasts, see the network between prefill and decode workers.
    """

    status = 503
    code = "worker_error"
    retry_after = 1


class IncompatiblePeer(BatonError):
    """
    Two workers that cannot share KV blocks: another protocol, model, dtype or cache layout.

    Start both workers with the same version, model, `--dtype` and settings of the cache.
    """

    status = 503
    code = "worker_error"


class SetupError(BatonError):
    """
    A process cannot start, or cannot go on, until somebody changes something.

    Do what the message says; it names the setting and the number.
    """
