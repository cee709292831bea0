"""`baton router`: prepare the process and bind the port, then serve with one process or with several."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Callable

from baton_api import collector
from baton_router import server
from baton_router.frontends import frontend
from baton_router.settings import RouterSettings


def run(settings: RouterSettings, ready: Callable[[str], None] | None = None) -> None:
    """
    Serve until a signal says to stop. `ready` is called with the router's URL once it listens.

    Raises SetupError if it cannot listen, or a process of it cannot be started.
    """
    listening = server.bind(settings.host, settings.port)
    prepare()
    if settings.processes > 1:
        frontend.run(settings, listening, ready)
        return
    with asyncio.Runner(loop_factory=server.new_event_loop) as runner:
        runner.run(server.serve(settings, listening, ready))


log = logging.getLogger(__name__)

WANTED_FILES = 1 << 20
"""Descriptors; a stream needs two. Where the system sets no limit, this one is enough."""


def prepare() -> None:
    """Prepare a process that has imported everything; its children inherit this."""
    raise_file_limit()
    gc.collect()
    collector.run_rarely()


def raise_file_limit() -> None:
    """Allow as many open files as the system lets this process have."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_FILES if hard == resource.RLIM_INFINITY else hard
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        log.warning("The limit of open files stays at %d: %s. Each stream needs two.", soft, error)
    else:
        log.info("The router may open %d files instead of %d; each stream needs two.", wanted, soft)
