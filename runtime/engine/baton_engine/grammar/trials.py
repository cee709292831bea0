"""
The worker's side of the process in which constraints are tried out.

It is started for the first constraint and lives as long as the worker, unless a trial ends it; then the
next trial has a new one. One trial at a time: who waits too long is told to come back.
"""

from __future__ import annotations

import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import msgspec

from baton_api.errors import Overloaded
from baton_engine.grammar.trial import LENGTH_BYTES, Trial, Verdict, Words, write_frame

log = logging.getLogger(__name__)

START_S = 120.0
"""A large tokenizer takes seconds, on a busy machine many."""

WALL_FACTOR = 10.0
"""Seconds to wait for one second of processor time: other processes want the cores too."""

QUEUE_S = 20.0
"""To wait for the trials of others."""


class TrialOver(Exception):
    """The process ended, or was ended, without a verdict."""


class Trials:
    """Any thread may have a constraint tried out."""

    def __init__(self, words: Callable[[], Words], seconds: float) -> None:
        """`words` is asked whenever a process starts; `seconds` of processor time for each trial."""
        self._words = words
        self._seconds = seconds
        self._lock = threading.Lock()
        self._waiting = 0
        self._process: subprocess.Popen[bytes] | None = None

    def judge(self, kind: str, source: str) -> Verdict:
        """Raises Overloaded if too many others come first."""
        self._waiting += 1
        try:
            if not self._lock.acquire(timeout=QUEUE_S):
                raise Overloaded(self._waiting, 1, retry_after=5)
        finally:
            self._waiting -= 1
        try:
            return self._judge(Trial(kind=kind, source=source, seconds=self._seconds))
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._end()

    def _judge(self, trial: Trial) -> Verdict:
        process = self._process
        if process is None or process.poll() is not None:
            self._end()
            process = self._start()
        try:
            assert process.stdin is not None
            write_frame(process.stdin, trial)
            return self._read(process, self._seconds * WALL_FACTOR)
        except (TrialOver, OSError):
            self._end()
            return Verdict(
                reason=f"it is too complex: to compile it takes over {self._seconds:g} s, or too much memory"
            )

    def _start(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-P", "-m", "baton_engine.grammar.trial"]
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
            write_frame(process.stdin, self._words())
            self._read(process, START_S)
        except (TrialOver, OSError) as error:
            self._end()
            raise RuntimeError("The process that tries out constraints does not start.") from error
        log.info("Constraints are tried out by process %d.", process.pid)
        return process

    def _read(self, process: subprocess.Popen[bytes], seconds: float) -> Verdict:
        assert process.stdout is not None
        descriptor, deadline = process.stdout.fileno(), time.monotonic() + seconds
        length = int.from_bytes(_read_all(descriptor, LENGTH_BYTES, deadline))
        return msgspec.msgpack.decode(_read_all(descriptor, length, deadline), type=Verdict)

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except OSError:  # what was not written yet has nobody to go to
                    log.debug("The pipe to process %d broke.", process.pid)


def _read_all(descriptor: int, count: int, deadline: float) -> bytes:
    """Exactly `count` bytes. Raises TrialOver if they do not come."""
    parts: list[bytes] = []
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while count:
        left = deadline - time.monotonic()
        if left <= 0 or not poll.poll(left * 1000):
            raise TrialOver
        part = os.read(descriptor, count)
        if not part:
            raise TrialOver
        parts.append(part)
        count -= len(part)
    return b"".join(parts)
