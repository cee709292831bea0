"""What chat has against a request, said of the request's own fields."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

from baton_api.errors import InvalidRequest

_NAMES = (
    (re.compile(r"^max_completion_tokens$"), "max_output_tokens"),
    (re.compile(r"^response_format\.json_schema\b"), "text.format"),
    (re.compile(r"^response_format\b"), "text.format"),
    (re.compile(r"^reasoning_effort$"), "reasoning.effort"),
    (re.compile(r"^verbosity$"), "text.verbosity"),
    (re.compile(r"^logprobs$"), "include"),
    (re.compile(r"^(tools\[\d+\])\.(?:function|custom)\b"), r"\1"),
    (re.compile(r"^tool_choice\.(?:function|custom|allowed_tools)\b"), "tool_choice"),
    (re.compile(r"^(tool_choice\.tools\[\d+\])\.(?:function|custom)\b"), r"\1"),
    (re.compile(r"^messages$"), "input"),
)
_MESSAGE = re.compile(r"^messages\[(\d+)\]")


@contextlib.contextmanager
def renamed(sources: Sequence[str]) -> Iterator[None]:
    """Raise every InvalidRequest with the name of a field of responses; `sources[i]` made message i."""
    try:
        yield
    except InvalidRequest as error:
        if error.param is None:
            raise
        param = here(error.param, sources)
        message = str(error).replace(f"'{error.param}'", f"'{param}'")
        raise InvalidRequest(message, param=param, code=error.code) from error


def here(param: str, sources: Sequence[str]) -> str:
    """The field of responses that stands for chat's `param`."""
    if (message := _MESSAGE.match(param)) and int(message[1]) < len(sources):
        return sources[int(message[1])]
    for pattern, name in _NAMES:
        param = pattern.sub(name, param)
    return param
