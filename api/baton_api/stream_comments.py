"""
What a worker tells the router in SSE comments between the events of a stream.

Each comment (https://html.spec.whatwg.org/multipage/server-sent-events.html) comes after the events that it
covers: what the answer has cost so far, so that it is known when the client leaves, and the resume state,
with which another worker continues the stream. The router asks for the comments and removes them. A whole
answer has its cost in a header.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

COMMENT = b": baton-usage "

_COMMENTS = re.compile(rb"^: baton-usage ([0-9]{1,18}) ([0-9]{1,18})\n\n?", re.MULTILINE)
_TEXT = re.compile(rb"([0-9]{1,18}) ([0-9]{1,18})")


class AnswerUsage(NamedTuple):
    """Tokens of a request."""

    prompt: int
    """Of all its prompts."""
    generated: int
    """Of all its choices so far."""

    def encode(self) -> bytes:
        """
        >>> AnswerUsage(5, 17).encode()
        b'5 17'
        """
        return b"%d %d" % self

    def comment(self) -> bytes:
        """Return the comment after an event of a stream."""
        return COMMENT + self.encode() + b"\n\n"

    @staticmethod
    def decode(text: bytes) -> AnswerUsage | None:
        """Read the report in a header. None: it is no report."""
        match = _TEXT.fullmatch(text)
        return None if match is None else AnswerUsage(int(match[1]), int(match[2]))


def take_comments(lines: bytes) -> tuple[bytes, AnswerUsage | None]:
    """
    Return whole lines of a stream without the comments, and the last report among them.

    >>> take_comments(b'data: {}\\n\\n: baton-usage 5 17\\n\\ndata: {}\\n\\n')
    (b'data: {}\\n\\ndata: {}\\n\\n', AnswerUsage(prompt=5, generated=17))
    """
    if lines.find(COMMENT) < 0:  # `in` takes twice as long: it tries first whether COMMENT is a number
        return lines, None
    last: AnswerUsage | None = None
    for match in _COMMENTS.finditer(lines):
        last = AnswerUsage(int(match[1]), int(match[2]))
    return (_COMMENTS.sub(b"", lines), last) if last is not None else (lines, None)


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
