"""Health checks of a real worker's API: a router whose tickets it refuses says which variables to set."""

from __future__ import annotations

import pytest

from baton_api.workers import Load, Role
from baton_engine.api.http import HttpServer
from baton_engine.settings import WorkerSettings
from baton_http.upstream import Upstream
from baton_router.engines.baton import BatonChecks
from baton_router.engines.checks import WorkerApi
from tests.engine.api.api import MODEL, open_api

ADVICE = "set BATON_ROUTER_TICKET_SECRET of the router and BATON_TICKET_SECRET of all workers"


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.BOTH])
@pytest.mark.parametrize(
    ("routers", "workers", "refused"),
    [("", "", False), ("s", "s", False), ("s", "", False), ("", "s", True), ("other", "s", True)],
)
async def test_ticket_mismatch_is_named(
    role: Role, routers: str, workers: str, refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A prefill worker is not ready; a decode worker is, since it computes prompts itself."""
    settings = WorkerSettings(ticket_secret=workers)
    async with (
        open_api(settings=settings, load=lambda: Load(role=role, model=MODEL)) as api,
        HttpServer(api.app, "127.0.0.1", 0, api.served.drain) as server,
    ):
        host, _, port = server.address.rpartition(":")
        upstream = Upstream(host, int(port))
        checks = BatonChecks(WorkerApi(upstream, role, [], routers.encode()))
        reasons = [(await checks.load())[1] for _ in range(3)]
        upstream.close()
    assert [ADVICE in reason for reason in reasons] == 3 * [refused and role is Role.PREFILL]
    assert [bool(reason) for reason in reasons] == 3 * [refused and role is Role.PREFILL]
    assert caplog.text.count(ADVICE) == (refused and role is Role.DECODE)
