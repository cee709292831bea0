"""
Connections to the Kubernetes API server with a service account's credentials.

Token and certificate authority are read again for each connection, because Kubernetes replaces both while a
process runs.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from baton_http.upstream import Upstream, UpstreamExchange, request_head

CONNECT_S = 5.0

GONE = 410
"""The status, of an answer or an event, that says that a resource version is too old."""


class ApiServerError(Exception):
    """A request to the API server failed; the text says why."""


class WatchExpired(Exception):
    """The watch cannot continue from its resource version."""


@dataclass(frozen=True, slots=True)
class KubernetesAccess:
    """Address and credentials of the API server."""

    url: str
    account: Path
    """Folder with `token`, `ca.crt` and `namespace`, as Kubernetes mounts it."""
    namespace: str = ""
    """Empty: the account's own."""

    def where(self) -> str:
        """The namespace. Raises ApiServerError if it is unknown."""
        return self.namespace or self._text("namespace")

    def open(self) -> ApiServerConnection:
        """Raises ApiServerError if the account's files are invalid."""
        if not self.url:
            raise ApiServerError(
                "this process does not run in a pod: set the API server's URL with --kubernetes-api"
            )
        parts = urlsplit(self.url)
        host = parts.hostname or ""
        if parts.scheme == "http":  # a proxy on this machine, which has an account of its own
            return ApiServerConnection(Upstream(host, parts.port or 80, CONNECT_S), "")
        try:
            tls = ssl.create_default_context(cadata=self._text("ca.crt"))
        except ssl.SSLError as error:
            raise ApiServerError(f"{self.account / 'ca.crt'} holds no certificate: {error}") from error
        return ApiServerConnection(Upstream(host, parts.port or 443, CONNECT_S, tls), self._text("token"))

    def _text(self, name: str) -> str:
        try:
            return (self.account / name).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ApiServerError(f"{self.account / name} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class ApiServerConnection:
    """Connections with one set of credentials."""

    upstream: Upstream
    token: str

    @property
    def headers(self) -> list[tuple[str, str]]:
        # Its public keys have a media type of their own: with application/json alone it answers 406.
        headers = [("accept", "application/json, */*;q=0.5"), ("user-agent", "baton-router")]
        return [*headers, ("authorization", f"Bearer {self.token}")] if self.token else headers

    async def get(self, target: str) -> UpstreamExchange:
        """Raises UpstreamLost, WatchExpired and ApiServerError."""
        head = request_head("GET", target, [("host", self.upstream.name), *self.headers])
        exchange = await self.upstream.request(head)
        if exchange.status == 200:
            return exchange
        exchange.close()
        if exchange.status == GONE:
            raise WatchExpired
        raise ApiServerError(
            f"it answers with status {exchange.status}{STATUS_HINTS.get(exchange.status, '')}"
        )


STATUS_HINTS = {
    401: ": the account's token is not accepted",
    403: ": the account may not list and watch endpointslices of discovery.k8s.io in this namespace",
    404: ": it has no EndpointSlices of discovery.k8s.io/v1",
}
