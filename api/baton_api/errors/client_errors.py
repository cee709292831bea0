"""Errors that the client can correct: statuses 400 to 499."""

from __future__ import annotations

from baton_api.errors.base import (
    CONTEXT_LENGTH_EXCEEDED,
    PREVIOUS_RESPONSE_NOT_FOUND,
    RETRY_LIMIT_S,
    BatonError,
)
from baton_api.headers import SHOULD_RETRY


class InvalidRequest(BatonError):
    """
    A field of the request is missing, has the wrong type, or is out of range.

    Correct the field that `param` names, as the message says. A retry without a change fails again.
    """

    status = 400
    type = "invalid_request_error"

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


class Unauthorized(BatonError):
    """
    The API key is missing or unknown, or the token is invalid.

    Send `Authorization: Bearer <key>` with a key of `--api-key`, of the key file or of a tenant, or with a
    token of the issuer that the router trusts.
    """

    status = 401
    type = "invalid_request_error"
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


class Forbidden(BatonError):
    """
    The key is valid, but its tenant lacks this permission.

    Use the key of another tenant, or grant the permission in the tenants file: `admin`, `classes`.
    """

    status = 403
    type = "invalid_request_error"
    code = "forbidden"

    def __init__(self, what: str, tenant: str) -> None:
        super().__init__(f"The tenant {tenant!r} may not {what}.")


class ModelNotFound(BatonError):
    """
    The model is not served here.

    Use one of the models in the message and in `GET /v1/models`.
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


class AdapterNotFound(BatonError):
    """
    The LoRA adapter is not loaded, or its files do not exist.

    `GET /v1/models` lists the loaded adapters. Check the path in the worker's container.
    """

    status = 404
    type = "invalid_request_error"


class ResponseNotFound(BatonError):
    """
    The response is not stored: unknown, of another key, or expired.

    Create it again. Responses are stored for a limited time, in limited number, and lost at a restart
    unless routers share a store (`--response-store`).
    """

    status = 404
    type = "invalid_request_error"
    param = "id"

    def __init__(self, id: str) -> None:
        super().__init__(f"Response with id {id[:100]!r} not found.")


class FileNotFound(BatonError):
    """
    The file does not exist: unknown, of another key, deleted, or expired.

    List the files with `GET /v1/files`, or upload it again.
    """

    status = 404
    type = "invalid_request_error"
    param = "id"

    def __init__(self, id: str, param: str = "id") -> None:
        super().__init__(f"No such File object: {id[:100]}")
        self.param = param


class BatchNotFound(BatonError):
    """
    The batch does not exist: unknown, of another key, or removed after its end.

    List the batches with `GET /v1/batches`.
    """

    status = 404
    type = "invalid_request_error"
    param = "id"

    def __init__(self, id: str) -> None:
        super().__init__(f"No batch found with id '{id[:100]}'.")


class RouteNotFound(BatonError):
    """
    The path does not exist.

    `/openapi.json` lists the paths. A base URL ends in `/v1`.
    """

    status = 404
    type = "invalid_request_error"

    def __init__(self, method: str, path: str) -> None:
        super().__init__(f"Unknown request URL: {method} {path[:200]}.")


class MethodNotAllowed(BatonError):
    """
    The path exists, but not with this method.

    Use a method that `/openapi.json` lists for the path.
    """

    status = 405
    type = "invalid_request_error"

    def __init__(self, method: str, path: str, allowed: str = "") -> None:
        """`allowed` are the methods of the path, separated by commas."""
        super().__init__(f"Method {method[:20]} is not allowed on {path[:200]}. Allowed: {allowed}.")
        self.allowed = allowed

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, "allow": self.allowed}


class BatchEnded(BatonError):
    """
    The batch has already ended and cannot be cancelled.

    No action is needed. Its status and its files are final.
    """

    status = 409
    type = "invalid_request_error"

    def __init__(self, status: str) -> None:
        super().__init__(f"Cannot cancel a batch with status '{status}'.")

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, SHOULD_RETRY: "false"}  # OpenAI's clients retry a 409


class StaleLease(BatonError):
    """
    The runner's lease on a batch is over: another runner has the batch, or the batch has ended.

    Stop working on it. Results recorded earlier count, later ones are rejected.
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


class BodyTooSlow(BatonError):
    """
    The body of the request arrived too slowly.

    Send the request again. If it persists, the connection is too slow for the size of the body.
    """

    status = 408
    type = "invalid_request_error"

    def __init__(self, seconds: float) -> None:
        """`seconds` is the longest time without a byte."""
        super().__init__(f"The request's body stopped for {seconds:g} seconds, or arrived too slowly.")


class BodyTooLarge(BatonError):
    """
    The body of the request exceeds the limit.

    Send a smaller body. Split a list of prompts over several requests.
    """

    status = 413
    type = "invalid_request_error"
    code = "content_size_limit_exceeded"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is over the limit of {limit} bytes.")


class RangeNotSatisfiable(BatonError):
    """
    The `Range` header requests bytes after the end of the file.

    Request a range that starts inside the file. `Content-Range` of the response has the file's size.
    """

    status = 416
    type = "invalid_request_error"

    def __init__(self, size: int) -> None:
        super().__init__(f"The range starts after the end of the file, which has {size} bytes.")
        self.size = size

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, "content-range": f"bytes */{self.size}"}


class HeadTooLarge(BatonError):
    """
    The request line and the headers together exceed the limit.

    Send fewer or shorter headers. Large cookies are a common cause.
    """

    status = 431
    type = "invalid_request_error"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The head of the request is over the limit of {limit} bytes.")


class QuotaExceeded(BatonError):
    """
    The key has reached its limit of files or of file bytes.

    Delete files, or start the router with a larger `--files-per-key` or `--file-bytes-per-key`.
    """

    status = 429
    type = "insufficient_quota"
    code = "insufficient_quota"

    def __init__(self, what: str, stored: int, limit: int) -> None:
        super().__init__(
            f"This key stores {stored} {what}; its limit is {limit}. Delete files to store more."
        )

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, SHOULD_RETRY: "false"}  # a wait frees no space


class RateLimited(BatonError):
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


class RequestAborted(BatonError):
    """
    The request was aborted by its id before it was complete.

    No action is needed if that was intended. Output that was streamed before stays valid.
    """

    status = 499  # as proxies report requests that the client gave up; clients do not retry
    type = "invalid_request_error"
    code = "request_aborted"

    def __init__(self) -> None:
        super().__init__("The request was aborted by its id before it was complete.")
