"""Several runner processes on one batch: one is killed, one is paused for longer than its lease."""

from __future__ import annotations

import signal
from pathlib import Path

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
    source = tmp_path / "input.jsonl"
    chaos.write_lines(source, LINES)
    with chaos.cluster(tmp_path, environment, seconds=0.1) as (running, service):
        id = chaos.submit(service, source)
        router = running.router
        chaos.await_true(lambda: len(router.runners()) == RUNNERS, 60, "all runners have started")
        paused, killed = router.runners()[:2]
        done = service.batch(id)["request_counts"]["completed"]
        chaos.await_true(
            lambda: service.batch(id)["request_counts"]["completed"] > done + 100, 60, "lines are answered"
        )
        killed.kill()
        paused.send_signal(signal.SIGSTOP)
        # The lines of the paused runner are needed in the end, and its lease ends before.
        chaos.await_true(lambda: waited_for(service.batch(id)), 150, "other runners have taken all lines")
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
