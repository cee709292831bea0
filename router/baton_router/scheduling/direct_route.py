"""
A direct route: a gateway sends the request to the decode worker, and the router only chooses the workers.

The gateway may restrict the choice to some endpoints. Without the router on the way, only a decode worker
that fetches the prompt by itself can have a prefill worker.
"""

from __future__ import annotations

import msgspec


class DirectRoute(msgspec.Struct, frozen=True):
    """The workers that a gateway can send a request to."""

    endpoints: tuple[str, ...] | None = None
    """Allowed decode workers, each as `IP:PORT` or `IP`. None: all."""

    def reaches(self, worker: str) -> bool:
        """Whether the decode worker with this name, its `host:port`, may be chosen."""
        if self.endpoints is None:
            return True
        return worker in self.endpoints or worker.rpartition(":")[0].strip("[]") in self.endpoints
