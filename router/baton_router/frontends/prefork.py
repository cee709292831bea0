"""
A preforking supervisor: it keeps child processes of one program running until a signal to stop.

The parent has no thread and no event loop; children share its imports and its bound socket. A child that
exits unexpectedly is restarted, with a growing delay. At the end the children are stopped in order. If the
parent is killed, the children notice the closed pipe and stop.
"""

from __future__ import annotations

import logging
import math
import os
import selectors
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NoReturn

from baton_api.errors import SetupError

log = logging.getLogger(__name__)

RESTART_S = 0.1
RESTART_LIMIT_S = 5.0
"""Seconds before a restart: doubled each time, up to this limit."""

STEADY_S = 10.0
"""Seconds of running after which earlier failures of a child no longer count."""

STARTED = b"started"

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

ChildMain = Callable[["ReadySignal", int], None]
"""The main function of a child, until SIGTERM. The number is a pipe's end that becomes readable when the
parent is gone."""


class ReadySignal:
    """Reports once that a child is ready."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self) -> None:
        self._say(STARTED)

    def refused(self, reason: str) -> None:
        """The child cannot be started without a change of settings or files."""
        self._say(reason.encode())

    def _say(self, report: bytes) -> None:
        if self._descriptor >= 0:
            os.write(self._descriptor, report)
            os.close(self._descriptor)
            self._descriptor = -1


@dataclass(slots=True, eq=False)
class ChildProcess:
    """One child over all its starts."""

    name: str
    body: ChildMain
    pid: int = 0
    """0 while it does not run."""
    began: float = 0.0
    failures: int = 0
    again: float = 0.0
    """When it is restarted, if it does not run."""
    started: bool = False
    """Whether it was ever ready."""
    report_pipe: int = field(default=-1)
    """The pipe on which it reports that."""

    @property
    def pause_s(self) -> float:
        return min(RESTART_LIMIT_S, RESTART_S * 2.0 ** max(0, self.failures - 1))

    def ended(self, now: float) -> None:
        self.failures = 1 if now - self.began >= STEADY_S else self.failures + 1
        self.pid, self.again = 0, now + self.pause_s


class ProcessSupervisor:
    """The children, and the parent's control of them."""

    def __init__(self, children: Sequence[ChildProcess], stop_s: float) -> None:
        """
        The first child starts before the others and stops after them; after `stop_s` seconds a child is
        killed.
        """
        self._children = list(children)
        self._stop_s = stop_s
        self._selector = selectors.DefaultSelector()
        self._parent_pipe = os.pipe()
        """Open for as long as this process lives."""
        self._wakeup_pipe = os.pipe()
        self._stops = 0

    def run(self, ready: Callable[[], None], stopping: Callable[[], None]) -> None:
        """
        Start the children one after the other, and keep them running until SIGTERM or SIGINT.

        `ready` is called when the last one is ready, `stopping` before the first one is stopped. Raises
        SetupError if a child cannot be started.
        """
        os.set_blocking(self._wakeup_pipe[0], False)
        os.set_blocking(self._wakeup_pipe[1], False)
        self._selector.register(self._wakeup_pipe[0], selectors.EVENT_READ)
        try:
            with self._signals():
                for child in self._children:
                    if self._stops:
                        break
                    self._start(child)
                    while not child.started and not self._stops:
                        self._run_once()
                if not self._stops:
                    ready()
                while not self._stops:
                    self._run_once()
                stopping()
                self._end()
        finally:
            self._kill()
            self._selector.close()
            for descriptor in (*self._parent_pipe, *self._wakeup_pipe):
                os.close(descriptor)

    def _run_once(self) -> None:
        """Wait for an event and handle it."""
        now = time.monotonic()
        due = [one.again for one in self._children if not one.pid and one.again]
        self._wait(max(0.0, min(due) - now) if due else None)
        self._reap()
        if self._stops:
            return
        for child in self._children:
            if not child.pid and child.again and child.again <= time.monotonic():
                self._start(child)

    def _wait(self, seconds: float | None) -> None:
        for key, _ in self._selector.select(seconds):
            if key.fd == self._wakeup_pipe[0]:
                os.read(self._wakeup_pipe[0], 4096)
            else:
                self._read_report(key.data)

    def _read_report(self, child: ChildProcess) -> None:
        report = os.read(child.report_pipe, 65536)
        self._selector.unregister(child.report_pipe)
        os.close(child.report_pipe)
        child.report_pipe = -1
        if report == STARTED:
            child.started = True
        elif report and not child.started:
            raise SetupError(report.decode())

    def _reap(self) -> None:
        for child in self._children:
            if not child.pid:
                continue
            pid, status = os.waitpid(child.pid, os.WNOHANG)
            if pid:
                child.ended(time.monotonic())
                if not self._stops:
                    how = os.waitstatus_to_exitcode(status)
                    log.error("The process %s ended with %d and is started again.", child.name, how)

    def _start(self, child: ChildProcess) -> None:
        read_end, write_end = os.pipe()
        child.began = time.monotonic()
        child.again = 0.0
        sys.stdout.flush()
        sys.stderr.flush()
        # The child has this process's handlers at first: a signal to stop it would be lost in one of them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            pid = os.fork()
            if pid == 0:
                os.close(read_end)
                self._run_child(child, write_end, mask)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(write_end)
        child.pid, child.report_pipe = pid, read_end
        self._selector.register(read_end, selectors.EVENT_READ, child)

    def _run_child(self, child: ChildProcess, write_end: int, mask: set[signal.Signals | int]) -> NoReturn:
        """In the child: run it with the signal mask, and exit without the parent's cleanup."""
        status = 1
        started = ReadySignal(write_end)
        try:
            os.setpgid(0, 0)  # a Ctrl-C is the parent's, which stops the children in order
            self._selector.close()
            for descriptor in (self._parent_pipe[1], *self._wakeup_pipe):
                os.close(descriptor)
            for other in self._children:
                if other.report_pipe >= 0:
                    os.close(other.report_pipe)
            signal.set_wakeup_fd(-1)
            for number in (*STOP_SIGNALS, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            child.body(started, self._parent_pipe[0])
            status = 0
        except SetupError as error:
            started.refused(error.message)
        except BaseException:
            log.exception("The process %s failed.", child.name)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def _end(self) -> None:
        """Stop all but the first child at once, then the first; another signal hastens this."""
        self._stop(self._children[1:])
        self._stop(self._children[:1])

    def _stop(self, children: Sequence[ChildProcess]) -> None:
        signals_sent, deadline = 0, time.monotonic() + self._stop_s
        while running := [child for child in children if child.pid]:
            if signals_sent < self._stops:
                signals_sent = self._stops
                _send_signal(running, signal.SIGTERM)
            left = deadline - time.monotonic()
            if left <= 0:
                names = ", ".join(child.name for child in running)
                log.error("Killed after %g s without stopping: %s.", self._stop_s, names)
                _send_signal(running, signal.SIGKILL)
                deadline = math.inf
            self._wait(min(max(left, 0.0), 1.0))
            self._reap()

    def _kill(self) -> None:
        for child in self._children:
            if child.pid:
                os.kill(child.pid, signal.SIGKILL)
                os.waitpid(child.pid, 0)
                child.pid = 0

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Signals write to the wake-up pipe."""
        numbers = (*STOP_SIGNALS, signal.SIGCHLD)
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        wakeup_pipe = signal.set_wakeup_fd(self._wakeup_pipe[1], warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(wakeup_pipe)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: object) -> None:
        if number != signal.SIGCHLD:
            self._stops += 1


def _send_signal(children: Sequence[ChildProcess], number: int) -> None:
    for child in children:
        os.kill(child.pid, number)
