"""How each worker is spoken to, and what becomes of connections when that changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_api import mutual_tls
from baton_http.upstream import UpstreamPool
from tests.authority import Authority

WORKER = "10.0.0.1:8000"


def test_worker_connection_uses_tls_as_listed(tmp_path: Path) -> None:
    folder = Authority().fill(tmp_path / "mtls", "chat.models")
    upstreams = UpstreamPool(1.0, mutual_tls.client(str(folder), "chat.models"))
    upstreams.set_tls(WORKER, True)
    upstreams.set_tls("10.0.0.2:8000", False)
    assert upstreams.get(WORKER).secure
    assert not upstreams.get("10.0.0.2:8000").secure
    same = upstreams.get(WORKER)
    upstreams.set_tls(WORKER, True)
    assert upstreams.get(WORKER) is same
    upstreams.set_tls(WORKER, False)
    assert not upstreams.get(WORKER).secure, "its address is another pod's now"


def test_tls_worker_of_a_router_without_certificate_is_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    UpstreamPool(1.0).set_tls(WORKER, True)
    assert f"{WORKER} requires TLS" in caplog.text
