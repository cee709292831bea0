"""
Heads of requests: what they must say before the body is read, and what a proxy forwards of them.

A proxy in front may have read another meaning from the same bytes. Then it would take a part of one client's
body for the next client's request. So a head that leaves a doubt about where its body ends is an error, and
so is one that leaves a doubt about whom it is for (RFC 9112, 3.2 and 6).

Headers that belong to one connection stay on it (RFC 9110, 7.6.1).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from baton_api.errors import InvalidRequest

Headers = Sequence[tuple[bytes, bytes]]
"""Names are lower-case."""

VERSIONS = ("1.1", "1.0")

CONNECTION_HEADERS = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

_NO_HOST = re.compile(rb"[\x00-\x20\x7f-\xff/?#@,\\]")
"""Bytes that no Host header contains."""


def check_head(version: str, method: str, headers: Headers) -> None:
    """
    Raise InvalidRequest for a head that another HTTP parser could understand differently.

    The parser has checked the syntax, and that a length is one number without a transfer coding beside it.
    """
    if version not in VERSIONS:
        raise InvalidRequest(f"HTTP/{version} is not served here. Send HTTP/1.1.")
    if method == "CONNECT":
        raise InvalidRequest("This is no proxy: CONNECT is not served.")
    hosts = 0
    codings = []
    for name, value in headers:
        if name == b"host":
            hosts += 1
            if _NO_HOST.search(value):
                raise InvalidRequest(f"The Host header is not a host: {value.decode('latin-1')!r}.")
        elif name == b"transfer-encoding":
            codings.append(value)
    if hosts > 1 or (not hosts and version == "1.1"):
        raise InvalidRequest(f"An HTTP/1.1 request has one Host header. This one has {hosts}.")
    if codings:
        if version == "1.0":
            raise InvalidRequest("HTTP/1.0 has no Transfer-Encoding. Send Content-Length or HTTP/1.1.")
        if len(codings) > 1 or codings[0].lower() != b"chunked":
            given = b", ".join(codings).decode("latin-1")
            raise InvalidRequest(f"Transfer-Encoding is {given!r}. Only 'chunked' is supported.")


def body_framing(headers: Headers) -> bytes:
    """The header lines that say where the body ends; empty if the request has no body."""
    lines = [
        b"%b: %b\r\n" % (name, value)
        for name, value in headers
        if name in (b"content-length", b"transfer-encoding")
    ]
    return b"".join(lines)
