"""The output of running processes: progress bars, and logs in the terminal or in files."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path

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

from baton_api import logs
from baton_api.announcements import Loading
from baton_cli.supervisor import Watcher

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
NAME_WIDTH = 10
LOG_BYTES = 20_000_000
"""Of a log file, before it is replaced by an empty one."""


class Display(Watcher):
    """The console that all processes share."""

    def __init__(self, console: Console, *, logs: bool = True, files: LogFiles | None = None) -> None:
        """
        Without `logs`, only warnings are shown, and progress bars in a terminal.

        `files` receive all lines.
        """
        self.console = console
        self._logs = logs
        self._files = files
        self._colours: dict[str, str] = {}
        self._bars: Progress | None = None
        self._tasks: dict[tuple[str, str], TaskID] = {}

    @property
    def for_people(self) -> bool:
        """Whether people read the logs, and not a collector of logs."""
        return self.console.is_terminal or self._files is not None

    def logged(self, name: str, line: str) -> None:
        if self._files is not None:
            self._files.write(name, line)
        if self._shows(line):
            self._line(name, line)

    def noted(self, name: str, line: str) -> None:
        if self._files is not None:
            self._files.write(name, line)
        self._line(name, line)

    def failed(self, name: str, last_words: list[str]) -> None:
        for line in last_words:
            if not self._shows(line):  # otherwise `logged` has shown it
                self._line(name, line)

    def loading(self, name: str, progress: Loading) -> None:
        if self._bars is None:
            return
        key = (name, progress.label)
        if key not in self._tasks:
            self._tasks[key] = self._bars.add_task(f"{name}: {progress.label}", total=None)
        total = progress.total or None
        self._bars.update(self._tasks[key], completed=progress.done, total=total)

    def _shows(self, line: str) -> bool:
        """Whether the terminal shows a log line of a running process."""
        return self._logs or logs.is_warning(line)

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


class LogFiles:
    """
    One log file per process: `NAME.log` in a folder, and `NAME.log.1` with the lines before.

    Lines that cannot be written, for example to a full disk, are lost.
    """

    def __init__(self, folder: Path) -> None:
        """Make the folder. Raises OSError if that is not possible."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.folder = folder
        self._handlers: dict[str, RotatingFileHandler] = {}

    def write(self, name: str, line: str) -> None:
        with contextlib.suppress(OSError):
            if name not in self._handlers:
                path = self.folder / f"{name}.log"
                self._handlers[name] = RotatingFileHandler(path, "a", LOG_BYTES, 1, "utf-8", errors="replace")
                self._handlers[name].handleError = _lost  # type: ignore[method-assign]
            self._handlers[name].emit(logging.makeLogRecord({"msg": line}))


def _lost(record: logging.LogRecord) -> None:
    """The file system does not take a line; the process goes on."""


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
