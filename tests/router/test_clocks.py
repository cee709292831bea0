"""Only modules listed here read the calendar clock, which may jump: timeouts use the monotonic clock."""

from __future__ import annotations

import ast
from pathlib import Path

import baton_http
import baton_router

FOLDER = Path(baton_router.__file__).parent.parent
PACKAGES = (baton_router, baton_http)

CALENDAR_READERS = {
    "baton_router/app.py": "`created` of models, for clients to read",
    "baton_router/dashboard/endpoints.py": "arrival times, for people to read",
    "baton_router/gateway/endpoint_picker.py": "validity of a self-signed certificate",
    "baton_router/gateway/exchange.py": "expiry of tickets",
    "baton_router/proxy/tracing.py": "times of spans, beside those of other services",
    "baton_router/engines/baton.py": "expiry of tickets",
    "baton_router/proxy/admin_operations.py": "expiry of tickets",
    "baton_router/proxy/proxy.py": "expiry of tickets",
    "baton_router/proxy/redis_responses.py": "expiry of responses that routers share",
    "baton_router/tenants/access.py": "expiry of an issuer's and of runners' tokens",
    "baton_router/workers/kv_subscriber.py": "a metric: delay of events",
}
"""Modules that read the calendar clock, and what for. Batches are exempt: their windows outlive restarts."""

CLOCKS = {
    ("time", "time"),
    ("time", "time_ns"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("date", "today"),
}


def reads_calendar(path: Path) -> bool:
    tree = ast.parse(path.read_text())
    return any(
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name | ast.Attribute)
        and (getattr(node.value, "id", getattr(node.value, "attr", "")), node.attr) in CLOCKS
        for node in ast.walk(tree)
    )


def test_calendar_clock_is_read_only_where_listed() -> None:
    modules = [path for package in PACKAGES for path in Path(str(package.__file__)).parent.rglob("*.py")]
    assert len(modules) > 50
    assert {str(path.relative_to(FOLDER)) for path in modules if reads_calendar(path)} == set(
        CALENDAR_READERS
    )
