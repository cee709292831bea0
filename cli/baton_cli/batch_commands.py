"""The commands of `baton batch`, and their output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
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

from baton_api.errors import SetupError
from baton_cli.batch_service import BatchService

POLL_S = 1.0

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})

FAILED, SOME_FAILED, CUT_SHORT = 1, 3, 4


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands of `baton batch` for one service."""

    url: str
    api_key: str
    as_json: bool

    def submit(self, path: Path, endpoint: str, window: str, metadata: dict[str, str], watched: bool) -> None:
        with self._open() as (service, display):
            with display.bytes(f"uploading {path.name}") as bar:
                file = service.upload(path, bar.moved)
            batch = service.create(file["id"], endpoint, metadata, window)
            if not watched:
                display.result(batch, batch["id"])
                return
            display.note(f"{batch['id']} (Ctrl-C does not cancel it; `baton batch watch` shows it again)")
            _watch(service, display, batch)

    def watch(self, id: str) -> None:
        with self._open() as (service, display):
            _watch(service, display, service.batch(id))

    def list_(self, limit: int) -> None:
        with self._open() as (service, display):
            display.table(list(service.batches(limit)))

    def cancel(self, id: str) -> None:
        with self._open() as (service, display):
            batch = service.cancel(id)
            display.result(batch, f"{batch['id']}: {batch['status']}")

    def download(self, id: str, to: Path | None, errors: bool) -> None:
        kind = "error" if errors else "output"
        with self._open() as (service, display):
            batch = service.batch(id)
            file_id = batch[f"{kind}_file_id"]
            if file_id is None:
                raise SetupError(_nothing(batch, errors))
            size = service.file(file_id)["bytes"]
            target = to or Path(f"{id}_{kind}.jsonl")
            # The name contains the id of the file, so that the download of another file is not resumed.
            part = target.with_name(f"{target.name}.{file_id}.part")
            with display.bytes(f"downloading {target.name}") as bar:
                service.download(file_id, size, part, bar.moved)
            part.replace(target)
            display.result({"path": str(target), "bytes": size, "file_id": file_id}, str(target))

    @contextmanager
    def _open(self) -> Iterator[tuple[BatchService, BatchDisplay]]:
        display = BatchDisplay(self.as_json)
        service = BatchService(self.url, self.api_key, display.lost)
        try:
            yield service, display
        finally:
            service.close()


def _watch(service: BatchService, display: BatchDisplay, batch: Shown) -> None:
    """Wait for the end of a batch. Exits with a status other than 0 unless it succeeded."""
    with display.lines(batch["status"]) as bar:
        while batch["status"] not in ENDED:
            counts = batch["request_counts"]
            bar.say(batch["status"])
            bar.moved(counts["completed"] + counts["failed"], counts["total"])
            time.sleep(POLL_S)
            batch = service.batch(batch["id"])
    display.result(batch, summary(batch))
    if status := exit_status(batch):
        raise typer.Exit(status)


def exit_status(batch: Shown) -> int:
    """Return the exit status for an ended batch."""
    match batch["status"]:
        case "completed":
            return SOME_FAILED if batch["request_counts"]["failed"] else 0
        case "cancelled" | "expired":
            return CUT_SHORT
        case _:
            return FAILED


def _nothing(batch: Shown, errors: bool) -> str:
    id, status = batch["id"], batch["status"]
    if status not in ENDED:
        return f"{id} is {status} and has no files yet. Wait for its end: baton batch watch {id}."
    if errors:
        return f"{id} is {status} and has no errors."
    if batch["error_file_id"]:
        return f"{id} is {status} and has no results. Download its errors with --errors."
    return f"{id} is {status} and has no results."


Shown = dict[str, Any]

WIDE = 200
"""Columns of output to a file or a pipe."""

TIMES = ("completed_at", "failed_at", "expired_at", "cancelled_at")


class BatchDisplay:
    """Shows progress bars on standard error, in a terminal only, and results on standard output."""

    def __init__(self, as_json: bool, console: Console | None = None, errors: Console | None = None) -> None:
        self.as_json = as_json
        self._console = console or Console(soft_wrap=True)
        if not self._console.is_terminal:
            self._console.width = WIDE
        self._errors = errors or Console(stderr=True)
        self._trouble = ""

    @contextmanager
    def bytes(self, label: str) -> Iterator[Bar]:
        """Show the progress of an upload or download."""
        columns = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with self._bar(label, columns) as bar:
            yield bar

    @contextmanager
    def lines(self, label: str) -> Iterator[Bar]:
        """Show the progress of a batch in lines."""
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
        """Report that the service does not answer. An empty reason means that it does again."""
        if reason and not self._trouble and self._errors.is_terminal:
            self._errors.print(Text(f"No answer ({reason}). Retrying.", style="yellow"))
        elif self._trouble and not reason and self._errors.is_terminal:
            self._errors.print(Text("The service answers again.", style="green"))
        self._trouble = reason

    def note(self, text: str) -> None:
        """Print a hint, in a terminal only."""
        if not self.as_json and self._errors.is_terminal:
            self._errors.print(Text(text, style="dim"))

    def result(self, value: object, text: str) -> None:
        """Print the result of a command."""
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
    """A progress bar."""

    def __init__(self, bars: Progress, label: str) -> None:
        self._bars = bars
        self._task = bars.add_task(label, total=None)

    def moved(self, done: int, total: int) -> None:
        self._bars.update(self._task, completed=done, total=total or None)

    def say(self, label: str) -> None:
        self._bars.update(self._task, description=label)


def summary(batch: Shown) -> str:
    """Return the result of a batch in one line."""
    counts = batch["request_counts"]
    parts = [f"{batch['id']}: {batch['status']}"]
    if counts["total"]:
        parts.append(f"{counts['completed']} of {counts['total']} completed, {counts['failed']} failed")
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
