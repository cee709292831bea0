"""
A few processes of one program that are kept running until somebody says stop.

They are forked from one that does nothing else: it has no thread and no event loop, what it has imported is
shared, and a socket that it bound stays open whichever child dies. A child that ends unasked is started
again, the longer after the oftener. At the end the children are told to stop in order; if the parent is
killed, they find their pipe to it closed and stop by themselves.
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
"""Seconds before a child is started again: twice as many each time, at the most."""

STEADY_S = 10.0
"""Seconds after which a child that runs is forgiven what it did before."""

STARTED = b"started"

ChildMain = Callable[["ReadySignal", int], None]
"""What a child does, until a SIGTERM. It says when it has started; the number is a pipe's end that becomes
readable when the parent is gone."""


class ReadySignal:
    """How a child says that it has begun to serve. Says it once."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self) -> None:
        self._say(STARTED)

    def refused(self, reason: str) -> None:
        """It cannot be started, and only a person can change that."""
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
    """0: it does not run."""
    began: float = 0.0
    failures: int = 0
    again: float = 0.0
    """When it is to be started again, if it does not run."""
    started: bool = False
    """Whether it ever said so."""
    report_pipe: int = field(default=-1)
    """The pipe on which it says it."""

    @property
    def pause_s(self) -> float:
        return min(RESTART_LIMIT_S, RESTART_S * 2.0 ** max(0, self.failures - 1))

    def ended(self, now: float) -> None:
        self.failures = 1 if now - self.began >= STEADY_S else self.failures + 1
        self.pid, self.again = 0, now + self.pause_s


class ProcessSupervisor:
    """The children, and the parent's part of their life."""

    def __init__(self, children: Sequence[ChildProcess], stop_s: float) -> None:
        """
        The first of `children` is started before the others and stopped after them; one that does not stop
        within `stop_s` seconds of being told to is killed.
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
        Start the children one after the other, and keep them until a SIGTERM or SIGINT.

        `ready` is called when the last one has said that it serves, `stopping` before the first one is told
        to stop. Raises SetupError if a child cannot be started at all.
        """
        os.set_blocking(self._wakeup_pipe[0], False)
        os.set_blocking(self._wakeup_pipe[1], False)
        self._selector.register(self._wakeup_pipe[0], selectors.EVENT_READ)
        try:
            with self._signals():
                for child in self._children:
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
        """Wait for something to happen, and see to it."""
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
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            self._run_child(child, write_end)
        os.close(write_end)
        child.pid, child.report_pipe = pid, read_end
        self._selector.register(read_end, selectors.EVENT_READ, child)

    def _run_child(self, child: ChildProcess, write_end: int) -> NoReturn:
        """In the child: do its work, and leave without what the parent would do at its end."""
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
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
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
        """Stop all but the first member at once, then the first; another signal hastens those that stop."""
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
                log.error("Not stopped in %g s, and killed: %s.", self._stop_s, names)
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
        """A signal rings the bell on which `_wait` waits."""
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)
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
