"""The launch lines of the tutorials, with real processes: only the program's name differs."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from baton_api.errors import Unauthorized
from baton_engine.model.checkpoint import Checkpoint, load_spec
from baton_engine.model.tokenizer import load_tokenizer
from tests.cli.service import END_S, START_S, TIMEOUT_S, await_true, running_up, start_baton
from tests.engine.gguf_files import write_gguf
from tests.engine.models import make_model

pytestmark = pytest.mark.slow

QUESTION = {"messages": [{"role": "user", "content": "List 3 countries."}], "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


class Serving:
    """One `baton serve`: what it logged, and how to ask it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.log: list[str] = []
        self.port = 0
        self._up = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def await_ready(self) -> None:
        assert self._up.wait(START_S) and self.port, "\n".join(self.log)

    def get(self, path: str, key: str = "") -> httpx.Response:
        return httpx.get(
            f"http://127.0.0.1:{self.port}{path}", headers=_bearer(key), timeout=TIMEOUT_S, trust_env=False
        )

    def chat(self, key: str = "", **body: Any) -> httpx.Response:
        url = f"http://127.0.0.1:{self.port}/v1/chat/completions"
        return httpx.post(url, json=QUESTION | body, headers=_bearer(key), timeout=TIMEOUT_S, trust_env=False)

    def end(self) -> int:
        self.process.terminate()
        status = self.process.wait(END_S)
        self._reader.join(END_S)
        return status

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line.rstrip())
            if place := re.search(r" on http://[^ ]*:(\d+)/v1", line):
                self.port = int(place[1])
            # All start messages come before the first request is answered.
            if "fired up and ready to roll" in line:
                self._up.set()
        self._up.set()


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"} if key else {}


@contextmanager
def serving(*arguments: str) -> Iterator[Serving]:
    process = start_baton("serve", *arguments)
    running = Serving(process)
    try:
        running.await_ready()
        yield running
    finally:
        process.kill()
        process.wait(END_S)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()


def test_serve_tutorial_line_works_and_warns_of_open_access(tiny: Path) -> None:
    line = f"--model-path {tiny} --host 0.0.0.0 --port 0 --mem-fraction-static 0.8"
    with serving(*line.split(), "--threads=1", "--served-model-name=tiny,org/other") as server:
        assert [model["id"] for model in server.get("/v1/models").json()["data"]] == ["tiny", "org/other"]
        for name in ("tiny", "org/other"):
            answer = server.chat(key="None", model=name)
            assert answer.status_code == 200, answer.text
            assert answer.json()["model"] == "tiny"
        assert server.end() == 0
    assert f"WARNING: any client that reaches 0.0.0.0:{server.port} can use this server" in "\n".join(
        server.log
    )


def test_serve_key_file_is_reloaded_without_a_restart(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice:k-first-key\n")
    flags = ("--port=0", "--kv-cache-memory=4MiB", "--threads=1", f"--api-key-file={file}", "--log-requests")
    with serving(str(tiny), *flags) as server:
        for path in ("/health", "/metrics"):
            assert server.get(path).status_code == 200
        for path in ("/v1/models", "/load", "/debug/requests"):
            assert server.get(path).status_code == 401
            assert server.get(path, "k-first-key").status_code == 200
        assert server.chat("k-first-key", model="tiny").status_code == 200
        assert server.chat("k-wrong-key", model="tiny").json()["error"]["code"] == Unauthorized.code

        file.write_text("bob:k-second-key\n# alice is gone\n")
        _await_status(server, "k-second-key", 200)
        assert server.get("/v1/models", "k-first-key").status_code == 401
        assert server.end() == 0
    log = "\n".join(server.log)
    assert "client=alice" in log
    assert "-key" not in log.replace(str(file), "") and "List 3" not in log
    assert "WARNING" not in log


def _await_status(server: Serving, key: str, status: int) -> None:
    await_true(lambda: server.get("/v1/models", key).status_code == status, 60, f"{key} is answered {status}")


def test_up_api_key_is_required_and_never_shown(tiny: Path) -> None:
    flags = ("--api-key=k-of-a-client", "--served-model-name=tiny,org/other", "--random-seed=3")
    with running_up(tiny, *flags) as up:
        headers = _bearer("k-of-a-client")
        with httpx.Client(base_url=up.url, trust_env=False, timeout=TIMEOUT_S) as client:
            assert client.get("/v1/models").status_code == 401
            names = {model["id"] for model in client.get("/v1/models", headers=headers).json()["data"]}
            assert names == {"tiny", "org/other"}
            for name in names:
                answer = client.post("/v1/chat/completions", json=QUESTION | {"model": name}, headers=headers)
                assert answer.status_code == 200, answer.text
                assert answer.json()["model"] == "tiny"
            rows = client.get("/workers", headers=headers).json()["data"]
        for row in rows:
            # Workers are behind the router: not even a client's key opens them.
            for key in ({}, headers):
                url = f"http://{row['worker']}/v1/models"
                answer = httpx.get(url, headers=key, timeout=TIMEOUT_S, trust_env=False)
                assert answer.status_code == 401
        children = psutil.Process(up.process.pid).children()
        assert len(children) == 3
        assert not any("k-of-a-client" in part for child in children for part in child.cmdline())
        assert "k-of-a-client" not in up.log


UNNEEDED = frozenset({"transformers", "sympy", "openai", "httpx", "sqlalchemy", "kubernetes", "grpc", "nixl"})
UNNEEDED_PARTS = frozenset({"torch._dynamo", "torch._inductor", "torch.onnx"})


@pytest.mark.parametrize("form", ["folder that was read before", "gguf file"])
def test_serve_starts_without_large_libraries(tiny: Path, tmp_path: Path, form: str) -> None:
    """Each of them would take a part of a second, or seconds, of every start."""
    checkpoint = Checkpoint(tiny, "tiny")
    if form == "gguf file":
        checkpoint = Checkpoint(write_gguf(tiny, tmp_path / "tiny.gguf"), "tiny")
    load_tokenizer(checkpoint, load_spec(checkpoint))
    flags = (str(checkpoint.path), "--port=0", "--kv-cache-memory=4MiB", "--threads=1")
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "baton_cli.main", "serve", *flags],
        stderr=subprocess.PIPE,
        text=True,
    )
    guard = threading.Timer(START_S, process.kill)
    guard.start()
    with process, contextlib.closing(process.stderr or io.StringIO()) as log:
        lines = list(itertools.takewhile(lambda line: "fired up and ready to roll" not in line, log))
        process.kill()
        guard.cancel()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    assert "torch" in imported, "".join(lines)
    assert not {name.partition(".")[0] for name in imported} & UNNEEDED
    assert not imported & UNNEEDED_PARTS
