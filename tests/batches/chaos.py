"""
Batches while processes are killed at random: a router, its runners and two workers.

A killed process is restarted at once, as by a supervisor or a cluster. The output of the batches is compared
with that of an undisturbed batch: byte for byte, except for the ids that contain the batch's own.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from baton_batches import values
from baton_cli.batch_service import BatchService
from tests.batches.mock_worker import MODEL
from tests.ports import steady_ports

ROOT = Path(__file__).parents[2]

CHAT = "/v1/chat/completions"
START_S = 300.0
END_S = 600.0
POLL_S = 0.05

WEIGHTS = {"runner": 5, "router": 2, "worker-0": 2, "worker-1": 2}
"""How often each is chosen: runners start again soonest, so that most kills can be theirs."""

LEASE_S = 1.0

TERMINAL = ("completed", "failed", "expired", "cancelled")


class Program:
    """One process that is started again whenever it was killed."""

    def __init__(self, arguments: list[str], log: Path, environment: Mapping[str, str]) -> None:
        self._arguments = arguments
        self._log = log
        self._environment = {**os.environ, **environment}
        self.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._arguments],
                stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=ROOT, env=self._environment,
            )  # fmt: skip

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """As it is asked to, with whatever processes it has started."""
        self._process.terminate()
        self._process.wait(START_S)


def hold(port: int, after: int) -> None:
    """Let the mock worker at this port answer so many more requests, and keep the others waiting."""
    httpx.get(f"http://127.0.0.1:{port}/hold/{after}", trust_env=False, timeout=END_S).raise_for_status()


def release(port: int) -> None:
    """Let the mock worker at this port answer all requests."""
    httpx.get(f"http://127.0.0.1:{port}/release", trust_env=False, timeout=END_S).raise_for_status()


class Cluster:
    """A router and two workers on one machine, as processes."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        *flags: str,
        seconds: float = 0.05,
        slots: int = 8,
    ) -> None:
        """
        `environment` says which database it is, if it is not SQLite in `folder`; `flags` are the router's.
        """
        self._folder = folder
        port, *self.workers = steady_ports(3)
        self.url = f"http://127.0.0.1:{port}"
        self.programs: dict[str, Program] = {}
        for number, worker in enumerate(self.workers):
            self.programs[f"worker-{number}"] = self._program(
                f"worker-{number}",
                ["tests.batches.mock_worker", f"--port={worker}", f"--seconds={seconds}", f"--slots={slots}"],
            )
        self.router = Router(folder, port, self.workers, environment, "router", *flags)
        self.programs["router"] = self.router.program
        self.router.await_ready()

    def _program(self, name: str, arguments: list[str]) -> Program:
        return Program(arguments, self._folder / f"{name}.log", {})

    def kill(self, name: str, rng: random.Random) -> bool:
        """Kill one and start it again; False if there is none of that name now."""
        if name == "runner":
            runners = self.router.runners()
            if not runners:
                return False
            rng.choice(runners).kill()
            return True
        self.programs[name].kill()
        self.programs[name].start()
        return True

    def close(self) -> None:
        for program in self.programs.values():
            program.kill()


class Router:
    """One router as a process."""

    def __init__(
        self,
        folder: Path,
        port: int,
        workers: list[int],
        environment: Mapping[str, str],
        name: str = "router",
        *more: str,
    ) -> None:
        self.url = f"http://127.0.0.1:{port}"
        flags = [f"--decode=http://127.0.0.1:{worker}" for worker in workers]
        flags += [f"--port={port}", f"--state={folder / 'state'}", f"--batch-lease-s={LEASE_S}"]
        flags += ["--health-interval-s=0.5", "--batch-lines=10000000", "--batch-poll-s=0.2"]
        self.program = Program(
            ["baton_cli.main", "router", *flags, *more], folder / f"{name}.log", environment
        )

    def runners(self) -> list[psutil.Process]:
        """The runners that it has started, by the order of their start."""
        try:
            children = psutil.Process(self.program.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        read_lines = []
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                if "batch" in child.cmdline():
                    read_lines.append(child)
        return read_lines

    def await_ready(self) -> None:
        def ready() -> bool:
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/ready", trust_env=False).is_success
            return False

        await_true(ready, START_S, f"{self.url} is ready")


def write_lines(path: Path, lines: int) -> None:
    """An input file whose requests all differ."""
    with path.open("w") as file:
        for number in range(1, lines + 1):
            messages = [{"role": "user", "content": f"Question {number}"}]
            body = {"model": MODEL, "messages": messages}
            line = {"custom_id": f"request-{number}", "method": "POST", "url": CHAT, "body": body}
            file.write(json.dumps(line) + "\n")


def output_of(service: BatchService, batch: Mapping[str, Any], folder: Path) -> bytes:
    """Its output file."""
    assert batch["error_file_id"] is None, "lines failed"
    file = service.file(batch["output_file_id"])
    place = folder / f"{batch['id']}.jsonl"
    service.download(file["id"], file["bytes"], place, lambda done, of: None)
    content = place.read_bytes()
    place.unlink()
    return content


def anonymous(batch: str, output: bytes) -> bytes:
    """The output without the ids that are made of the batch's; each must be what its line's should be."""

    def one(line: bytes) -> bytes:
        read_lines = re.match(rb'\{"id":"(batch_req_\w+_(\d+))",.*?"request_id":"(\w+)"', line)
        assert read_lines is not None, line[:200]
        number = int(read_lines[2])
        assert read_lines[1].decode() == f"batch_req_{batch.removeprefix('batch_')}_{number}"
        assert read_lines[3].decode() == values.request_id(batch, number)
        return line.replace(read_lines[1], b"ID").replace(read_lines[3], b"REQUEST")

    return b"\n".join(one(line) for line in output.splitlines())


@dataclass
class Report:
    """Results of a run."""

    kills: Counter[str] = field(default_factory=Counter)
    batches: int = 0
    lines: int = 0
    lost: int = 0
    doubled: int = 0
    different: int = 0
    """Batches whose output was another than the undisturbed one's."""
    seconds: float = 0.0

    def __str__(self) -> str:
        kills = ", ".join(f"{count} of {name}" for name, count in sorted(self.kills.items()))
        return (
            f"{self.kills.total()} kills ({kills}) in {self.seconds:.0f} s; {self.batches} batches of "
            f"together {self.lines} lines: {self.lost} lost, {self.doubled} doubled, {self.different} "
            "outputs different."
        )

    def add(self, batch: str, output: bytes, expected: bytes) -> None:
        wanted = expected.count(b"\n") + 1
        names = Counter(re.findall(rb'"custom_id":"([^"]*)"', output))
        self.batches += 1
        self.lines += wanted
        self.lost += wanted - len(names)
        self.doubled += names.total() - len(names)
        self.different += anonymous(batch, output) != expected


def run(
    folder: Path,
    kills: int,
    seed: int,
    environment: Mapping[str, str],
    *,
    lines: int = 600,
    pause_s: tuple[float, float] = (0.0, 0.8),
    at_once: int = 2,
    notify: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Kill `kills` times while batches run; return when all of them have ended."""
    rng = random.Random(seed)
    report = Report()
    began = time.monotonic()
    source = folder / "input.jsonl"
    write_lines(source, lines)
    with cluster(folder, environment) as (running, service):
        undisturbed = ended(service, submit(service, source))
        expected = anonymous(undisturbed["id"], output_of(service, undisturbed, folder))
        assert expected.count(b"\n") + 1 == lines
        open_ones = [submit(service, source) for _ in range(at_once)]
        while open_ones:
            if report.kills.total() < kills:
                time.sleep(rng.uniform(*pause_s))
                name = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
                report.kills[name] += running.kill(name, rng)
            else:
                time.sleep(POLL_S)
            for id in list(open_ones):
                batch = service.batch(id)
                if batch["status"] != "completed":
                    assert batch["status"] in ("validating", "in_progress", "finalizing"), batch
                    continue
                open_ones.remove(id)
                report.add(id, output_of(service, batch, folder), expected)
                report.seconds = time.monotonic() - began
                notify(report)
                if report.kills.total() < kills:
                    open_ones.append(submit(service, source))
    report.seconds = time.monotonic() - began
    return report


@contextlib.contextmanager
def cluster(
    folder: Path, environment: Mapping[str, str], *flags: str, **timing: Any
) -> Iterator[tuple[Cluster, BatchService]]:
    """Both end with it."""
    running = Cluster(folder, environment, *flags, **timing)
    service = BatchService(running.url, "", lambda reason: None)
    try:
        yield running, service
    finally:
        service.close()
        running.close()


def submit(service: BatchService, source: Path) -> str:
    """The id of a new batch."""
    file = service.upload(source, lambda done, of: None)
    id: str = service.create(file["id"], CHAT, {})["id"]
    return id


def ended(service: BatchService, id: str) -> dict[str, Any]:
    """The batch once it has come to an end."""
    await_true(
        lambda: service.batch(id)["status"] in ("completed", "cancelled", "failed"), END_S, f"{id} ended"
    )
    return service.batch(id)


def await_true(claim: Callable[[], bool], seconds: float, what: str) -> None:
    """Look every 50 ms until `claim` holds."""
    deadline = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < deadline, f"after {seconds:g} s still not so: {what}"
        time.sleep(POLL_S)
