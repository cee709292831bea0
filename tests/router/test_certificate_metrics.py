"""The metric of a router for the expiry of its certificate."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from baton_api import metrics
from tests.authority import Authority
from tests.router.fake_worker import FakeWorker
from tests.router.running import running_router

DAY_S = 86_400.0
NAME = "chat.models.svc.cluster.local"


def figure(page: str, name: str) -> list[float]:
    return [float(value) for value in re.findall(rf"^{name} (\S+)$", page, re.M)]


async def test_router_exposes_the_expiry_of_its_certificate(tmp_path: Path) -> None:
    folder = Authority().fill(tmp_path / "mtls", NAME)
    shown: dict[str, Any] = {"tls_folder": str(folder), "tls_name": NAME}
    async with FakeWorker() as worker, running_router([worker], **shown) as router:
        page = (await router.client.get("/metrics")).text
    (end,) = figure(page, metrics.ROUTER_CERTIFICATE_END.name)
    (life,) = figure(page, metrics.ROUTER_CERTIFICATE_LIFE.name)
    assert life == 3 * DAY_S
    assert end == pytest.approx(time.time() + DAY_S, abs=600)


async def test_router_without_a_certificate_exposes_no_expiry() -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        page = (await router.client.get("/metrics")).text
    assert "# TYPE baton_router_certificate_life_seconds gauge" in page
    assert not figure(page, metrics.ROUTER_CERTIFICATE_LIFE.name)
