"""Commands from other threads to the engine's thread, and the sleep until the next one arrives."""

from __future__ import annotations

import threading
from collections.abc import Callable

Command = Callable[[], None]


class CommandQueue:
    """Commands in order of arrival. The engine's thread takes them between two steps."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._commands: list[Command] = []
        self._closed = False

    def post(self, command: Command) -> bool:
        """Append a command and wake the thread. False if the queue is closed."""
        with self._wake:
            if self._closed:
                return False
            self._commands.append(command)
            self._wake.notify()
            return True

    def close(self) -> None:
        """Stop the thread; commands still in the queue are dropped."""
        with self._wake:
            self._closed = True
            self._wake.notify()

    def take(self, *, wait: bool) -> list[Command] | None:
        """Return all commands, at least one if `wait`; None after the queue was closed."""
        with self._wake:
            while wait and not self._commands and not self._closed:
                self._wake.wait()
            if self._closed:
                return None
            commands, self._commands = self._commands, []
            return commands
