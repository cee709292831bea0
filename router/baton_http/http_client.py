"""
An HTTP client for short requests: request heads, replies of limited size, and a pool of connections.

It is built on `upstream`. The proxy's hot path builds its own heads (`baton_router.engines.heads`).
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import urlsplit

from baton_api.errors import WorkerLost
from baton_http.upstream import Headers, Upstream, UpstreamExchange

log = logging.getLogger(__name__)

Text = str | bytes


class Reply(NamedTuple):
    """A complete reply."""

    status: int
    headers: Headers
    body: bytes


class ReplyTooLarge(WorkerLost):
    """The body of a reply is over the limit."""

    def __init__(self, server: str, limit: int) -> None:
        super().__init__(server)
        self.args = (f"The reply of {server} has more than {limit} bytes.",)


def request_head(method: Text, target: Text, headers: Iterable[tuple[Text, Text]]) -> bytes:
    """
    The head of an HTTP/1.1 request.

    >>> request_head("GET", "/load", [("host", "10.0.0.1:8000")])
    b'GET /load HTTP/1.1\\r\\nhost: 10.0.0.1:8000\\r\\n\\r\\n'
    """
    fields = [b"%b: %b\r\n" % (_encode(name), _encode(value)) for name, value in headers]
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (_encode(method), _encode(target), b"".join(fields))


async def read_body(exchange: UpstreamExchange, limit: int) -> bytes:
    """The whole body of a reply. Raises UpstreamLost, and ReplyTooLarge above `limit` bytes."""
    body = bytearray()
    try:
        while piece := await exchange.read():
            body += piece
            if len(body) > limit:
                raise ReplyTooLarge(exchange.server, limit)
    finally:
        exchange.close()
    return bytes(body)


async def fetch(
    upstream: Upstream,
    method: str,
    target: str,
    headers: Iterable[tuple[Text, Text]] = (),
    body: bytes = b"",
    *,
    limit: int,
) -> Reply:
    """Send a request and read its whole reply. Raises UpstreamLost, NotReady and ReplyTooLarge."""
    length = [("content-length", str(len(body)))] if method != "GET" else []
    head = request_head(method, target, [("host", upstream.name), *length, *headers])
    exchange = await upstream.request(head, body)
    return Reply(exchange.status, exchange.headers, await read_body(exchange, limit))


def _encode(text: Text) -> bytes:
    return text.encode() if isinstance(text, str) else text


class UpstreamPool:
    """The connections of this process to all workers, opened when a worker is first used."""

    def __init__(self, connect_s: float, tls: ssl.SSLContext | None = None) -> None:
        """`tls` is for workers that require TLS."""
        self._connect_s = connect_s
        self._tls = tls
        self._secure: set[str] = set()
        self._upstreams: dict[str, Upstream] = {}

    def __len__(self) -> int:
        """Workers that were used and not dropped."""
        return len(self._upstreams)

    def set_tls(self, name: str, secure: bool) -> None:
        """Use TLS for this worker from now on, or not. A change drops its connections."""
        if secure == (name in self._secure):
            return
        self.drop(name)
        if secure:
            self._secure.add(name)
            if self._tls is None:
                log.error(
                    "The worker %s requires TLS, and this router has no certificate. Set --tls-folder.", name
                )

    def get(self, name: str) -> Upstream:
        """The worker at `name`, its `host:port`."""
        upstream = self._upstreams.get(name)
        if upstream is None:
            address = urlsplit(f"//{name}")
            tls = self._tls if name in self._secure else None
            new = Upstream(address.hostname or "", address.port or 80, self._connect_s, tls)
            upstream = self._upstreams[name] = self._upstreams.setdefault(new.name, new)
        return upstream

    def drop(self, name: str) -> None:
        """Close the connections of a worker that is gone; requests on them fail."""
        self._secure.discard(name)
        upstream = self._upstreams.pop(name, None)
        if upstream is not None:
            upstream.close()

    def close(self) -> None:
        for upstream in self._upstreams.values():
            upstream.close()
