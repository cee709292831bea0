"""
Client of the process that validates constraints.

The process starts with the first constraint and runs as long as the worker. If a constraint exceeds its
limits, the process is killed, and the next validation starts a new one. It validates one constraint at a
time; a request that waits too long is rejected with 503.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from baton_api.errors import NotReady, Overloaded
from baton_engine.grammar.validator_process import (
    LENGTH_BYTES,
    TokenizerSpec,
    ValidationRequest,
    ValidationResult,
    write_frame,
)

log = logging.getLogger(__name__)

START_S = 120.0
"""Timeout of the start. A large tokenizer takes seconds, and more on a busy machine."""

WALL_FACTOR = 10.0
"""Maximum wall-clock seconds per processor second, because other processes use the cores too."""

QUEUE_S = 20.0
"""Maximum wait for the validations of other requests."""


class ValidationAborted(Exception):
    """A validation exceeded its limits, or crashed the process."""


class ValidatorKilled(Exception):
    """The process was killed from outside, possibly not because of this validation."""


class ConstraintValidator:
    """Validates constraints in a separate process. Thread-safe."""

    def __init__(self, tokenizer_spec: Callable[[], TokenizerSpec], seconds: float) -> None:
        """`tokenizer_spec` is called for each process. `seconds` limits a validation's processor time."""
        self._tokenizer_spec = tokenizer_spec
        self._seconds = seconds
        self._lock = threading.Lock()
        self._waiting = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self.count = 0
        """Number of validations so far."""

    @property
    def process(self) -> int | None:
        """The process id, or None."""
        return None if self._process is None else self._process.pid

    def validate(self, kind: str, source: str) -> ValidationResult:
        """Validate a constraint. Raises Overloaded if too many other validations are queued."""
        self._waiting += 1
        try:
            if not self._lock.acquire(timeout=QUEUE_S):
                raise Overloaded(self._waiting, 1, retry_after=5)
        finally:
            self._waiting -= 1
        try:
            return self._validate(ValidationRequest(kind=kind, source=source, seconds=self._seconds))
        finally:
            self._lock.release()

    def close(self) -> None:
        """Kill the process. A running validation fails."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _validate(self, request: ValidationRequest) -> ValidationResult:
        self.count += 1
        for _ in range(2):
            try:
                return self._ask(request)
            except ValidatorKilled:
                log.info("The process that validates constraints was killed.")
            except ValidationAborted:
                break
        return ValidationResult(
            reason=f"it is too complex: its compilation exceeds {self._seconds:g} s or the memory limit"
        )

    def _ask(self, request: ValidationRequest) -> ValidationResult:
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            write_frame(process.stdin, request)
            return self._read(process, self._seconds * WALL_FACTOR)
        except OSError as error:
            status = process.wait()  # its pipes are closed, so it has ended
            self._end()
            # Neither the process's limits nor its own faults cause this signal.
            raise ValidatorKilled if status == -signal.SIGKILL else ValidationAborted from error
        except ValidationAborted:
            self._end()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise NotReady("The worker is shutting down.")
        command = [sys.executable, "-P", "-m", "baton_engine.grammar.validator_process"]
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # llguidance writes long traces
            start_new_session=True,
        )
        self._process = process
        assert process.stdin is not None
        try:
            write_frame(process.stdin, self._tokenizer_spec())
            self._read(process, START_S)
        except (ValidationAborted, OSError) as error:
            self._end()
            raise RuntimeError("The process that validates constraints did not start.") from error
        log.info("Process %d validates constraints.", process.pid)
        return process

    def _read(self, process: subprocess.Popen[bytes], seconds: float) -> ValidationResult:
        assert process.stdout is not None
        descriptor, deadline = process.stdout.fileno(), time.monotonic() + seconds
        length = int.from_bytes(_read_all(descriptor, LENGTH_BYTES, deadline))
        return msgspec.msgpack.decode(_read_all(descriptor, length, deadline), type=ValidationResult)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # buffered data cannot be written any more
                    pipe.close()


def _read_all(descriptor: int, count: int, deadline: float) -> bytes:
    """Read `count` bytes. Raises ValidationAborted after the deadline, OSError at the end of the pipe."""
    parts: list[bytes] = []
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while count:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise ValidationAborted
        part = os.read(descriptor, count)
        if not part:
            raise BrokenPipeError
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
