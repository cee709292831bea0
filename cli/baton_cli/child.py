"""
A supervised process: start, announcements and end.

It runs in its own process group, so that Ctrl-C in a terminal reaches the supervisor only. The kernel
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from baton_api.announcements import Announcement, read

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
