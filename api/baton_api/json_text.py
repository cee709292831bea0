"""
JSON as text: how many values a body has, and lines that stay one line for every reader.

A body within the limit of bytes may be a million empty objects. Parsing them takes a second, for which an
event loop serves nobody else.

JSON allows U+0085, U+2028 and U+2029 in strings, but many readers of lines split there, such as Python's
`str.splitlines` and httpx's `iter_lines`. Events of streams and lines of files have them as escapes.
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


_ESCAPES = ((b"\xc2\x85", rb"\u0085"), (b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"))
"""UTF-8 of the characters. These bytes are never part of another character."""


def on_one_line(encoded: bytes) -> bytes:
    r"""
    Escape the line separators of Unicode in JSON without white space between values.

    >>> on_one_line('"a\u2028b"'.encode())
    b'"a\\u2028b"'
    """
    if encoded.isascii():
        return encoded
    for separator, escape in _ESCAPES:
        if separator in encoded:
            encoded = encoded.replace(separator, escape)
    return encoded
