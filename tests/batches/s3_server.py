"""A real S3 server: versitygw, a Go module, over a folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from baton_engine.machine import cache_folder
from tests.ports import steady_port

MODULE = "github.com/versity/versitygw/cmd/versitygw@v1.8.0"
BUILD_S = 900.0
START_S = 300.0

KEYS = {"AWS_ACCESS_KEY_ID": "baton", "AWS_SECRET_ACCESS_KEY": "a-secret-of-tests", "AWS_REGION": "us-east-1"}
"""Credentials of the server, as clients read them from their environment."""


class S3Server:
    """One bucket on 127.0.0.1."""

    def __init__(self, folder: Path) -> None:
        """Skips the test, naming what is missing."""
        self._program = program()
        self._folder = folder
        self.bucket = folder / "bucket"
        self.bucket.mkdir(parents=True)
        self.port = steady_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Listen; returns once questions are answered."""
        name, secret = KEYS["AWS_ACCESS_KEY_ID"], KEYS["AWS_SECRET_ACCESS_KEY"]
        self._process = subprocess.Popen(
            [self._program, "--port", f"127.0.0.1:{self.port}", "--quiet", "posix", str(self._folder)],
            env={**os.environ, "ROOT_ACCESS_KEY": name, "ROOT_SECRET_KEY": secret},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_S
        while not self._answers():
            assert time.monotonic() < deadline and self._process.poll() is None, "versitygw does not start"
            time.sleep(0.05)

    def stop(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(START_S)

    def close(self) -> None:
        if self._process.poll() is None:
            self.stop()

    def objects(self) -> list[str]:
        """Return the names of the complete objects in the bucket."""
        files = (file.relative_to(self.bucket) for file in self.bucket.rglob("*") if file.is_file())
        return sorted(str(file) for file in files if not file.parts[0].startswith("."))

    def _answers(self) -> bool:
        try:
            httpx.get(self.endpoint, trust_env=False, timeout=2)
        except httpx.TransportError:
            return False
        return True


def program() -> str:
    """The server's program, built once beside other things that can be made again."""
    if executable := shutil.which("versitygw"):
        return executable
    place = cache_folder(os.environ) / "tools" / MODULE.rpartition("@")[2]
    built = place / "versitygw"
    if not built.is_file():
        go = shutil.which("go", path=f"{os.environ.get('PATH', '')}{os.pathsep}/usr/local/go/bin")
        if go is None:
            pytest.skip("neither versitygw nor go, which would build it, is installed")
        try:
            done = subprocess.run(
                [go, "install", MODULE],
                env={**os.environ, "GOBIN": str(place)},
                capture_output=True,
                text=True,
                timeout=BUILD_S,
            )
        except subprocess.TimeoutExpired:
            pytest.skip("versitygw could not be built in time")
        if done.returncode != 0:
            pytest.skip(f"versitygw could not be built: {done.stderr.strip()[-300:]}")
    return str(built)
