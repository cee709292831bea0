"""
Run several Baton processes: start, restart and stop them in order.

Each is a `Member`. One that was ready is restarted on the same ports when it ends, with a growing delay. One
that was never ready is not restarted, because that would hide its error.

Each runs in its own process group, so that Ctrl-C in a terminal reaches the supervisor only. The kernel
kills it when the supervisor dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import msgspec

from baton_api.announcements import Announcement, Listening, Loading, Ready, Refused, read
from baton_api.errors import SetupError

PR_SET_PDEATHSIG = 1

LINE_LIMIT = 1024 * 1024
"""Bytes of one line of a child's log; a longer one is cut."""


@dataclass(frozen=True, slots=True)
class Command:
    """The arguments after `baton`, and the name of the process in logs."""

    name: str
    role: str
    """router, prefill, decode or both."""
    arguments: tuple[str, ...]
    """Without ports."""
    port: int = 0
    """Port of the first start; 0 takes a free one. Restarts keep the port."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Secrets and other values that must not be flags."""


class Child:
    """One process, from its start to its end."""

    def __init__(self, process: asyncio.subprocess.Process, readers: Sequence[asyncio.Task[None]]) -> None:
        self._process = process
        self._readers = readers

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> int:
        """Wait for the end and return the exit status, after the last log lines were passed on."""
        status = await self._process.wait()
        # Do not wait for a grandchild that keeps the pipes open.
        await asyncio.wait(self._readers, timeout=1.0)
        for reader in self._readers:
            reader.cancel()
        self.kill()
        return status

    def terminate(self) -> None:
        """Ask the process to drain and exit."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Kill the process and its children."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)


async def start(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    announced: Callable[[Announcement], None],
    logged: Callable[[str], None],
) -> Child:
    """Start `baton`. Both callbacks run on the event loop, in order."""
    announcements, announcing = os.pipe()
    log, output = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "baton_cli.main",
            *arguments,
            f"--announce-fd={announcing}",
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **environment, "PYTHONUNBUFFERED": "1"},
            pass_fds=(announcing,),
            process_group=0,
        )
    except BaseException:
        os.close(announcements)
        os.close(log)
        raise
    finally:
        os.close(announcing)
        os.close(output)
    return Child(
        process,
        (
            asyncio.create_task(_read_announcements(await _reader(announcements), announced)),
            asyncio.create_task(_read_log(await _reader(log), logged)),
        ),
    )


async def _reader(descriptor: int) -> asyncio.StreamReader:
    """Read a pipe, which is closed at its end."""
    stream = asyncio.StreamReader(limit=LINE_LIMIT)
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb")
    )
    return stream


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent dies. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


async def _read_announcements(pipe: asyncio.StreamReader, announced: Callable[[Announcement], None]) -> None:
    async for line in pipe:
        with contextlib.suppress(msgspec.DecodeError):  # cut off by a kill
            announced(read(line))


async def _read_log(stream: asyncio.StreamReader, logged: Callable[[str], None]) -> None:
    while True:
        try:
            line = await stream.readline()
        except ValueError:  # over the limit; the stream dropped what it had
            line = b"(a line too long to show)\n"
        if not line:
            return
        logged(line.decode(errors="replace").rstrip())


KILL_AFTER_S = 10.0
"""Seconds beyond the time to drain after which a process that does not end is killed."""

Value = TypeVar("Value")

LAST_WORDS = 30
"""Log lines of a process to show if its start fails."""


class Member:
    """A supervised process, over all restarts."""

    def __init__(self, command: Command, watcher: Watcher) -> None:
        self.command = command
        self.url = ""
        """URL of its HTTP server; restarts keep it."""
        self.last_words: deque[str] = deque(maxlen=LAST_WORDS)
        self.starts = 0
        self._watcher = watcher
        self._port = command.port
        self._control_port = 0
        self._history = History()
        self._child: Child | None = None
        self._listening = asyncio.Event()
        self._ready = asyncio.Event()
        self._stopping = asyncio.Event()
        self._refusal = ""

    @property
    def name(self) -> str:
        return self.command.name

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._child.pid if self._child else None

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of the next start."""
        ports = [f"--port={self._port}"]
        if self.command.role == "prefill":
            ports.append(f"--control-port={self._control_port}")
        return (*self.command.arguments, *ports)

    async def listening(self) -> None:
        """Wait until `url` is known, which is long before a worker is ready."""
        await self._listening.wait()

    async def ready(self) -> None:
        await self._ready.wait()

    async def run(self) -> None:
        """Keep it running until `stop`. Raises SetupError if it ends before it was ever ready."""
        while not self._stopping.is_set():
            status = await self._once()
            self._ready.clear()
            if self._stopping.is_set():
                return
            self._history = self._history.ended(time.monotonic())
            delay = self._history.delay_s
            if delay is None:
                self._watcher.failed(self.name, list(self.last_words))
                raise SetupError(self._refusal or f"{self.name} ended during its start ({describe(status)}).")
            self._watcher.noted(
                self.name, f"{self.name} ended ({describe(status)}); restarting in {delay:g} s"
            )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    async def stop(self, seconds: float) -> None:
        """Stop the process, and kill it after `seconds`."""
        self._stopping.set()
        current = self._child
        if current is None:
            return
        current.terminate()
        try:
            await asyncio.wait_for(current.ended(), seconds)
        except TimeoutError:
            self._watcher.noted(self.name, f"{self.name} did not stop within {seconds:g} s and is killed")
            current.kill()

    def kill(self) -> None:
        """Kill the process."""
        self._stopping.set()
        if self._child is not None:
            self._child.kill()

    async def _once(self) -> int:
        self.starts += 1
        started = await start(self.arguments, self.command.environment, self._announced, self._logged)
        self._child = started
        if self._stopping.is_set():  # stopped during the start
            started.terminate()
        try:
            return await started.ended()
        finally:
            started.kill()
            self._child = None

    def _announced(self, announcement: Announcement) -> None:
        match announcement:
            case Listening(host=host, port=port):
                self._port = port
                self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
                self._listening.set()
            case Ready(control=control):
                if control:
                    self._control_port = int(control.rpartition(":")[2])
                self._history = self._history.ready(time.monotonic())
                self._ready.set()
            case Refused(reason=reason):
                self._refusal = f"{self.name}: {reason}"
            case Loading():
                self._watcher.loading(self.name, announcement)

    def _logged(self, line: str) -> None:
        self.last_words.append(line)
        self._watcher.logged(self.name, line)


class Watcher:
    """Receives logs and progress of the processes. This one ignores them."""

    def logged(self, name: str, line: str) -> None:
        """Receive a log line."""

    def noted(self, name: str, line: str) -> None:
        """Receive what the supervisor itself says about a process."""

    def loading(self, name: str, progress: Loading) -> None:
        """Receive the progress of a start."""

    def failed(self, name: str, last_words: list[str]) -> None:
        """Receive the last log lines of a process that ended before it was ready."""


class Supervisor:
    """The processes of one `baton up`."""

    def __init__(self, watcher: Watcher, drain_s: float) -> None:
        self.members: list[Member] = []
        self._watcher = watcher
        self._drain_s = drain_s
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def add(self, command: Command) -> Member:
        """Start a process."""
        member = Member(command, self._watcher)
        self.members.append(member)
        task = asyncio.create_task(member.run(), name=command.name)
        task.add_done_callback(self._ended)
        self._tasks.append(task)
        return member

    async def unless_failed(self, waiting_for: Coroutine[Any, Any, Value]) -> Value:
        """Wait for a result, or raise the error of a failed process."""
        waiting = asyncio.ensure_future(waiting_for)
        try:
            await asyncio.wait((waiting, self._failed), return_when=asyncio.FIRST_COMPLETED)
            if self._failed.done():
                self._failed.result()
            return await waiting
        finally:
            waiting.cancel()

    async def close(self) -> None:
        """Stop the router, then decode workers, then prefill workers."""
        for step in end_order([member.command.role for member in self.members]):
            await asyncio.gather(
                *(self.members[position].stop(self._drain_s + KILL_AFTER_S) for position in step)
            )
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self._failed.done():
            self._failed.cancel()
        elif not self._failed.cancelled():
            self._failed.exception()  # it was raised by `unless_failed`, or came during the end

    def kill(self) -> None:
        """Kill all processes."""
        for member in self.members:
            member.kill()

    def _ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self._failed.done():
            return
        error = task.exception()
        if error is not None:
            self._failed.set_exception(error)


class Interrupted(Exception):
    """A signal stopped the service."""


@contextlib.asynccontextmanager
async def supervise(watcher: Watcher, drain_s: float) -> AsyncIterator[Supervisor]:
    """
    Yield a supervisor, and stop all its processes at the end.

    Ctrl-C, SIGTERM and SIGHUP end the body with Interrupted; a second signal kills all processes. SIGHUP
    stays ignored under nohup.
    """
    supervisor = Supervisor(watcher, drain_s)
    with _signals(supervisor) as interrupted:
        try:
            yield supervisor
        except asyncio.CancelledError:
            if not interrupted.is_set():
                raise
            raise Interrupted from None
        except SetupError:
            supervisor.kill()  # no request runs yet
            raise
        finally:
            try:
                await supervisor.close()
            finally:
                supervisor.kill()


@contextlib.contextmanager
def _signals(supervisor: Supervisor) -> Iterator[asyncio.Event]:
    interrupted = asyncio.Event()
    loop, body = asyncio.get_running_loop(), asyncio.current_task()
    assert body is not None

    def signalled() -> None:
        if interrupted.is_set():
            supervisor.kill()
        else:
            interrupted.set()
            body.cancel()

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # not under nohup
        numbers.append(signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, signalled)
    try:
        yield interrupted
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def describe(status: int) -> str:
    """Return an exit status of asyncio in words. Negative values are signals."""
    return f"killed by signal {-status}" if status < 0 else f"exit status {status}"


FIRST_DELAY_S = 0.5
LONGEST_DELAY_S = 30.0

CALM_S = 60.0
"""Time of being ready after which earlier crashes no longer count."""


@dataclass(frozen=True, slots=True)
class History:
    """The restart history of a process."""

    was_ready: bool = False
    ready_at: float | None = None
    """Monotonic time at which the current start became ready."""
    crashes: int = 0
    """Consecutive crashes."""

    def ready(self, now: float) -> History:
        return replace(self, was_ready=True, ready_at=now)

    def ended(self, now: float) -> History:
        calm = self.ready_at is not None and now - self.ready_at >= CALM_S
        return replace(self, ready_at=None, crashes=1 if calm else self.crashes + 1)

    @property
    def delay_s(self) -> float | None:
        """Delay of the next start in seconds. None: do not restart."""
        if not self.was_ready:
            return None
        return float(min(LONGEST_DELAY_S, FIRST_DELAY_S * 2 ** min(self.crashes - 1, 16)))


def threads_each(cores: int, workers: int) -> int:
    """Return the threads per worker, so that all workers together fit the cores."""
    return max(1, cores // max(1, workers))


def end_order(roles: Sequence[str]) -> list[list[int]]:
    """
    Return the positions of processes by step of the shutdown.

    The router stops first, so that no new requests arrive. Decode workers stop before the prefill workers
    that their queued requests need.

    >>> end_order(["prefill", "decode", "router", "decode"])
    [[2], [1, 3], [0]]
    """
    steps = (("router",), ("decode", "both"), ("prefill",))
    order = [[position for position, role in enumerate(roles) if role in step] for step in steps]
    return [positions for positions in order if positions]
