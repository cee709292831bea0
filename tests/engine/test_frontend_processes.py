"""A worker of two processes, as users start it: each process sees the end of the other."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from baton_engine.frontends.remote_engine import GONE
from tests.engine.models import make_model
from tests.plain_http import PLAIN

ADDRESS = re.compile(r" serves .* on (http://127\.0\.0\.1:\d+)/v1")
TIMEOUT_S = 300.0
BODY = {"model": "tiny", "prompt": "ab", "ignore_eos": True}


class Worker:
    """A process of `baton serve` with its frontend."""

    def __init__(self, model: Path) -> None:
        command = [sys.executable, "-m", "baton_cli.main", "serve", str(model), "--served-model-name=tiny"]
        options = ["--port=0", "--dtype=float32", "--threads=1", "--api-processes=1"]
        self.process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        found = None
        while found is None:
            line = self.process.stderr.readline()
            assert line, "the worker ended"
            found = ADDRESS.search(line)
        self._reader = threading.Thread(target=self.process.stderr.read)  # else the pipe would be full
        self._reader.start()
        self.http = httpx.Client(base_url=found[1], timeout=TIMEOUT_S, verify=PLAIN)

    def frontend(self) -> psutil.Process:
        children = psutil.Process(self.process.pid).children()
        (one,) = [child for child in children if "baton_engine.frontends.process" in child.cmdline()]
        return one

    def complete(self, **more: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json=BODY | more)

    def close(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(make_model(tmp_path / "tiny", max_position_embeddings=4096))
    with contextlib.closing(worker):
        yield worker


@pytest.mark.slow
def test_processes_of_a_worker_see_each_others_end(worker: Worker) -> None:
    assert worker.complete().status_code == 200
    assert worker.http.get("/v1/completions").status_code == 405
    first = worker.frontend()
    first.kill()
    with pytest.raises(httpx.HTTPError):
        worker.complete()  # over the connection that was lost
    assert worker.complete().status_code == 200
    second = worker.frontend()
    assert second.pid != first.pid
    with worker.http.stream(
        "POST", "/v1/completions", json=BODY | {"max_tokens": 4000, "stream": True}
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        worker.process.kill()
        rest: list[str] = []
        with pytest.raises(httpx.RemoteProtocolError):
            rest += lines
        assert GONE in rest[-1] + rest[-2]
    second.wait(TIMEOUT_S)


@pytest.mark.slow
def test_processes_of_a_worker_drain(worker: Worker) -> None:
    body = BODY | {"max_tokens": 2000, "stream": True}
    with worker.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        worker.process.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    assert worker.process.wait(TIMEOUT_S) == 0
