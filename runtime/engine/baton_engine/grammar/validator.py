"""
The worker's side of the process in which constraints are tried out.

It is started for the first constraint and lives as long as the worker, unless a trial ends it; then the
next trial has a new one. One trial at a time: who waits too long is told to come back.
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
"""A large tokenizer takes seconds, on a busy machine many."""

WALL_FACTOR = 10.0
"""Seconds to wait for one second of processor time: other processes want the cores too."""

QUEUE_S = 20.0
"""To wait for the trials of others."""


class ValidationAborted(Exception):
    """It took too long, or the process ended for its sake."""


class ValidatorKilled(Exception):
    """The process was killed from outside, and perhaps not for this trial."""


class ConstraintValidator:
    """Any thread may have a constraint tried out."""

    def __init__(self, tokenizer_spec: Callable[[], TokenizerSpec], seconds: float) -> None:
        """`tokenizer_spec` is asked whenever a process starts; `seconds` of processor time for each trial."""
        self._tokenizer_spec = tokenizer_spec
        self._seconds = seconds
        self._lock = threading.Lock()
        self._waiting = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self.count = 0
        """Trials so far."""

    @property
    def process(self) -> int | None:
        """The id of the process, if there is one."""
        return None if self._process is None else self._process.pid

    def validate(self, kind: str, source: str) -> ValidationResult:
        """Raises Overloaded if too many others come first."""
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
        """Whoever waits for a verdict gets a refusal."""
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
                log.info("The process that tries out constraints is gone.")
            except ValidationAborted:
                break
        return ValidationResult(
            reason=f"it is too complex: to compile it takes over {self._seconds:g} s, or too much memory"
        )

    def _ask(self, request: ValidationRequest) -> ValidationResult:
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            write_frame(process.stdin, request)
            return self._read(process, self._seconds * WALL_FACTOR)
        except OSError as error:
            status = process.wait()  # its pipes are closed: it has ended
            self._end()
            # No limit of ours ends it by this signal, and no fault of its own does.
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
            stderr=subprocess.DEVNULL,  # a library in distress writes pages
            start_new_session=True,
        )
        self._process = process
        assert process.stdin is not None
        try:
            write_frame(process.stdin, self._tokenizer_spec())
            self._read(process, START_S)
        except (ValidationAborted, OSError) as error:
            self._end()
            raise RuntimeError("The process that tries out constraints does not start.") from error
        log.info("Constraints are tried out by process %d.", process.pid)
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
                with contextlib.suppress(OSError):  # what was not written yet has nobody to go to
                    pipe.close()


def _read_all(descriptor: int, count: int, deadline: float) -> bytes:
    """Exactly `count` bytes. Raises TrialOver if they do not come in time, OSError if none will."""
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
