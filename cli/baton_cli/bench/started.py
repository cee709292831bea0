"""What is measured: a service that runs somewhere, or one that lives as long as it is measured."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from rich.console import Console


@contextlib.asynccontextmanager
async def target(model: str, url: str, api_key: str, *, apart: bool) -> AsyncIterator[tuple[str, str]]:
    """
    `url` and its key; or, with a `model`, those of a router with a prefill and a decode worker that are
    started for it on this machine.

    `apart`: then a decode worker computes no prompt itself. Raises SetupError if they cannot start.
    """
    if not model:
        yield url, api_key
        return
    from baton_cli import local
    from baton_cli.display import Display
    from baton_cli.up import open_service

    display = Display(Console(stderr=True), logs=False)
    front = {"port": 0, "page": False} | ({"alone_tokens": 0} if apart else {})
    plan = local.make_plan(display, 1, 1, front, {"model": model})
    async with open_service(plan, display) as service:
        yield service.url, service.api_key
