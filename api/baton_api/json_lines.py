"""
JSON that stays one line for every reader.

JSON allows U+0085, U+2028 and U+2029 in strings, but many readers of lines split there, such as Python's
`str.splitlines` and httpx's `iter_lines`. Events of streams and lines of files have them as escapes.
"""

from __future__ import annotations

_ESCAPES = ((b"\xc2\x85", rb"\u0085"), (b"\xe2\x80\xa8", rb"\u2028"), (b"\xe2\x80\xa9", rb"\u2029"))
"""UTF-8 of the characters. These bytes are never part of another character."""


def on_one_line(encoded: bytes) -> bytes:
    r"""
    Escape the line separators of Unicode in JSON without white space between values.

    >>> on_one_line('"a\u2028b"'.encode())
    b'"a\\u2028b"'
    """
    for separator, escape in _ESCAPES:
        if separator in encoded:
            encoded = encoded.replace(separator, escape)
    return encoded
