"""`baton router`: bind the port, then serve with one process or with several."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from baton_router import process, server
from baton_router.frontends import pool
from baton_router.settings import RouterSettings


def run(settings: RouterSettings, ready: Callable[[str], None] | None = None) -> None:
    """
    Serve until a signal says to stop. `ready` is called with the router's URL once it listens.

    Raises SetupError if it cannot listen, or a process of it cannot be started.
    """
    listening = server.bind(settings.host, settings.port)
    process.prepare()
    if settings.processes > 1:
        pool.run(settings, listening, ready)
        return
    with asyncio.Runner(loop_factory=server.new_event_loop) as runner:
        runner.run(server.serve(settings, listening, ready))
