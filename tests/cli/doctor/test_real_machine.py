"""`baton doctor` on this machine, as it is and made wrong in ten ways."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.doctor.wrong_machine import PROCESS_VM_READV

AHEAD_S = 3600
TIMEOUT_S = 300

DOCTOR = (sys.executable, "-m", "baton_cli.main", "doctor", "--output=json")


class Ahead(BaseHTTPRequestHandler):
    """A router whose clock is an hour ahead."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string(time.time() + AHEAD_S)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def ahead() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Ahead)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="namespaces are Linux's")
@pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can make a machine wrong"
)
@pytest.mark.skipif(
    platform.machine() not in PROCESS_VM_READV, reason="the number of a system call is unknown"
)
def test_doctor_finds_each_fault_of_a_real_machine(ahead: str) -> None:
    environment = {
        **os.environ,
        "BATON_KV_CACHE_MEMRY": "1GiB",
        "CC": "/nowhere/cc",
        "UCX_NET_DEVICES": "mlx5_9:1",
    }
    wrong = [sys.executable, str(Path(__file__).with_name("wrong_machine.py"))]
    done = run([*wrong, *DOCTOR, f"--url={ahead}"], environment)
    assert done.returncode == 1, done.stderr
    findings = {one["check"]: one for one in json.loads(done.stdout)["findings"] if one["remedy"]}
    expected = {
        "shared memory": "8.39 MB",
        "open files": "512",
        "RDMA": "mlx5_0: no /dev/infiniband/uverbs*",
        "RDMA ports": "mlx5_0:1 is DOWN",
        "locked memory": "65.5 kB",
        "memory of other processes": "Operation not permitted",
        "NIXL": "UCX cannot start",
        "network": "UCX_NET_DEVICES names mlx5_9:1",
        "kernels": "CC is /nowhere/cc",
        "variables": "BATON_KV_CACHE_MEMRY",
        "clock": "ahead of this machine",
    }
    for check, words in expected.items():
        assert check in findings, (check, sorted(findings))
        assert any(words in part for part in (findings[check]["measured"], findings[check]["why"])), findings[
            check
        ]
    assert findings["variables"]["remedy"] == "Did you mean BATON_KV_CACHE_MEMORY?"


@pytest.mark.slow
def test_this_machine_as_it_is(ahead: str) -> None:
    done = run([*DOCTOR, f"--url={ahead}/nowhere"], {**os.environ, "BATON_KERNELS": "off"})
    report = json.loads(done.stdout)
    levels = {one["check"]: one["level"] for one in report["findings"]}
    assert levels["memory of other processes"] == "good"
    assert levels["kernels"] == "warning"
    assert done.returncode == (1 if report["errors"] else 0)


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
