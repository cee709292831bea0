"""The root of all errors, and the codes of invalid requests."""

from __future__ import annotations

import random
from typing import ClassVar

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
        if self.retry_after is None:
            return {}
        wait = random.randint(self.retry_after, self.retry_after + RETRY_SPREAD_S)
        return {"retry-after": str(min(wait, RETRY_LIMIT_S))}

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
