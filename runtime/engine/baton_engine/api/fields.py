"""
Typed access to the members of one JSON object, with validation of types and ranges.

One call reads one field and states its type and range, so that `parameters.py` reads like a table of the API.
`null` equals absence, and unknown members are ignored. An invalid value raises InvalidRequest with OpenAI's
error code and the path of the field.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from baton_api.errors import (
    ARRAY_ABOVE_MAX_LENGTH,
    INVALID_TYPE,
    INVALID_VALUE,
    MISSING_REQUIRED_PARAMETER,
    STRING_ABOVE_MAX_LENGTH,
    InvalidRequest,
)

ECHO_LIMIT = 60
"""Maximum characters of an invalid value in an error message."""


class Fields:
    """One JSON object of a request body."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self.path = path
        """Path of the object in the body; empty for the body itself."""

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of all members, including unknown ones."""
        return iter(self._values)

    def param(self, name: str) -> str:
        """Return the path of the field for errors, such as `messages[0].role`."""
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> Any:
        return self._values.get(name)

    def given(self, name: str) -> bool:
        """Return whether the field has a value other than null, false, 0 or an empty one."""
        return bool(self._values.get(name))

    def require(self, name: str) -> Any:
        value = self._values.get(name)
        if value is None:
            raise InvalidRequest(
                f"Missing required parameter: '{self.param(name)}'.",
                param=self.param(name),
                code=MISSING_REQUIRED_PARAMETER,
            )
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong_type(name, "a boolean", value)
        return value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self._values.get(name)
        return None if value is None else integer(value, self.param(name), low, high)

    def number(
        self, name: str, default: float, low: float, high: float = math.inf, *, above: bool = False
    ) -> float:
        """Read a finite number. `above` excludes `low` itself."""
        value = self._values.get(name)
        return default if value is None else number(value, self.param(name), low, high, above=above)

    def text(self, name: str, limit: int | None = None) -> str | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, str):
            self.wrong_type(name, "a string", value)
        if limit is not None and len(value) > limit:
            raise InvalidRequest(
                f"Invalid '{self.param(name)}': string too long. Expected at most {limit} characters, "
                f"but got {len(value)}.",
                param=self.param(name),
                code=STRING_ABOVE_MAX_LENGTH,
            )
        return value

    def required_text(self, name: str, limit: int | None = None) -> str:
        self.require(name)
        text = self.text(name, limit)
        assert text is not None
        return text

    def choice(self, name: str, allowed: Sequence[str]) -> str | None:
        value = self.text(name)
        if value is not None and value not in allowed:
            self.wrong_value(name, f"Expected one of {', '.join(map(repr, allowed))}, but got {shown(value)}")
        return value

    def array(self, name: str, limit: int) -> list[Any] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list):
            self.wrong_type(name, "an array", value)
        if len(value) > limit:
            raise InvalidRequest(
                f"Invalid '{self.param(name)}': array too long. Expected at most {limit} items, "
                f"but got {len(value)}.",
                param=self.param(name),
                code=ARRAY_ABOVE_MAX_LENGTH,
            )
        return value

    def mapping(self, name: str) -> dict[str, Any] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.wrong_type(name, "an object", value)
        return value

    def member(self, name: str) -> Fields:
        """Return the object that the field contains; an empty one if the field is absent."""
        return Fields(self.mapping(name) or {}, self.param(name))

    def objects(self, name: str, limit: int) -> Iterator[Fields]:
        """Iterate over an array of objects."""
        for position, item in enumerate(self.array(name, limit) or ()):
            path = self.param(f"{name}[{position}]")
            if not isinstance(item, dict):
                raise wrong_type(path, "an object", item)
            yield Fields(item, path)

    def wrong_type(self, name: str, expected: str, value: object) -> NoReturn:
        raise wrong_type(self.param(name), expected, value)

    def wrong_value(self, name: str, reason: str) -> NoReturn:
        param = self.param(name)
        raise InvalidRequest(f"Invalid value for '{param}': {reason}.", param=param, code=INVALID_VALUE)


def integer(value: object, param: str, low: int, high: int) -> int:
    """Return `value` as an integer within bounds. 7.0 is valid, booleans are not."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(param, "an integer", value)
    _within(value, param, "integer", low, high)
    return value


def number(value: object, param: str, low: float, high: float = math.inf, *, above: bool = False) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong_type(param, "a number", value)
    # The upper bound rejects integers that a float cannot represent.
    _within(value, param, "decimal", low, min(high, 1e300), above=above)
    return float(value)


def wrong_type(param: str, expected: str, value: object) -> InvalidRequest:
    return InvalidRequest(
        f"Invalid type for '{param}': expected {expected}, but got {_kind(value)} instead.",
        param=param,
        code=INVALID_TYPE,
    )


def shown(value: object) -> str:
    """Return a value for an error message, truncated to `ECHO_LIMIT` characters."""
    text = repr(value)
    return text if len(text) <= ECHO_LIMIT else text[: ECHO_LIMIT - 1] + "…"


def _within(value: float, param: str, noun: str, low: float, high: float, *, above: bool = False) -> None:
    if value > high:
        side, bound = "above_max", f"<= {high}"
    elif value < low or (above and value == low):
        side, bound = "below_min", f"{'>' if above else '>='} {low}"
    else:
        return
    comparison = "above maximum" if side == "above_max" else "below minimum"
    raise InvalidRequest(
        f"Invalid '{param}': {noun} {comparison} value. Expected a value {bound}, but got {shown(value)} "
        "instead.",
        param=param,
        code=f"{noun}_{side}_value",
    )


def _kind(value: object) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number" if not isinstance(value, int) else "an integer"
        case str():
            return "a string"
        case list():
            return "an array"
        case _:
            return "an object"


@contextlib.contextmanager
def renamed_fields(here: Callable[[str], str]) -> Iterator[None]:
    """Rename the fields in InvalidRequest, for an endpoint that translates its requests for another one."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is None:
            raise
        param = here(error.param)
        message = str(error).replace(f"'{error.param}'", f"'{param}'")
        raise InvalidRequest(message, param=param, code=error.code) from error
