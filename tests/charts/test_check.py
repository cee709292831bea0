"""The program of `helm test`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from tests.charts.helm import CHART
from tests.plain_http import served

CHECK = CHART / "files" / "check.py"
TIMEOUT_S = 60


@contextmanager
def operator(*statuses: int) -> Iterator[str]:
    """Serve an operator that answers /readyz with these statuses in turn."""
    left = list(statuses)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(left.pop(0))
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, format: str, *arguments: object) -> None: ...

    with served(Handler) as address:
        yield address


def test_check_waits_for_the_operator() -> None:
    """`helm install` returns before the operator's pods are ready."""
    with operator(503, 200) as url:
        run = subprocess.run(
            [sys.executable, str(CHECK), url, "default"], capture_output=True, text=True, timeout=TIMEOUT_S
        )
    assert "The operator is ready: ok" in run.stdout
    assert "serviceaccount" in run.stderr  # this machine is no pod: the API server is not asked
