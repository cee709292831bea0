"""Until when the certificate is good that workers are shown, as Prometheus reads it of a router."""

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


async def test_a_router_tells_when_its_certificate_ends(tmp_path: Path) -> None:
    folder = Authority().fill(tmp_path / "mtls", NAME)
    shown: dict[str, Any] = {"tls_folder": str(folder), "tls_name": NAME}
    async with FakeWorker() as worker, running_router([worker], **shown) as router:
        page = (await router.client.get("/metrics")).text
    (end,) = figure(page, metrics.ROUTER_CERTIFICATE_END.name)
    (life,) = figure(page, metrics.ROUTER_CERTIFICATE_LIFE.name)
    assert life == 3 * DAY_S
    assert end == pytest.approx(time.time() + DAY_S, abs=600)


async def test_without_one_there_is_nothing_to_tell() -> None:
    async with FakeWorker() as worker, running_router([worker]) as router:
        page = (await router.client.get("/metrics")).text
    assert "# TYPE baton_router_certificate_life_seconds gauge" in page
    assert not figure(page, metrics.ROUTER_CERTIFICATE_LIFE.name)
