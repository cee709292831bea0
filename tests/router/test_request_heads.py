"""Heads of requests that could be understood in two ways."""

from __future__ import annotations

import pytest

from baton_api.errors import InvalidRequest
from baton_http.request_heads import body_framing, check_head

HOST = (b"host", b"x:8080")
CHUNKED = (b"transfer-encoding", b"chunked")

ACCEPTED = {
    "HTTP/1.1": ("1.1", "GET", [HOST]),
    "an empty host": ("1.1", "GET", [(b"host", b"")]),
    "an IPv6 host": ("1.1", "GET", [(b"host", b"[::1]:8080")]),
    "a length": ("1.1", "POST", [HOST, (b"content-length", b"5")]),
    "chunks": ("1.1", "POST", [HOST, CHUNKED]),
    "chunks in capitals": ("1.1", "POST", [HOST, (b"transfer-encoding", b"Chunked")]),
    "HTTP/1.0 without a host": ("1.0", "POST", [(b"content-length", b"5")]),
    "HTTP/1.0 with a host": ("1.0", "GET", [HOST]),
}

REJECTED = {
    "no host": ("1.1", "GET", [], "0"),
    "two hosts": ("1.1", "GET", [HOST, HOST], "2"),
    "two hosts of HTTP/1.0": ("1.0", "GET", [HOST, (b"host", b"y")], "2"),
    "a host with a path": ("1.1", "GET", [(b"host", b"x/v1")], "x/v1"),
    "two hosts in one line": ("1.1", "GET", [(b"host", b"x, y")], "x, y"),
    "a host with a user": ("1.1", "GET", [(b"host", b"a@x")], "a@x"),
    "gzip": ("1.1", "POST", [HOST, (b"transfer-encoding", b"gzip, chunked")], "gzip, chunked"),
    "chunks in chunks": ("1.1", "POST", [HOST, (b"transfer-encoding", b"chunked, chunked")], "chunked, "),
    "chunks twice": ("1.1", "POST", [HOST, CHUNKED, CHUNKED], "chunked, chunked"),
    "an empty coding": ("1.1", "POST", [HOST, (b"transfer-encoding", b"")], "''"),
    "chunks of HTTP/1.0": ("1.0", "POST", [HOST, CHUNKED], "HTTP/1.0"),
    "HTTP/0.9": ("0.9", "GET", [], "HTTP/0.9"),
    "HTTP/2 in text": ("2.0", "GET", [HOST], "HTTP/2.0"),
    "a tunnel": ("1.1", "CONNECT", [HOST], "CONNECT"),
}


@pytest.mark.parametrize(("version", "method", "headers"), ACCEPTED.values(), ids=ACCEPTED.keys())
def test_unambiguous_head_is_accepted(version: str, method: str, headers: list[tuple[bytes, bytes]]) -> None:
    check_head(version, method, headers)


@pytest.mark.parametrize(("version", "method", "headers", "named"), REJECTED.values(), ids=REJECTED.keys())
def test_ambiguous_head_is_rejected_by_name(
    version: str, method: str, headers: list[tuple[bytes, bytes]], named: str
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        check_head(version, method, headers)
    assert named in raised.value.message


def test_body_framing_keeps_what_ends_the_body_and_nothing_else() -> None:
    assert body_framing([HOST, (b"upgrade", b"h2c")]) == b""
    assert body_framing([HOST, (b"content-length", b"5"), (b"x", b"y")]) == b"content-length: 5\r\n"
    assert body_framing([HOST, CHUNKED]) == b"transfer-encoding: chunked\r\n"
