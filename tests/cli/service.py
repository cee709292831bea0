"""`baton up` as a user starts it: a process of its own, with a tiny model."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import httpx
import psutil

START_S = 300.0
END_S = 120.0
TIMEOUT_S = 300.0
"""For any one answer, however busy the machine is."""

TINY = ("--kv-cache-memory=4MiB", "--dtype=float32", "--port=0", "--local-prefill-tokens=8", "--drain-s=5")


class RunningUp:
    """One `baton up` and what it printed."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    @property
    def url(self) -> str:
        """The router's, once it is up."""
        line = self.await_line("Ready:")
        return line.split(" on ")[1].split("/v1")[0]

    def await_line(self, part: str, seconds: float = START_S) -> str:
        """The first line with `part` in it; fails if the process ends or the time is over before."""

        def matching() -> str | None:
            return next((line for line in self.lines if part in line), None)

        with self._news:
            self._news.wait_for(lambda: matching() or not self._reader.is_alive(), seconds)
        line = matching()
        assert line is not None, f"no line with {part!r} in:\n{self.log}"
        return line

    def children(self) -> dict[str, psutil.Process]:
        """The processes that were started, by role."""
        found = {}
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                words = child.cmdline()
                if words[1:3] == ["-m", "baton_cli.main"]:
                    found[words[3]] = child
        return found

    def workers(self) -> dict[str, str]:
        """URLs of the workers as the router knows them, by role."""
        rows = httpx.get(f"{self.url}/workers", timeout=TIMEOUT_S, trust_env=False).json()["data"]
        return {row["role"]: f"http://{row['worker']}" for row in rows}

    def ask(self, text: str) -> httpx.Response:
        body = {"model": "tiny", "prompt": text, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=TIMEOUT_S, trust_env=False)

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        status = self.process.wait(END_S)
        self._reader.join(END_S)
        return status

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            with self._news:
                self.lines.append(line.rstrip())
                self._news.notify_all()
        with self._news:
            self._news.notify_all()


IGNORING = ("sh", "-c", 'trap "" INT HUP; exec "$@"', "sh")
"""Starts a command with these signals ignored."""


def start_baton(*arguments: str) -> subprocess.Popen[str]:
    """`baton` with these arguments, as a script's `nohup baton ... &` starts it."""
    return subprocess.Popen(
        [*IGNORING, sys.executable, "-m", "baton_cli.main", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As wide as a log line, and out of reach of any hub.
        # However short a prompt is, a prefill worker computes it.
        env={
            **os.environ,
            "COLUMNS": "400",
            "HF_HUB_OFFLINE": "1",
            "BATON_ROUTER_LOCAL_PREFILL_MAX_TOKENS": "0",
        },
    )


@contextlib.contextmanager
def running_up(model: Path, *flags: str) -> Iterator[RunningUp]:
    """A service of one prefill and one decode worker; processes that a test leaves are killed."""
    process = start_baton("up", str(model), *TINY, *flags)
    up = RunningUp(process)
    started: list[psutil.Process] = []
    try:
        up.await_line("Ready:")
        started = psutil.Process(process.pid).children(recursive=True)
        yield up
    finally:
        if process.poll() is None:
            started += psutil.Process(process.pid).children(recursive=True)
            process.kill()
        process.wait(END_S)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
        for child in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


def await_true(claim: Callable[[], bool], seconds: float, what: str) -> None:
    """Look every 50 ms until `claim` holds."""
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, f"after {seconds:g} s still not so: {what}"
        time.sleep(0.05)


def await_gone(processes: Sequence[psutil.Process], seconds: float = END_S) -> None:
    """All of them have ended (a zombie counts as ended)."""

    def gone(process: psutil.Process) -> bool:
        try:
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    await_true(lambda: all(gone(process) for process in processes), seconds, "all processes are gone")
