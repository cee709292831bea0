"""What the commands of `baton batch` do, besides running one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from baton_api.errors import SetupError
from baton_cli.batch_display import BatchDisplay, Shown, summary
from baton_cli.batch_service import BatchService

POLL_S = 1.0

ENDED = frozenset({"completed", "failed", "expired", "cancelled"})

FAILED, SOME_FAILED, CUT_SHORT = 1, 3, 4


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands for one service."""

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
            display.note(f"{batch['id']} (Ctrl-C leaves it running; `baton batch watch` comes back to it)")
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
            place = to or Path(f"{id}_{kind}.jsonl")
            # Named after the file, so that what another one left behind is never gone on with.
            part = place.with_name(f"{place.name}.{file_id}.part")
            with display.bytes(f"downloading {place.name}") as bar:
                service.download(file_id, size, part, bar.moved)
            part.replace(place)
            display.result({"path": str(place), "bytes": size, "file_id": file_id}, str(place))

    @contextmanager
    def _open(self) -> Iterator[tuple[BatchService, BatchDisplay]]:
        display = BatchDisplay(self.as_json)
        service = BatchService(self.url, self.api_key, display.lost)
        try:
            yield service, display
        finally:
            service.close()


def _watch(service: BatchService, display: BatchDisplay, batch: Shown) -> None:
    """Until its end; leaves with the status that says how that was."""
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
    """Of a command that waited for the batch's end."""
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
        return f"{id} is {status}: its files come with its end. `baton batch watch {id}` waits for that."
    if errors:
        return f"{id} is {status} and no line of it failed."
    if batch["error_file_id"]:
        return f"{id} is {status} and no line of it was answered; --errors fetches why."
    return f"{id} is {status} and has no answers."
