"""`baton bench` and `status` with a real service that wants a key: one for the whole module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from baton_api import profiles
from tests.cli.service import RunningUp, running_up
from tests.engine.models import make_model

pytestmark = pytest.mark.slow

KEY = "a-key-of-the-test"
TIMEOUT_S = 300

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
    saved = tmp_path / "figures.json"
    report = json_of("bench", *where, "--concurrency=1,2", f"--save={saved}")
    assert [one["load"] for one in report["levels"]] == ["1 client", "2 clients"]
    for one in report["levels"]:
        assert (one["requests"], one["failed"], one["good_share"]) == (8, 0, 1.0)
        assert one["output_tokens"] == 8
        assert one["prompt_tokens"] == pytest.approx(64, rel=0.3)
        assert 0 < one["ttft"]["p50"] <= one["ttft"]["p99"] <= one["total"]["most"]
    assert json.loads(saved.read_text()) == report

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


def test_bench_model_starts_its_own_service(tmp_path: Path) -> None:
    model = make_model(tmp_path / "tiny")
    (level,) = json_of("bench", str(model), *SMALL, "--requests=4", "--concurrency=2")["levels"]
    assert (level["requests"], level["failed"], level["output_tokens"]) == (4, 0, 8)


def test_status_says_that_all_is_well(service: RunningUp) -> None:
    (service_status,) = json_of("status", f"--url={service.url}")
    assert service_status["serving"] and not service_status["problems"]
    assert len(service_status["parts"]) == 2
    assert "Requests are answered" in baton("status", f"--url={service.url}").stdout


@pytest.mark.parametrize("command", ["status", "bench"])
def test_tools_wrong_key_or_address_is_one_line(service: RunningUp, command: str) -> None:
    wrong = baton(command, f"--url={service.url}", key="wrong")
    nowhere = baton(command, "--url=http://127.0.0.1:9")
    for done in (wrong, nowhere):
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
    assert "key" in wrong.stderr
