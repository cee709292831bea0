"""Progress of long operations, for the progress bar of the command line."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Callbacks of one operation at a time: `start`, any number of `advance`, `done` unless it fails."""

    def start(self, label: str, total_bytes: int) -> None:
        """Begin an operation. `label` describes it; `total_bytes` is 0 if the size is unknown."""
        ...

    def advance(self, size: int) -> None:
        """Report `size` more bytes."""
        ...

    def done(self) -> None: ...


class Silent:
    """Implementation of `Progress` without output."""

    def start(self, label: str, total_bytes: int) -> None: ...

    def advance(self, size: int) -> None: ...

    def done(self) -> None: ...


SILENT = Silent()
