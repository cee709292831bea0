"""What a person sees of a batch: a bar while it goes on, if there is a terminal, and one line at its end."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

Shown = dict[str, Any]

WIDE = 200
"""Columns of what is written to a file or a pipe: nothing is cut off there."""

TIMES = ("completed_at", "failed_at", "expired_at", "cancelled_at")


class BatchDisplay:
    """Bars go to standard error, and only to a terminal; results go to standard output, as text or JSON."""

    def __init__(self, as_json: bool, console: Console | None = None, errors: Console | None = None) -> None:
        self.as_json = as_json
        self._console = console or Console(soft_wrap=True)
        if not self._console.is_terminal:
            self._console.width = WIDE
        self._errors = errors or Console(stderr=True)
        self._trouble = ""

    @contextmanager
    def bytes(self, label: str) -> Iterator[Bar]:
        """Show how much of a file has passed."""
        columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with self._bar(label, columns) as bar:
            yield bar

    @contextmanager
    def lines(self, label: str) -> Iterator[Bar]:
        """Show how many lines of a batch are done."""
        columns = (MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
        with self._bar(label, columns) as bar:
            yield bar

    @contextmanager
    def _bar(self, label: str, columns: Iterable[ProgressColumn]) -> Iterator[Bar]:
        every = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), *columns)
        with Progress(
            *every, console=self._errors, transient=True, disable=not self._errors.is_terminal
        ) as bars:
            yield Bar(bars, label)

    def lost(self, reason: str) -> None:
        """The service does not answer, or does again if there is no reason why not."""
        if reason and not self._trouble and self._errors.is_terminal:
            self._errors.print(Text(f"No answer ({reason}). Trying again.", style="yellow"))
        elif self._trouble and not reason and self._errors.is_terminal:
            self._errors.print(Text("The service answers again.", style="green"))
        self._trouble = reason

    def note(self, text: str) -> None:
        """Something for a person who watches."""
        if not self.as_json and self._errors.is_terminal:
            self._errors.print(Text(text, style="dim"))

    def result(self, value: object, text: str) -> None:
        """What the command was for."""
        if self.as_json:
            sys.stdout.write(json.dumps(value) + "\n")
        else:
            self._console.print(Text(text))

    def table(self, batches: list[Shown]) -> None:
        if self.as_json:
            self.result(batches, "")
            return
        table = Table(box=None, pad_edge=False)
        for name in ("batch", "status", "done", "failed", "endpoint", "model"):
            table.add_column(name, no_wrap=name == "batch")
        for batch in batches:
            counts = batch["request_counts"]
            done = f"{counts['completed'] + counts['failed']}/{counts['total']}"
            model = batch.get("model") or ""
            table.add_row(batch["id"], batch["status"], done, str(counts["failed"]), batch["endpoint"], model)
        self._console.print(table)


class Bar:
    """One bar."""

    def __init__(self, bars: Progress, label: str) -> None:
        self._bars = bars
        self._task = bars.add_task(label, total=None)

    def moved(self, done: int, total: int) -> None:
        self._bars.update(self._task, completed=done, total=total or None)

    def say(self, label: str) -> None:
        self._bars.update(self._task, description=label)


def summary(batch: Shown) -> str:
    """How it ended, in one line."""
    counts = batch["request_counts"]
    parts = [f"{batch['id']}: {batch['status']}"]
    if counts["total"]:
        parts.append(f"{counts['completed']} of {counts['total']} answered, {counts['failed']} failed")
    end = next((batch[name] for name in TIMES if batch.get(name)), None)
    if end is not None:
        parts.append(f"{end - batch['created_at']} s")
    errors = (batch.get("errors") or {}).get("data") or []
    if errors:
        first = errors[0]
        where = f"line {first['line']}: " if first.get("line") else ""
        more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
        parts.append(f"{where}{first['message']}{more}")
    return "; ".join(parts)
