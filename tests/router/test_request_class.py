"""Classes and objectives as headers say them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baton_api import headers
from baton_api.errors import Forbidden, InvalidRequest
from baton_router.requests.inference_request import request_class
from baton_router.tenants.tenants import DEFAULT_TENANT, Tenant

SOME = Tenant(name="some", classes=frozenset({"default", "batch"}), default_class="batch")

HEADERS: dict[str, tuple[list[tuple[bytes, bytes]], Tenant, tuple[str, float | None]]] = {
    "nothing": ([], DEFAULT_TENANT, ("default", None)),
    "the tenant's own": ([(b"x-other", b"critical")], SOME, ("batch", None)),
    "a class": ([(headers.CLASS.encode(), b" Critical ")], DEFAULT_TENANT, ("critical", None)),
    "an objective": ([(headers.OBJECTIVE.encode(), b"1500")], DEFAULT_TENANT, ("default", 1.5)),
    "both": (
        [(headers.CLASS.encode(), b"default"), (headers.OBJECTIVE.encode(), b"0.5")],
        SOME,
        ("default", 0.0005),
    ),
}


@pytest.mark.parametrize("name", HEADERS)
def test_request_class_is_read_from_headers(name: str) -> None:
    given, tenant, expected = HEADERS[name]
    assert request_class(given, tenant) == expected


@pytest.mark.parametrize("value", [b"", b"soon", b"0", b"-5", b"nan", b"inf", b"1e400", b"\xff"])
def test_invalid_objective_is_rejected(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="above 0"):
        request_class([(headers.OBJECTIVE.encode(), value)], DEFAULT_TENANT)


@pytest.mark.parametrize("value", [b"", b"urgent", b"\xff"])
def test_unknown_class_is_rejected(value: bytes) -> None:
    with pytest.raises(InvalidRequest, match="critical, interactive, default, batch"):
        request_class([(headers.CLASS.encode(), value)], DEFAULT_TENANT)


def test_class_not_allowed_for_the_tenant_is_rejected() -> None:
    with pytest.raises(Forbidden, match="interactive"):
        request_class([(headers.CLASS.encode(), b"interactive")], SOME)


A_NEW_CLASS = """
import math
from baton_api.request_classes import CLASSES, RequestClass

bulk = RequestClass("bulk", open=False, background=True)
CLASSES[bulk.name] = bulk  # before anything else reads the table

from baton_api import headers, metrics
from baton_observing.promql import NOT_BACKGROUND
from baton_router.requests.inference_request import request_class
from baton_router.scheduling.admission import wait_limits
from baton_router.scheduling.priority_queue import (LEVELS, PriorityQueue)
from baton_router.tenants.tenants import DEFAULT_TENANT, Tenant, TenantEntry, OPEN_CLASSES
from tests.router.test_tenant_queue import entry
import msgspec

assert request_class([(headers.CLASS.encode(), b"bulk")], DEFAULT_TENANT) == ("bulk", None)
assert msgspec.convert({"name": "a", "classes": ["bulk"]}, TenantEntry).classes == ["bulk"]
assert "bulk" not in OPEN_CLASSES and "bulk" in metrics.ROUTER_QUEUE_DEPTH.foreseen
assert NOT_BACKGROUND == "!~batch|bulk"
assert wait_limits("bulk", 1.0, 10.0, 300.0).max_wait_s == math.inf
queue = PriorityQueue()
last, middle, first = (entry(1, level=LEVELS[name]) for name in ("bulk", "batch", "default"))
for one in (last, middle, first):
    queue.add(one)
offered = []
queue.offer(lambda one: bool(offered.append(one)), lambda: True, 0.0)
assert offered == [first], offered  # while a client waits, the background is not offered a worker
order = []
for _ in range(3):  # each goes only while nothing before it waits
    queue.offer(lambda one: order.append(one) or True, lambda: True, 0.0)
assert order == [first, middle, last], order
"""


def test_class_is_added_by_one_row_of_the_table() -> None:
    subprocess.run([sys.executable, "-c", A_NEW_CLASS], check=True, cwd=Path(__file__).parents[2])
