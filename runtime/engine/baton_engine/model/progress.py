"""Progress of long work as a label and bytes, so that a command line can draw a bar."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """One piece of work at a time: `start`, any number of `advance`, `done` unless it fails."""

    def start(self, label: str, total_bytes: int) -> None:
        """`label` says what is being done; `total_bytes` is 0 where nobody knows."""
        ...

    def advance(self, size: int) -> None:
        """`size` more bytes are done."""
        ...

    def done(self) -> None: ...


class Silent:
    """Progress that nobody watches."""

    def start(self, label: str, total_bytes: int) -> None: ...

    def advance(self, size: int) -> None: ...

    def done(self) -> None: ...


SILENT = Silent()
