"""
Templates: processes that have imported what others need, from which `baton up` forks them. Linux only.

Importing torch takes most of the start of a worker, and a fork does it once for all. The template begins
while the command line is read. It has one thread, no event loop and no library of a transport, so a fork
copies nothing that is in use. Each process is forked twice, and becomes a child of `baton up`, which waits
for it as for any process (`PR_SET_CHILD_SUBREAPER`, prctl(2)). Drivers of accelerators do not support forks.
Templates stay until the service ends, so a restarted process is a fork too. If a template is missing or has
ended, processes are started without it.
"""

from __future__ import annotations

import asyncio
import ctypes
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from baton_cli.child import die_with_parent

PR_SET_CHILD_SUBREAPER = 36
MESSAGE_BYTES = 1 << 20
REPARENTING_S = 0.001
"""Between two looks at the parent of a new process."""

WORKERS = ("baton_cli.options", "baton_decode.main", "baton_prefill.main")
"""Modules of the template for workers."""
ROUTERS = ("baton_cli.options", "baton_router.main")
"""Modules of the template for routers. Its imports take as long as the rest of those for workers."""

ACCELERATORS = ("/dev/nvidiactl", "/dev/kfd")
"""Files of the drivers for GPUs of NVIDIA and AMD."""

TITLE = " " * 4096
"""An argument of the template that takes the space where the kernel finds the command line of its forks."""
ARG_START, ARG_END = 47, 48
"""Fields of `/proc/PID/stat`, from 0 (proc_pid_stat(5))."""


class ForkRequest(msgspec.Struct, frozen=True):
    """A process to fork. Its output and its announcements go to the two descriptors that come with it."""

    arguments: list[str]
    """After `baton`. The last descriptor is added as --announce-fd."""
    environment: dict[str, str]
    """The whole environment."""
    parent: int
    """Process id of the supervisor. A process whose parent is another one ends."""


class Forked:
    """A forked process, with the part of `asyncio.subprocess.Process` that `Child` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._descriptor = os.pidfd_open(pid)
        asyncio.get_running_loop().add_reader(self._descriptor, self._end)

    async def wait(self) -> int:
        """Return the exit status; -N after signal N."""
        return await asyncio.shield(self._status)

    def terminate(self) -> None:
        """Send SIGTERM. Raises ProcessLookupError if the process has ended."""
        if self._status.done():
            raise ProcessLookupError(self.pid)
        os.kill(self.pid, signal.SIGTERM)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._descriptor)
        os.close(self._descriptor)
        _, status = os.waitpid(self.pid, 0)
        if not self._status.done():
            self._status.set_result(os.waitstatus_to_exitcode(status))


class Template:
    """The template, seen from its parent."""

    def __init__(self, modules: Sequence[str]) -> None:
        """Start it. Returns immediately. Raises OSError."""
        self._asking = asyncio.Lock()
        self._connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                (sys.executable, "-m", __name__, str(theirs.fileno()), *modules, TITLE),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,  # an error here comes again, visibly, in a process of its own
                # The threads of numpy's BLAS would not be in the forks.
                env={**os.environ, "PYTHONUNBUFFERED": "1", "OPENBLAS_NUM_THREADS": "1"},
                pass_fds=(theirs.fileno(),),
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    async def fork(
        self, arguments: Sequence[str], environment: Mapping[str, str], output: int, announcing: int
    ) -> Forked | None:
        """Fork `baton` with these arguments, once the template is ready. None: it has ended."""
        request = ForkRequest(list(arguments), dict(environment), os.getpid())
        loop = asyncio.get_running_loop()
        async with self._asking:
            _adopting.add(self)
            _set_adoption()
            try:
                socket.send_fds(self._connection, [msgspec.json.encode(request)], [output, announcing])
                answer = await loop.sock_recv(self._connection, MESSAGE_BYTES)
            except OSError:
                return None
            except BaseException:
                self.close()  # the next answer would be this one's
                raise
            finally:
                _adopting.discard(self)
                _set_adoption()
        return Forked(int(answer)) if answer else None

    def close(self) -> None:
        """End the template. Its forks stay."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


_adopting: set[Template] = set()
"""Templates that fork now."""


def _set_adoption() -> None:
    """Adopt the new process of a fork. At other times, orphans of ended workers go to the system's init."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(bool(_adopting)))


_begun: dict[tuple[str, ...], Template] = {}


def accelerated() -> bool:
    """Whether this machine has the driver of a GPU."""
    return any(Path(path).exists() for path in ACCELERATORS)


def begin(modules: tuple[str, ...]) -> Template | None:
    """Start the template with these modules, or return the one that runs. None: it cannot be used."""
    if sys.platform != "linux" or (modules is WORKERS and accelerated()):
        return None
    if modules not in _begun:
        _begun[modules] = Template(modules)
    return _begun[modules]


def end() -> None:
    """End all templates."""
    while _begun:
        _begun.popitem()[1].close()


def main() -> None:
    """Run the template until its parent closes the connection, or, in a fork, the command."""
    die_with_parent()
    from baton_cli import main as baton
    from baton_cli.processes import uncollected

    with uncollected():
        for module in sys.argv[2:-1]:
            importlib.import_module(module)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        arguments = _serve(connection)
    if arguments is not None:
        baton.main(arguments)


def _serve(connection: socket.socket) -> list[str] | None:
    """Fork for each request. Returns the arguments in a fork, and None in the template at the end."""
    if len(os.listdir("/proc/self/task")) > 1:
        return None  # a fork copies one thread only, and locks that the others hold
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES, 2)
        if not message:
            return None
        request = msgspec.json.decode(message, type=ForkRequest)
        pid = _fork()
        if not pid:
            return _become(request, *descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            connection.send(b"%d" % pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)  # its supervisor has gone
            return None


def _fork() -> int:
    """Fork a process whose parent has ended. Returns its id, and 0 in it."""
    reading, writing = os.pipe()
    between = os.fork()
    if between:
        os.close(writing)
        with open(reading, "rb") as pipe:
            pid = int(pipe.read())
        os.waitpid(between, 0)
        return pid
    between = os.getpid()
    pid = os.fork()
    if pid:
        os.setpgid(pid, pid)  # before the supervisor can kill the group
        os.write(writing, b"%d" % pid)
        os._exit(0)
    os.close(reading)
    os.close(writing)
    while os.getppid() == between:
        time.sleep(REPARENTING_S)
    return 0


def _become(request: ForkRequest, output: int, announcing: int) -> list[str]:
    """Make this fork the requested process. Returns its arguments."""
    if os.getppid() != request.parent:
        os._exit(1)
    for standard in (1, 2):
        os.dup2(output, standard)
    os.close(output)
    os.environ.clear()
    os.environ.update(request.environment)
    arguments = [*request.arguments, f"--announce-fd={announcing}"]
    _entitle((sys.executable, "-m", "baton_cli.main", *arguments))
    sys.argv[1:] = arguments
    return arguments


def _entitle(words: Sequence[str]) -> None:
    """Show `words` as the command line of this process, as far as the template's has space."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = (int(fields[number - 2]) for number in (ARG_START, ARG_END))
    line = b"\0".join(os.fsencode(word) for word in words)[: end - start - 1]
    ctypes.memmove(start, line.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    main()
