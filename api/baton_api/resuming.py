"""
The resume state of a stream, with which another worker continues it.

SSE comments between the events carry it (https://html.spec.whatwg.org/multipage/server-sent-events.html),
each after the events that it covers. A router that requested the comments removes them from the stream.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

BEGINS = b": baton-begins "
TOKENS = b": baton-tokens "
ENDED = b" ended"

BODY = "baton_resume"
"""Field of a request's body with the `Resumption`."""


class Beginning(msgspec.Struct, frozen=True):
    """The values that all events of a response share, on every worker."""

    id: str
    created: int
    seed: int
    cached_tokens: int
    """Cached prompt tokens in the usage."""


class Resumption(msgspec.Struct, frozen=True):
    """An interrupted response."""

    beginning: Beginning
    tokens: list[int]
    """All output tokens whose text the client has."""
    ended: bool = False
    """Whether only the end of the stream is missing."""


def begin_line(beginning: Beginning) -> bytes:
    """Return the comment before the first event."""
    return BEGINS + msgspec.json.encode(beginning) + b"\n\n"


def tokens_line(tokens: Sequence[int], *, ended: bool) -> bytes:
    """
    >>> tokens_line([5, 17], ended=False)
    b': baton-tokens 5,17\\n\\n'
    """
    return TOKENS + ",".join(map(str, tokens)).encode() + (ENDED if ended else b"") + b"\n\n"


def read_line(line: bytes) -> tuple[bytes, bool]:
    """
    Return the numbers of a `tokens_line` for `read_numbers`, and whether the output has ended.

    >>> read_line(b": baton-tokens 5,17 ended")
    (b'5,17', True)
    """
    content = line[len(TOKENS) :].rstrip(b"\n")
    return (content[: -len(ENDED)], True) if content.endswith(ENDED) else (content, False)


def read_numbers(numbers: bytes) -> list[int]:
    """Parse tokens that commas separate. Raises ValueError."""
    return [int(number) for number in numbers.split(b",")] if numbers else []


def with_resumption(body: bytes, resumption: Resumption) -> bytes:
    """Return the request body with the resumption, for the worker that continues it."""
    text = body.rstrip()
    comma = b"" if text[1:-1].strip() == b"" else b","
    member = msgspec.json.encode(BODY) + b":" + msgspec.json.encode(resumption)
    return text[:-1] + comma + member + b"}"
