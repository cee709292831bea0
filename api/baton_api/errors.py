"""
Every error that Baton puts into words.

* BatonError                    500
  x InvalidRequest              400
    + ContextTooLong            400
    + PromptTooLarge            400
    + PreviousResponseNotFound  400
  x Unauthorized                401
  x ModelNotFound               404
  x ResponseNotFound            404
  x RouteNotFound               404
  x MethodNotAllowed            405
  x BodyTooLarge                413
  x RequestAborted              499
  x Overloaded                  503
  x NotReady                    503
  x WorkerLost                  503
  x InternalError               500
  x TransferFailed              503
  x IncompatiblePeer            503
  x SetupError                  500

The first group is what a client of the API can meet: each class knows its HTTP status and its
OpenAI type, code and param, so one function turns any of them into a response and no handler
mentions a status. `TransferFailed` and `IncompatiblePeer` pass between workers; a client sees them
only where recovery was forbidden. `SetupError` ends a process at start: what is wrong, with which
number, and the way out.

The wording of each lives here, once. The shape on the wire is OpenAI's `ErrorResponse`: message,
type, param and code, all four always present.
"""

from __future__ import annotations

from typing import ClassVar

MESSAGE_LIMIT = 2000
"""Characters of a message that reach a client; a bad body is never echoed whole."""


class BatonError(Exception):
    """The root of the tree."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None
    """Whole seconds for the `Retry-After` header, 1 to 120; OpenAI's clients ignore more."""

    @property
    def message(self) -> str:
        text = str(self)
        return text if len(text) <= MESSAGE_LIMIT else text[: MESSAGE_LIMIT - 1] + "…"

    @property
    def headers(self) -> dict[str, str]:
        """What goes with the body besides its type and length."""
        return {} if self.retry_after is None else {"retry-after": str(self.retry_after)}

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
    """A field of the request is missing, of the wrong type, or out of its range."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextTooLong(InvalidRequest):
    """The prompt, or the prompt and the tokens asked for, do not fit the model's context."""

    def __init__(self, prompt: int, wanted: int, limit: int, *, param: str) -> None:
        asked = f"{prompt} prompt tokens" + (f" and {wanted} to generate" if wanted else "")
        super().__init__(
            f"This model's maximum context length is {limit} tokens, but the request has {asked}. "
            "Shorten the prompt or lower max_tokens.",
            param=param,
            code="context_length_exceeded",
        )


class PromptTooLarge(InvalidRequest):
    """The prompt fits the model's context but not the worker's KV cache, however empty."""

    def __init__(self, needed: int, blocks: int, block_size: int) -> None:
        super().__init__(
            f"The request needs {needed} KV blocks of {block_size} tokens, but the whole cache has "
            f"{blocks}. Shorten the prompt or start the worker with a larger --kv-cache-memory.",
            code="context_length_exceeded",
        )


class PreviousResponseNotFound(InvalidRequest):
    """The response that the request continues is not kept: never was, not for this key, or no more."""

    def __init__(self, id: str) -> None:
        super().__init__(
            f"Previous response with id {id[:100]!r} not found.",
            param="previous_response_id",
            code="previous_response_not_found",
        )


class Unauthorized(BatonError):
    """No API key, or one that is not known."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def __init__(self, given: bool = True) -> None:
        super().__init__(
            "Incorrect API key provided."
            if given
            else "You didn't provide an API key. Send it as 'Authorization: Bearer <key>'."
        )

    @property
    def headers(self) -> dict[str, str]:
        return {**super().headers, "www-authenticate": 'Bearer realm="baton"'}


class ModelNotFound(BatonError):
    """No model of that name is served here."""

    status = 404
    type = "invalid_request_error"
    code = "model_not_found"
    param = "model"

    def __init__(self, model: str, served: tuple[str, ...] = ()) -> None:
        names = f" Served here: {', '.join(served)}." if served else ""
        super().__init__(f"The model {model[:200]!r} does not exist.{names}")


class ResponseNotFound(BatonError):
    """No response of that id is kept: it never was, not for this key, or is no more."""

    status = 404
    type = "invalid_request_error"
    param = "id"

    def __init__(self, id: str) -> None:
        super().__init__(f"Response with id {id[:100]!r} not found.")


class RouteNotFound(BatonError):
    """No such path."""

    status = 404
    type = "invalid_request_error"

    def __init__(self, method: str, path: str) -> None:
        super().__init__(f"Unknown request URL: {method} {path[:200]}.")


class MethodNotAllowed(BatonError):
    """The path exists, the method does not."""

    status = 405
    type = "invalid_request_error"

    def __init__(self, method: str, path: str) -> None:
        super().__init__(f"Not allowed: {method} on {path[:200]}.")


class BodyTooLarge(BatonError):
    """The request's body is over the limit."""

    status = 413
    type = "invalid_request_error"
    code = "content_size_limit_exceeded"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The request body is over the limit of {limit} bytes.")


class RequestAborted(BatonError):
    """Somebody ended the request by its id before it was complete."""

    status = 499  # as proxies say it of requests that were given up; clients do not try again
    type = "invalid_request_error"
    code = "request_aborted"

    def __init__(self) -> None:
        super().__init__("The request was aborted by its id before it was complete.")


class Overloaded(BatonError):
    """No room in the queue: come back later."""

    status = 503
    code = "overloaded"

    def __init__(self, queued: int, limit: int, retry_after: int = 1) -> None:
        super().__init__(f"{queued} requests are waiting and the limit is {limit}; try again later.")
        self.retry_after = max(1, min(120, retry_after))


class NotReady(BatonError):
    """Nobody can serve this now: still starting, draining, or no healthy worker is left."""

    status = 503
    code = "overloaded"
    retry_after = 1


class WorkerLost(BatonError):
    """The worker that had the request is gone, and the request cannot go on elsewhere."""

    status = 503
    code = "worker_error"
    retry_after = 1

    def __init__(self, worker: str) -> None:
        super().__init__(f"The worker {worker} was lost while it served this request.")


class InternalError(BatonError):
    """Something broke inside; the log has the details under the request's id."""

    code = "internal_error"

    def __init__(self) -> None:
        super().__init__("Internal server error; the server's log has the details.")


class TransferFailed(BatonError):
    """KV blocks did not arrive, or arrived damaged; what had arrived before is still good."""

    status = 503
    code = "worker_error"
    retry_after = 1


class IncompatiblePeer(BatonError):
    """Two workers that cannot share KV blocks: another protocol, model, dtype or cache layout."""

    status = 503
    code = "worker_error"


class SetupError(BatonError):
    """A process cannot start, or cannot go on, until somebody changes something."""
