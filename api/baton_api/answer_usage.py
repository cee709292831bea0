"""
What an answer has cost so far, as a worker reports it to the router that asked for it.

A whole answer has the report in a header. A stream has it in comments between its events
(https://html.spec.whatwg.org/multipage/server-sent-events.html), each after the events that it covers, so
that it is known when the client leaves. The router removes both.
"""

from __future__ import annotations

import re
from typing import NamedTuple

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
    if COMMENT not in lines:
        return lines, None
    last: AnswerUsage | None = None
    for match in _COMMENTS.finditer(lines):
        last = AnswerUsage(int(match[1]), int(match[2]))
    return (_COMMENTS.sub(b"", lines), last) if last is not None else (lines, None)
