"""The connections of this process to all workers, found by address."""

from __future__ import annotations

import logging
import ssl
from urllib.parse import urlsplit

from baton_http.upstream import Upstream

log = logging.getLogger(__name__)


class UpstreamPool:
    """Each worker's connections, made when it is first asked for."""

    def __init__(self, connect_s: float, tls: ssl.SSLContext | None = None) -> None:
        """`tls`: for the workers that are spoken to by it."""
        self._connect_s = connect_s
        self._tls = tls
        self._secure: set[str] = set()
        self._upstreams: dict[str, Upstream] = {}

    def __len__(self) -> int:
        """Workers that were asked for and are still there."""
        return len(self._upstreams)

    def meet(self, name: str, secure: bool) -> None:
        """How this worker is spoken to from now on, by TLS or not; nothing that was otherwise stays."""
        if secure == (name in self._secure):
            return
        self.drop(name)
        if secure:
            self._secure.add(name)
            if self._tls is None:
                log.error("The worker %s wants TLS, and this router has no certificate: --tls-folder.", name)

    def of(self, name: str) -> Upstream:
        """`name` is a worker's `host:port`."""
        upstream = self._upstreams.get(name)
        if upstream is None:
            address = urlsplit(f"//{name}")
            tls = self._tls if name in self._secure else None
            made = Upstream(address.hostname or "", address.port or 80, self._connect_s, tls)
            upstream = self._upstreams[name] = self._upstreams.setdefault(made.name, made)
        return upstream

    def drop(self, name: str) -> None:
        """Nobody is there any more: what is still on the connections fails."""
        self._secure.discard(name)
        upstream = self._upstreams.pop(name, None)
        if upstream is not None:
            upstream.close()

    def close(self) -> None:
        for upstream in self._upstreams.values():
            upstream.close()
