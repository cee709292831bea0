"""What the terminal shows of the logs of processes."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from baton_cli.display import Display

LAST_WORDS = [
    "[2026-11-26 12:00:00] loading the model",
    "[2026-11-26 12:00:01] WARNING: no memory is left",
    '{"time":"2026-11-26T12:00:02.000+00:00","level":"error","message":"lost"}',
    "Traceback (most recent call last):",
]


@pytest.mark.parametrize("logs", [True, False])
def test_display_every_line_of_a_failed_start_is_shown_once(logs: bool) -> None:
    written = io.StringIO()
    display = Display(Console(file=written, width=200), logs=logs)
    for line in LAST_WORDS:
        display.logged("prefill-0", line)
    display.failed("prefill-0", LAST_WORDS)
    shown = [line.removeprefix("prefill-0").strip() for line in written.getvalue().splitlines()]
    assert sorted(shown) == sorted(LAST_WORDS)
