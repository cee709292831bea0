"""What kubelets and Prometheus ask of a worker, at a port where they need no certificate."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from baton_api.errors import RouteNotFound
from baton_api.keys import OPEN_PATHS
from baton_engine.api.edge import Edge


class Probes:
    """Of an app, the paths that want no key either."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._nothing = Edge(_not_here)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        open_to_all = scope["type"] != "http" or (scope["method"] == "GET" and scope["path"] in OPEN_PATHS)
        await (self._app if open_to_all else self._nothing)(scope, receive, send)


async def _not_here(scope: Scope, receive: Receive, send: Send) -> None:
    raise RouteNotFound(scope["method"], scope["path"])
