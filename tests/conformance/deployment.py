"""
Deployments as users start them: `baton serve`, and `baton up` with router, prefill and decode worker.

Seen from outside only: by their command line, their log and HTTP. The tests import no part of the server, so
their results hold for every client of the API.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import DefaultHttpxClient, OpenAI
from openai.types import Completion
from openai.types.chat import ChatCompletion

ONE_WORKER = "one worker"
PAIR = "pair"
WAYS = (ONE_WORKER, PAIR)

START_S = 300.0
END_S = 120.0
TIMEOUT_S = 300.0
"""For any one answer, however busy the machine is."""

POLL_S = 0.02

LOG_LINES = 30
"""Of a deployment's log, shown with a failure."""

ADDRESS = {
    ONE_WORKER: re.compile(r" serves .* on (http://127\.0\.0\.1:\d+)/v1"),
    PAIR: re.compile(r"^Ready: .* on (http://127\.0\.0\.1:\d+)/v1"),
}
"""The line of the log that says where requests go."""

QUESTION = [{"role": "user", "content": "List 3 countries and their capitals."}]
"""The founding tutorials' question: U of the specification."""


@dataclass
class Deployment:
    """One served model and two clients of it."""

    way: str
    url: str
    model: str
    process: subprocess.Popen[str] | None = None
    """None: the server was running already."""
    log: list[str] = field(default_factory=list)
    api_key: str = "None"
    seen_processes: dict[int, psutil.Process] = field(default_factory=dict)
    """Every process that was ever seen here, so that none is left."""

    @property
    def is_pair(self) -> bool:
        return self.way == PAIR

    @cached_property
    def client(self) -> OpenAI:
        return self.openai(max_retries=0)

    @cached_property
    def http(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=TIMEOUT_S, trust_env=False, headers=self.headers)

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"}

    def openai(self, max_retries: int) -> OpenAI:
        """A client of its own; close it."""
        return OpenAI(
            base_url=f"{self.url}/v1",
            api_key=self.api_key,
            max_retries=max_retries,
            timeout=TIMEOUT_S,
            http_client=DefaultHttpxClient(trust_env=False),
        )

    # --- Requests, by the SDK and as plain bodies ---

    def chat(self, messages: Sequence[Any] = QUESTION, /, **more: Any) -> ChatCompletion:
        completion = self.client.chat.completions.create(model=self.model, messages=list(messages), **more)
        assert isinstance(completion, ChatCompletion)
        return completion

    def complete(self, prompt: Any, /, **more: Any) -> Completion:
        completion = self.client.completions.create(model=self.model, prompt=prompt, **more)
        assert isinstance(completion, Completion)
        return completion

    def chat_body(self, messages: Sequence[Any] = QUESTION, /, **more: Any) -> dict[str, Any]:
        return {"model": self.model, "messages": list(messages), **more}

    def post(self, path: str, body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def post_chat(self, messages: Sequence[Any] = QUESTION, /, **more: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", self.chat_body(messages, **more))

    def post_completion(self, prompt: Any, /, **more: Any) -> httpx.Response:
        return self.post("/v1/completions", {"model": self.model, "prompt": prompt, **more})

    def stream_chat(self, messages: Sequence[Any] = QUESTION, /, **more: Any) -> list[dict[str, Any]]:
        """The JSON events of a chat stream, whose framing is checked."""
        return self.stream("/v1/chat/completions", self.chat_body(messages, stream=True, **more))

    def stream_completion(self, prompt: Any, /, **more: Any) -> list[dict[str, Any]]:
        body = {"model": self.model, "prompt": prompt, "stream": True, **more}
        return self.stream("/v1/completions", body)

    def stream(self, path: str, body: Any) -> list[dict[str, Any]]:
        answer = self.post(path, body)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        return data_events(answer.content)

    # --- What the server says of itself ---

    def tokenize(self, text: str) -> list[int]:
        """The ids of `text` without anything added."""
        body = {"model": self.model, "prompt": text, "add_special_tokens": False}
        tokens: list[int] = self.post("/tokenize", body).raise_for_status().json()["tokens"]
        return tokens

    @cached_property
    def context(self) -> int:
        """Most tokens of prompt and answer together."""
        card = self.http.get("/v1/models").raise_for_status().json()["data"][0]
        length: int = card["max_model_len"]
        return length

    def workers(self) -> dict[str, str]:
        """URLs of the workers, by role; a single worker is `both`."""
        if not self.is_pair:
            return {"both": self.url}
        rows = self.http.get("/workers").raise_for_status().json()["data"]
        return {row["role"]: f"http://{row['worker']}" for row in rows}

    def metrics(self, url: str = "") -> dict[str, float]:
        """`name{labels}` to value, of this deployment's front or of the worker at `url`."""
        answer = httpx.get(f"{url or self.url}/metrics", timeout=TIMEOUT_S, trust_env=False)
        rows = re.finditer(r"^(\w+(?:\{.*\})?) (\S+)$", answer.raise_for_status().text, re.MULTILINE)
        return {row[1]: float(row[2]) for row in rows}

    def total(self, name: str) -> float:
        """A metric summed over its labels and over all workers."""
        return sum(
            value
            for url in self.workers().values()
            for key, value in self.metrics(url).items()
            if key.partition("{")[0] == name
        )

    def busy(self) -> float:
        """Requests that any worker still has."""
        states = ("running", "queued", "fetching", "held")
        return sum(self.total(f"baton_worker_requests_{state}") for state in states)

    def moved(self) -> float:
        """Bytes of KV blocks that the decode worker of a pair has pulled over NIXL since its start."""
        values = self.metrics(self.workers()["decode"])
        name = 'baton_worker_transfer_bytes_total{transport="nixl'
        return sum(value for key, value in values.items() if key.startswith(name))

    # --- Its processes ---

    def children(self) -> dict[str, psutil.Process]:
        """The processes that `baton up` started, by role."""
        by_role = {}
        assert self.process is not None
        for child in psutil.Process(self.process.pid).children():
            self.seen_processes[child.pid] = child
            with contextlib.suppress(psutil.NoSuchProcess):
                words = child.cmdline()  # empty, if it is ending
                if words[1:3] == ["-m", "baton_cli.main"]:
                    by_role[words[3]] = child
        return by_role

    def close(self) -> None:
        """End every process and both clients."""
        for name in ("client", "http"):
            if name in self.__dict__:
                self.__dict__[name].close()
        if self.process is None:
            return
        if self.process.poll() is None:
            self.children()
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(END_S)
        assert self.process.stdout is not None
        for child in self.seen_processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def start(way: str, model: str, name: str, *flags: str, api_key: str = "None") -> Deployment:
    """`model`, served as `name` in one of `WAYS`; returns once it is ready."""
    command = "up" if way == PAIR else "serve"
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "baton_cli.main", command, model),
            *("--port=0", f"--served-model-name={name}", "--threads=1", *flags),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # As wide as a log line, out of reach of any hub, and with every prompt computed by a prefill worker.
        env={
            **os.environ,
            "COLUMNS": "400",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "BATON_ROUTER_LOCAL_PREFILL_MAX_TOKENS": "0",
        },
    )
    log: list[str] = []
    threading.Thread(target=_read, args=(process, log), daemon=True).start()
    address: list[str] = []

    def is_ready() -> bool:
        assert process.poll() is None, f"`baton {command}` ended"
        address[:] = [match[1] for line in tuple(log) if (match := ADDRESS[way].search(line))]
        return bool(address) and _answers(address[-1])

    try:
        await_true(is_ready, START_S, f"`baton {command}` is ready")
    except BaseException as failure:
        process.kill()
        process.wait(END_S)
        failure.add_note("\n".join(log[-LOG_LINES:]))
        raise
    deployment = Deployment(way, address[-1], name, process, log, api_key)
    if deployment.is_pair:
        deployment.children()
    return deployment


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", trust_env=False, timeout=TIMEOUT_S).is_success
    except httpx.TransportError:
        return False


def _read(process: subprocess.Popen[str], log: list[str]) -> None:
    assert process.stdout is not None
    with process.stdout:
        log.extend(line.rstrip() for line in process.stdout)


def await_true(claim: Callable[[], bool], seconds: float, what: str) -> float:
    """Look until `claim` holds; the seconds that it took."""
    begun = time.monotonic()
    while not claim():
        assert time.monotonic() < begun + seconds, f"after {seconds:g} s still not so: {what}"
        time.sleep(POLL_S)
    return time.monotonic() - begun


def data_events(stream: bytes) -> list[dict[str, Any]]:
    """The JSON of each event of a whole stream that must end with [DONE]; comments are let through."""
    assert stream.endswith(b"\n\n"), stream[-200:]
    frames = [frame for frame in stream[:-2].split(b"\n\n") if not frame.startswith(b":")]
    for frame in frames:
        assert frame.startswith(b"data: ") and b"\n" not in frame, frame
    assert frames[-1] == b"data: [DONE]", frames[-1]
    assert b"data: [DONE]" not in frames[:-1]
    return [json.loads(frame.removeprefix(b"data: ")) for frame in frames[:-1]]


def choices_of(events: Sequence[dict[str, Any]], index: int = 0) -> Iterator[dict[str, Any]]:
    """The entries of one choice, in order."""
    for event in events:
        for choice in event["choices"]:
            if choice["index"] == index:
                yield choice


def joined(events: Sequence[dict[str, Any]], index: int = 0, key: str = "content") -> str:
    """Add up the deltas of one choice of a chat stream."""
    return "".join(choice["delta"].get(key) or "" for choice in choices_of(events, index))


class Deployments:
    """Those of one test session: each is started when it is first asked for, and kept."""

    def __init__(self, folder: Path, given: Mapping[tuple[str, str], str]) -> None:
        """`given` has the URLs of running servers by kind and way; if there are any, none is started."""
        self._folder = folder
        self._given = given
        self._running: dict[tuple[str, str], Deployment] = {}
        self._failed: dict[tuple[str, str], str] = {}

    def folder(self, name: str, make: Callable[[Path], Path]) -> Path:
        """A model's folder, made once."""
        folder = self._folder / name
        return folder if folder.exists() else make(folder)

    def get(self, kind: str, way: str, begin: Callable[[str], Deployment]) -> Deployment:
        """The deployment; one that could not be started once is not tried again."""
        if self._given and (kind, way) not in self._given:
            pytest.skip(f"--server gives no server of {kind}, {way}")
        if (kind, way) not in self._running and self._given:
            url = self._given[kind, way]
            card = httpx.get(f"{url}/v1/models", trust_env=False).raise_for_status().json()["data"][0]
            self._running[kind, way] = Deployment(way, url, card["id"])
        if (kind, way) not in self._running:
            assert (kind, way) not in self._failed, self._failed[kind, way]
            try:
                self._running[kind, way] = begin(way)
            except AssertionError as failure:
                self._failed[kind, way] = f"{kind}, {way}: {failure}"
                raise
        return self._running[kind, way]

    def close(self) -> None:
        while self._running:
            self._running.popitem()[1].close()
