"""
How many values a JSON body has, counted before it is parsed.

A body within the limit of bytes may be a million empty objects. Parsing them takes a second, for which an
event loop serves nobody else.
"""

from __future__ import annotations

from baton_api import limits
from baton_api.errors import InvalidRequest

_NO_MARKS = bytes(set(range(256)) - set(b'"{['))


def check_values(body: bytes) -> None:
    """Raise InvalidRequest if `body` has more objects, arrays and strings than `limits.VALUES`."""
    most = limits.VALUES.most
    if len(body) <= 2 * most:  # each has two bytes
        return
    if (body.count(b'"') + 1) // 2 + body.count(b"{") + body.count(b"[") <= most:
        return
    count = _values(body, most)
    if count > most:
        raise InvalidRequest(
            f"The JSON body of the request has more than {most} objects, arrays and strings. Send fewer."
        )


def _values(body: bytes, most: int) -> int:
    """Count objects, arrays and strings: only the strings, if they are more than `most`."""
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    strings = (unescaped.count(b'"') + 1) // 2
    if strings > most:
        return strings
    # Two quotes side by side change for no other byte whether it is within a string.
    marks = unescaped.translate(None, delete=_NO_MARKS).replace(b'""', b"")
    outside = b"".join(marks.split(b'"')[::2])
    return strings + outside.count(b"{") + outside.count(b"[")
