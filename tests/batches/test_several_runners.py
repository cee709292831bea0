"""Several runner processes on one batch: one is killed, one is paused for longer than its lease."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.batches import chaos

LINES = 1200
RUNNERS = 3


@pytest.mark.slow
@pytest.mark.parametrize("database", ["sqlite", "postgres"])
def test_law_several_runners_answer_each_line_once(
    database: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """One is killed in the middle of its lines; another one is paused, and wakes up late."""
    url = "" if database == "sqlite" else request.getfixturevalue("postgres").new_database()
    environment = {
        "BATON_ROUTER_DATABASE": url,
        "BATON_ROUTER_BATCH_RUNNERS": str(RUNNERS),
        "BATON_ROUTER_BATCH_PARALLEL": str(RUNNERS),
        "BATON_ROUTER_BATCH_WINDOW": "96",
    }
    flags = ["--batch-lease-s=5"]  # a busy machine may delay a runner for longer than the usual second
    source = tmp_path / "input.jsonl"
    chaos.write_lines(source, LINES)
    with chaos.cluster(tmp_path, environment, *flags, seconds=0.1) as (running, service):
        for worker in running.workers:
            chaos.hold(worker, LINES // 4)  # not more, so that runners still have lines to send
        id = chaos.submit(service, source)
        runners: list[psutil.Process] = []

        def all_have_started() -> bool:
            runners[:] = running.router.runners()
            return len(runners) == RUNNERS

        def lines_are_answered() -> bool:
            return bool(service.batch(id)["request_counts"]["completed"] > LINES // 4)

        chaos.await_true(all_have_started, chaos.END_S, "all runners have started")
        chaos.await_true(lines_are_answered, chaos.END_S, "lines are answered")
        paused, killed, _ = runners
        killed.kill()
        paused.send_signal(signal.SIGSTOP)
        for worker in running.workers:
            chaos.release(worker)
        # The lines of the paused runner are needed in the end, and its lease ends before.
        chaos.await_true(lambda: waited_for(service.batch(id)), chaos.END_S, "others have taken all lines")
        paused.send_signal(signal.SIGCONT)
        ended = chaos.ended(service, id)
        output = chaos.output_of(service, ended, tmp_path)
    assert ended["status"] == "completed"
    report = chaos.Report()
    report.add(id, output, chaos.anonymous(id, output))
    assert output.count(b"\n") == LINES and (report.lost, report.doubled) == (0, 0)
    numbers = [f'"custom_id":"request-{number}"'.encode() for number in range(1, LINES + 1)]
    assert all(name in line for name, line in zip(numbers, output.splitlines(), strict=True)), "in order"


def waited_for(batch: dict[str, object]) -> bool:
    counts = batch["request_counts"]
    assert isinstance(counts, dict)
    return counts["completed"] == counts["total"] or batch["status"] != "in_progress"
