"""The terminal output of running processes: progress bars, and logs with the name of the process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
)
from rich.text import Text

from baton_api.announcements import Loading
from baton_cli.supervisor import Watcher

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
NAME_WIDTH = 10


class Display(Watcher):
    """The console that all processes share."""

    def __init__(self, console: Console, *, logs: bool = True) -> None:
        """Without `logs`, only progress bars are shown, and only in a terminal."""
        self.console = console
        self._logs = logs
        self._colours: dict[str, str] = {}
        self._bars: Progress | None = None
        self._tasks: dict[tuple[str, str], TaskID] = {}

    def logged(self, name: str, line: str) -> None:
        if self._logs:
            self._line(name, line)

    def failed(self, name: str, last_words: list[str]) -> None:
        if not self._logs:
            for line in last_words:
                self._line(name, line)

    def loading(self, name: str, progress: Loading) -> None:
        if self._bars is None:
            return
        key = (name, progress.label)
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(f"{name}: {progress.label}", total=None)
        total = progress.total or None
        self._bars.update(self._tasks[key], completed=progress.done, total=total)

    def _line(self, name: str, line: str) -> None:
        if line.startswith("{"):  # a log for machines, which says itself whose it is
            self.console.print(Text(line), soft_wrap=True)
            return
        colour = self._colours.setdefault(name, COLOURS[len(self._colours) % len(COLOURS)])
        prefix = Text(f"{name:<{NAME_WIDTH}} ", style=colour)
        # Log lines contain no markup, and the terminal wraps them.
        self.console.print(prefix + Text(line), soft_wrap=True)

    @contextmanager
    def bars(self) -> Iterator[None]:
        """Show progress bars, and remove them at the end."""
        if not self.console.is_terminal:
            yield
            return
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as bars:
            self._bars = bars
            try:
                yield
            finally:
                self._bars = None
                self._tasks.clear()


class Bar:
    """The progress bar of one process: implements the engine's `Progress`."""

    def __init__(self, display: Display, name: str) -> None:
        self._display = display
        self._name = name
        self._now = Loading(label="", done=0, total=0)

    def start(self, label: str, total_bytes: int) -> None:
        self._show(Loading(label=label, done=0, total=total_bytes))

    def advance(self, size: int) -> None:
        self._show(Loading(label=self._now.label, done=self._now.done + size, total=self._now.total))

    def done(self) -> None:
        end = max(self._now.done, self._now.total)
        self._show(Loading(label=self._now.label, done=end, total=end))

    def _show(self, now: Loading) -> None:
        self._now = now
        self._display.loading(self._name, now)
