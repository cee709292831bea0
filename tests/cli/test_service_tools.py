"""`baton top`, `bench` and `status` with a real service that wants a key: one for the whole module."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton_api import profiles
from tests.cli.service import IGNORING, RunningUp, await_true, running_up
from tests.engine.models import make_model

pytestmark = pytest.mark.slow

KEY = "a-key-of-the-test"
TIMEOUT_S = 300
ENTER_SCREEN, LEAVE_SCREEN = b"\x1b[?1049h", b"\x1b[?1049l"

# No test here depends on how fast anything is.


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    model = make_model(tmp_path_factory.mktemp("models") / "tiny")
    with running_up(model, f"--api-key={KEY}") as up:
        yield up


def baton(*arguments: str, key: str = KEY) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "baton_cli.main", *arguments],
        env={**os.environ, "BATON_API_KEY": key},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def json_of(*arguments: str) -> Any:
    done = baton(*arguments, "--output=json")
    assert done.returncode == 0, done.stderr or done.stdout
    return json.loads(done.stdout)


SMALL = ("--prompt-tokens=64", "--output-tokens=8", "--warm-up=0")


def test_loads_by_clients_and_by_rates_are_measured_and_kept(service: RunningUp, tmp_path: Path) -> None:
    where = (f"--url={service.url}/v1", *SMALL, "--requests=8", "--ttft-ms=60000")
    kept, drawn = tmp_path / "figures.json", tmp_path / "figures.svg"
    report = json_of("bench", *where, "--concurrency=1,2", f"--save={kept}", f"--picture={drawn}")
    assert [one["load"] for one in report["levels"]] == ["1 client", "2 clients"]
    for one in report["levels"]:
        assert (one["requests"], one["failed"], one["good_share"]) == (8, 0, 1.0)
        assert one["output_tokens"] == 8
        assert one["prompt_tokens"] == pytest.approx(64, rel=0.3)
        assert 0 < one["ttft"]["p50"] <= one["ttft"]["p99"] <= one["total"]["most"]
    assert json.loads(kept.read_text()) == report
    assert "</svg>" in drawn.read_text()

    (open_,) = json_of("bench", *where, "--rate=8", "--shared-tokens=48")["levels"]
    assert (open_["requests"], open_["failed"]) == (8, 0)
    assert open_["cached_share"] > 0


def test_bench_plays_a_trace(service: RunningUp, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    # Each comes when the one before is computed, also by a slow worker.
    rows = [
        {"timestamp": 1000 * n, "input_length": 400, "output_length": 4, "hash_ids": [1]} for n in range(4)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (played,) = json_of("bench", f"--url={service.url}", f"--trace={trace}", "--speed=2")["levels"]
    assert (played["requests"], played["failed"]) == (4, 0)
    assert played["cached_share"] > 0  # all are the same prompt


def test_bench_failed_requests_are_counted_and_exit_3(service: RunningUp) -> None:
    done = baton("bench", f"--url={service.url}", "--prompt-tokens=9000", "--requests=2", "--concurrency=1")
    assert done.returncode == 3
    assert "2 status 400" in done.stdout and "maximum context length" in done.stdout


def test_bench_find_writes_a_profile_that_a_router_takes(service: RunningUp, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    json_of(
        "bench", f"--url={service.url}", f"--find={path}", "--repeats=1", "--ttft-ms=60000", "--tpot-ms=60000"
    )
    profile = profiles.read(path)
    assert profile.model == "tiny"
    assert {one.what for one in profile.points} == {"prefill", "step", "transfer"}
    assert profile.prefill.seconds(256, 256) > 0 and profile.step.seconds(4, 1000) > 0
    capacity = profile.capacity
    assert (
        capacity.prefill_tokens_per_s > 0
        and capacity.decode_tokens_per_s > 0
        and capacity.prefill_per_decode > 0
    )


def test_top_shows_what_was_done(service: RunningUp) -> None:
    json_of("bench", f"--url={service.url}", *SMALL, "--requests=4", "--concurrency=2")
    now = json_of("top", f"--url={service.url}", "--once", "--interval=0.2")
    assert now["models"] == ["tiny"]
    assert {one["role"]: one["state"] for one in now["workers"]} == {"prefill": "ready", "decode": "ready"}
    decode = now["workers"][1]
    assert decode["kv_usage"] is not None and decode["cache_hit"] is not None
    assert len(decode["ttft_s"]) == len(now["ttft_s"]) == 3
    text = baton("top", f"--url={service.url}", "--once", "--interval=0.2").stdout
    assert "2 of 2 workers ready" in text and "\x1b" not in text


@pytest.mark.parametrize("prefix", [(), IGNORING], ids=["by default", "inherited as ignored"])
def test_top_stays_on_terminal_until_sigint(service: RunningUp, prefix: tuple[str, ...]) -> None:
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    top = subprocess.Popen(
        [*prefix, sys.executable, "-m", "baton_cli.main", "top", f"--url={service.url}", "--interval=0.1"],
        env={**os.environ, "BATON_API_KEY": KEY, "TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""

    def drawn(part: bytes, times: int) -> bool:
        nonlocal shown
        with contextlib.suppress(OSError):  # no data yet, or EIO once the other end is closed
            shown += os.read(ours, 1 << 16)
        return shown.count(part) >= times

    try:
        await_true(lambda: drawn(b"2 of 2 workers", 3) or top.poll() is not None, TIMEOUT_S, "it draws")
        assert top.poll() is None, shown
        top.send_signal(signal.SIGINT)
        # Keep reading meanwhile: a write to an unread terminal blocks for ever.
        await_true(lambda: drawn(LEAVE_SCREEN, 1), TIMEOUT_S, "it gives the terminal back")
        await_true(lambda: drawn(b"", 0) and top.poll() is not None, TIMEOUT_S, "it ends")
    finally:
        if top.poll() is None:
            top.kill()
        top.wait()
        os.close(ours)
    assert top.returncode == 0
    assert shown.startswith(ENTER_SCREEN) and b"Traceback" not in shown


def test_bench_model_starts_its_own_service(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny")
    (level,) = json_of("bench", str(model), *SMALL, "--requests=4", "--concurrency=2")["levels"]
    assert (level["requests"], level["failed"], level["output_tokens"]) == (4, 0, 8)


def test_status_says_that_all_is_well(service: RunningUp) -> None:
    (service_status,) = json_of("status", f"--url={service.url}")
    assert service_status["serving"] and not service_status["problems"]
    assert len(service_status["parts"]) == 2
    assert "Requests are answered" in baton("status", f"--url={service.url}").stdout


@pytest.mark.parametrize("command", ["top", "status", "bench"])
def test_tools_wrong_key_or_address_is_one_line(service: RunningUp, command: str) -> None:
    wrong = baton(command, f"--url={service.url}", key="wrong")
    nowhere = baton(command, "--url=http://127.0.0.1:9")
    for done in (wrong, nowhere):
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    assert "key" in wrong.stderr
