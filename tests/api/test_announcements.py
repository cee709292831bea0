"""Announcements of a child process to its supervisor."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from baton_api import announcements
from baton_api.announcements import Announcement, Announcer, Bar, Listening, Loading, Ready, Refused


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    yield reading, writing
    for descriptor in (reading, writing):
        try:
            os.close(descriptor)
        except OSError:
            continue  # the test closed it


def heard(reading: int) -> list[Announcement]:
    return [announcements.read(line) for line in os.read(reading, 65536).splitlines()]


def test_announcements_are_read_in_order(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    announced: list[Announcement] = [
        Listening(host="::1", port=8000),
        Loading(label="weights", done=1, total=2),
        Refused(reason="no such\nmodel"),
        Ready(control="127.0.0.1:9000"),
    ]
    announce = Announcer(writing)
    for announcement in announced:
        announce(announcement)
    assert heard(reading) == announced


def test_process_without_a_pipe_announces_nothing() -> None:
    Announcer()(Ready())


def test_child_notices_the_end_of_its_supervisor(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.close(reading)
    with pytest.raises(BrokenPipeError):
        Announcer(writing)(Ready())


def test_progress_in_small_steps_gives_few_lines(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    bar = Bar(Announcer(writing))
    bar.start("weights", 10_000)
    for _ in range(10_000):
        bar.advance(1)
    bar.done()
    lines = heard(reading)
    assert len(lines) == 102
    assert lines[0] == Loading(label="weights", done=0, total=10_000)
    assert lines[-1] == Loading(label="weights", done=10_000, total=10_000)
