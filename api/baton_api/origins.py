"""
Which web pages may call a server from somebody's browser (CORS).

A key comes in a header, which no page has by itself, so a server that wants one is open to all pages, as
peers are. One that wants none is open to no page unless told: its port is within reach of every page that
somebody opens on the same machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from baton_api import headers

if TYPE_CHECKING:
    from starlette.types import ASGIApp

EXPOSED = (headers.REQUEST_ID, headers.WORKER, "retry-after")
"""Headers of answers that a page may read."""


def allowed(named: Sequence[str], keyed: bool) -> tuple[str, ...]:
    """The origins that were named; else all if the server wants a key, and none if it does not."""
    return tuple(named) or (("*",) if keyed else ())


def answering(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app`, with browsers told that pages of these origins may call it; preflights never reach it."""
    from starlette.middleware.cors import CORSMiddleware

    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=EXPOSED
    )
