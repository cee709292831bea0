"""How each worker is spoken to, and what becomes of connections when that changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton_api import mutual_tls
from baton_http.http_client import UpstreamPool
from tests.authority import Authority

WORKER = "10.0.0.1:8000"


def test_each_worker_is_spoken_to_as_it_was_told(tmp_path: Path) -> None:
    folder = Authority().fill(tmp_path / "mtls", "chat.models")
    upstreams = UpstreamPool(1.0, mutual_tls.client(str(folder), "chat.models"))
    upstreams.meet(WORKER, True)
    upstreams.meet("10.0.0.2:8000", False)
    assert upstreams.of(WORKER).secure
    assert not upstreams.of("10.0.0.2:8000").secure
    same = upstreams.of(WORKER)
    upstreams.meet(WORKER, True)
    assert upstreams.of(WORKER) is same
    upstreams.meet(WORKER, False)
    assert not upstreams.of(WORKER).secure, "its address is another pod's now"


def test_a_worker_that_wants_tls_of_a_router_without_a_certificate_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    UpstreamPool(1.0).meet(WORKER, True)
    assert f"{WORKER} wants TLS" in caplog.text
