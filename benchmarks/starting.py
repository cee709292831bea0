"""
Time from the start of a server's process to its first answer.

    python -m benchmarks.starting --server 'serve=baton serve smollm2 --port {port}' \\
        --server 'up=baton up smollm2 --port {port}' --server 'llama.cpp=llama-server -m FILE --port {port}'

Servers start in turn, one at a time, `--repeats` times after one start that does not count: it fills the
page cache and the caches of modules, kernels and tokenizers. Every number is a median, with the least and
the most. Processor seconds are those of all processes of a server until the answer. The benchmark refuses
PYTHONDONTWRITEBYTECODE, with which Python compiles every module at each start.

`--kill ROLE` kills the process with this word in its command once the server answers. It measures the time
until the server has started that process again, and it is ready.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import shlex
import signal
import statistics
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

from benchmarks.serving import end

POLL_S = 0.02
LIMIT_S = 300.0
BODY = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 1, "temperature": 0}


def start(command: str, port: int, log: Path, role: str = "") -> tuple[float, float]:
    """
    Start a server, and end it at its first answer. Returns seconds to the answer and of processors.

    With `role`, they are those of the restart of a killed process.
    """
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            shlex.split(command.format(port=port)),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while not answers(port):
                if process.poll() is not None or time.monotonic() - began > LIMIT_S:
                    raise SystemExit(f"{command} did not answer; its log is {log}")
                time.sleep(POLL_S)
            if role:
                return restart(process.pid, role)
            return time.monotonic() - began, processor_seconds(process.pid)
        finally:
            end(process, signal.SIGINT)


def restart(server: int, role: str) -> tuple[float, float]:
    """Kill a server's process. Returns seconds until a new one is ready, and its processor seconds."""
    killed = _of_role(server, role)
    assert killed is not None, f"the server has no process with {role} in its command"
    ports = {one.laddr.port for one in killed.net_connections() if one.status == psutil.CONN_LISTEN}
    (own,) = (each for each in ports if ready(each))
    killed.kill()
    began = time.monotonic()
    while time.monotonic() - began < LIMIT_S:
        time.sleep(POLL_S)
        process = _of_role(server, role)
        if process is None or process == killed:
            continue
        if ready(own):
            return time.monotonic() - began, sum(process.cpu_times()[:2])
    raise SystemExit(f"the process {role} did not become ready again")


def ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=1.0) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError, http.client.HTTPException):
        return False


def _of_role(server: int, role: str) -> psutil.Process | None:
    for child in psutil.Process(server).children():
        with contextlib.suppress(psutil.Error):
            if role in child.cmdline():
                return child
    return None


def answers(port: int) -> bool:
    """Ask for one token. The model's name is asked for first, because some servers require it."""
    base = f"http://127.0.0.1:{port}/v1"
    try:
        with urllib.request.urlopen(f"{base}/models", timeout=LIMIT_S) as models:
            body = {"model": json.load(models)["data"][0]["id"], **BODY}
        request = urllib.request.Request(
            f"{base}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError, LookupError):
        return False


def processor_seconds(pid: int) -> float:
    """Return the seconds of a process, of its descendants, and of those that ended."""
    parent = psutil.Process(pid)
    return sum(sum(one.cpu_times()[:4]) for one in (parent, *parent.children(recursive=True)))


def shown(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--server", action="append", required=True, help="NAME=COMMAND with {port}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--port", type=int, default=18_200)
    parser.add_argument("--kill", default="", metavar="ROLE", help="measure restarts of this process")
    given = parser.parse_args()
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        raise SystemExit("PYTHONDONTWRITEBYTECODE is set. Unset it; PYTHONPYCACHEPREFIX may name a folder.")
    servers = dict(server.split("=", 1) for server in given.server)
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
    print("load average:", *os.getloadavg())
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(given.repeats + 1):
            for name, command in servers.items():
                taken = start(command, given.port, Path(folder) / "log", given.kill)
                results[name] += [taken] if repeat else []
    first = statistics.median(seconds for seconds, _ in results[next(iter(servers))])
    measured = "ready again" if given.kill else "first answer"
    print(f"| server | {measured}, s | processor s | ratio to the first |\n|---|---|---|---|")
    for name, taken_all in results.items():
        seconds, processors = ([one[index] for one in taken_all] for index in (0, 1))
        ratio = statistics.median(seconds) / first
        print(f"| {name} | {shown(seconds)} | {shown(processors)} | {ratio:.2f} |")
    print("load average:", *os.getloadavg())


if __name__ == "__main__":
    main()
