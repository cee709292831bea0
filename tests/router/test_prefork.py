"""Processes that are kept running: started in order, started again, stopped in order, never left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from baton_router.frontends.prefork import RESTART_LIMIT_S, STEADY_S, ChildProcess


class Program:
    """`tests.router.prefork_program` as it runs, line by line."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.router.prefork_program", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.pids: dict[str, int] = {}

    def line(self) -> str:
        """The next line, without the process's number, which is noted."""
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        if words and words[-1].isdecimal():
            self.pids[words[0]] = int(words.pop())
        return " ".join(words)

    def lines(self, count: int) -> list[str]:
        return [self.line() for _ in range(count)]

    def rest(self) -> list[str]:
        out, _ = self.process.communicate(timeout=300)
        return [" ".join(word for word in line.split() if not word.isdecimal()) for line in out.splitlines()]


@contextmanager
def program(*arguments: str) -> Iterator[Program]:
    one_program = Program(*arguments)
    try:
        yield one_program
    finally:
        one_program.process.kill()
        one_program.process.communicate()


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_first_member_starts_first_and_stops_last() -> None:
    with program() as crew:
        assert crew.lines(4) == ["one begins", "two begins", "three begins", "ready"]
        crew.process.send_signal(signal.SIGTERM)
        stopping, *ends, one_signaled, one_ends, over = crew.rest()
        assert (stopping, one_signaled, one_ends, over) == ("stopping", "one told", "one ends", "over")
        assert sorted(ends) == ["three ends", "three told", "two ends", "two told"]
        assert crew.process.returncode == 0
        assert not any(alive(pid) for pid in crew.pids.values())


def test_killed_member_is_restarted_and_the_others_stay() -> None:
    with program() as crew:
        crew.lines(4)
        before = dict(crew.pids)
        for _ in range(3):
            os.kill(crew.pids["two"], signal.SIGKILL)
            assert crew.line() == "two begins"
        assert crew.pids["two"] != before["two"]
        assert (crew.pids["one"], crew.pids["three"]) == (before["one"], before["three"])


def test_member_that_cannot_start_ends_the_start() -> None:
    with program("refuse") as crew:
        assert crew.rest() == ["one begins", "refused two cannot start: it is Monday.", "over"]
        assert not any(alive(pid) for pid in crew.pids.values())


def test_member_that_does_not_stop_is_killed() -> None:
    with program("stubborn") as crew:
        crew.lines(4)
        crew.process.send_signal(signal.SIGINT)
        *ends, one_signaled, one_ends, over = crew.rest()
        assert (one_signaled, one_ends, over) == ("one told", "one ends", "over")
        assert sorted(ends) == ["stopping", "three ends", "three told", "two told"]


def test_member_stopped_before_it_begins_does_not_begin() -> None:
    """Its signal arrives while it still has the handlers of its parent."""
    with program("early") as crew:
        assert crew.rest() == ["one begins", "stopping", "one told", "one ends", "over"]


def test_members_end_with_a_parent_that_is_killed() -> None:
    with program() as crew:
        crew.lines(4)
        crew.process.kill()
        assert sorted(crew.lines(3)) == ["one is an orphan", "three is an orphan", "two is an orphan"]


@pytest.mark.parametrize(
    ("lives", "pauses"),
    [
        ([0.0] * 7, [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0]),
        ([0.0] * 3 + [STEADY_S, 0.0], [0.1, 0.2, 0.4, 0.1, 0.2]),
        ([100.0, 100.0], [0.1, 0.1]),
    ],
)
def test_restart_delay_grows_with_repeated_ends(lives: list[float], pauses: list[float]) -> None:
    member, seen = ChildProcess("one", lambda started, life: None), []
    for life in lives:
        member.began = 50.0
        member.ended(50.0 + life)
        seen.append(member.pause_s)
        assert member.again == 50.0 + life + member.pause_s
    assert seen == pytest.approx(pauses)
    assert all(pause <= RESTART_LIMIT_S for pause in seen)
