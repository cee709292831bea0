"""The connections of this process to all workers, found by address."""

from __future__ import annotations

from urllib.parse import urlsplit

from baton_router.upstream import Upstream


class Upstreams:
    """Each worker's connections, made when it is first asked for."""

    def __init__(self, connect_s: float) -> None:
        self._connect_s = connect_s
        self._upstreams: dict[str, Upstream] = {}

    def __len__(self) -> int:
        """Workers that were asked for and are still there."""
        return len(self._upstreams)

    def of(self, name: str) -> Upstream:
        """`name` is a worker's `host:port`."""
        upstream = self._upstreams.get(name)
        if upstream is None:
            address = urlsplit(f"//{name}")
            made = Upstream(address.hostname or "", address.port or 80, self._connect_s)
            upstream = self._upstreams[name] = self._upstreams.setdefault(made.name, made)
        return upstream

    def drop(self, name: str) -> None:
        """Nobody is there any more: what is still on the connections fails."""
        upstream = self._upstreams.pop(name, None)
        if upstream is not None:
            upstream.close()

    def close(self) -> None:
        for upstream in self._upstreams.values():
            upstream.close()
