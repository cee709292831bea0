"""
The thread that owns a transfer agent and carries out every read.

An agent is not for several threads, and nothing of it moves unless somebody calls into it. So everything
else hands this thread commands. It sleeps on its queue while nothing is under way, and looks at the agent
again after 50 us to 1 ms while a read is, or while a peer may be reading from here (`serve`).

A read is over when each of its slices has left the state "in progress", and not before: a slice that was
given up or released goes on writing. For the same reason a peer is removed only after its last read. One
that was let go but lives stays known, for it may come back: NIXL leaks a socket for every living peer that
is removed.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from baton_api.errors import TransferFailed
from baton_api.messages import PoolLayout
from baton_engine.transfer import Pulled
from baton_engine.transfer.reads import Settlement

log = logging.getLogger(__name__)

Result = TypeVar("Result")

WINDOW = 4
"""Slices of one read under way at a time, so that a network always has the next one to work on."""

LEAST_PAUSE_S = 50e-6
MOST_PAUSE_S = 1e-3

KNOWN_LIMIT = 64
"""Peers that nobody uses and that are remembered nevertheless; the oldest goes first."""

SAMPLES = 5
"""Further reads of one block by which a near peer's transport is told, before its first read is over. The
first over a connection that is still being set up can go the wrong way."""

BUSY_S = 20e-6
"""A look at the agent that took more CPU than this, per thing looked at, has moved something: look again
soon. An idle one takes 3 to 10 us."""


class AgentError(Exception):
    """The agent refused, or what it did failed."""


class Agent(Protocol):
    """What a reader needs of NIXL. Every method may raise AgentError but the last five."""

    def add(self, metadata: bytes) -> str:
        """Make a peer known, again if it is; its name."""
        ...

    def prepare(self, peer: str, pool: PoolLayout) -> Any:
        """The peer's blocks, in a form that `make` takes."""
        ...

    def make(self, theirs: Any, remote: Sequence[int], local: Sequence[int]) -> Any:
        """A read that has not begun."""
        ...

    def post(self, handle: Any) -> bool:
        """Begin it; whether it is done already."""
        ...

    def done(self, handle: Any) -> bool:
        """Whether it is done; an error says that it failed and has left "in progress" too."""
        ...

    def release(self, handle: Any) -> None: ...

    def remove(self, peer: str, blocks: Any) -> None: ...

    def progress(self) -> None:
        """Answer peers that are reading from here."""
        ...

    def transport(self, pool: PoolLayout, copied: bool) -> str:
        """By what a peer with `pool` is read, given whether it is near and done where it is posted."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Read:
    """One pull, from its first slice to the moment when nothing of it can write any more."""

    peer: str
    bytes: int
    end: Settlement
    waiting: deque[tuple[list[int], list[int]]]
    sample: tuple[list[int], list[int]]
    """One block of it, read again to see by which transport a new peer is read."""
    posted: list[Any] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    error: str = ""


@dataclass(slots=True)
class _Remote:
    """A peer as the agent knows it."""

    name: str
    epoch: str
    pool: PoolLayout
    blocks: Any
    uses: int = 1
    """Connections that were not let go."""
    dead: bool = False
    near: bool = False
    """UCX may copy straight from its memory."""
    wired: bool = False
    """A slice has come through. Those posted before tell nothing of the transport."""
    posts: int = 0
    inline: int = 0
    """Of `posts`, those that were done when the call returned."""
    samples: int = 0

    @property
    def copied(self) -> bool:
        """Most reads, not each: one over TCP can by chance be answered within the call."""
        return self.near and 2 * self.inline > self.posts


class BlockReader:
    """`post`, `call`, `stop` and `join` are for other threads; the rest is what they have called on this."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._remotes: dict[str, _Remote] = {}
        self._reads: list[Read] = []
        self._serving = 0
        self._stopping = False
        self._pause = LEAST_PAUSE_S
        self._thread = threading.Thread(target=self._run, name="transfer", daemon=True)
        self._thread.start()

    def post(self, command: Callable[[], None]) -> None:
        self._commands.put(command)

    async def call(self, function: Callable[[], Result]) -> Result:
        """What `function` returns or raises on the thread."""
        answer: Future[Result] = Future()
        answer.set_running_or_notify_cancel()

        def command() -> None:
            try:
                answer.set_result(function())
            except Exception as error:
                answer.set_exception(error)

        self.post(command)
        return await asyncio.wrap_future(answer)

    def stop(self) -> None:
        """Post nothing more; end when the last read is over."""
        self.post(self._stop)

    def join(self, seconds: float) -> bool:
        """Whether the thread ended in time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def connect(self, metadata: bytes, pool: PoolLayout, epoch: str, near: bool) -> str:
        """The peer's name. Raises TransferFailed."""
        self._agent.progress()  # peers that ended meanwhile give back their sockets
        try:
            name = self._agent.add(metadata)
        except AgentError as error:
            raise TransferFailed(f"The peer cannot be reached: {error}.") from error
        existing = self._remotes.get(name)
        if existing is None:
            try:
                blocks = self._agent.prepare(name, pool)
            except AgentError as error:
                self._agent.remove(name, None)
                raise TransferFailed(f"The pool that {name} announced cannot be read: {error}.") from error
            self._forget_oldest()
            self._remotes[name] = _Remote(name, epoch, pool, blocks, near=near)
        elif existing.dead or (existing.epoch, existing.pool) != (epoch, pool):
            raise TransferFailed(f"The peer {name} is known as one that failed or was another start.")
        else:
            existing.uses += 1
        return name

    def disconnect(self, name: str) -> None:
        remote = self._remotes.get(name)
        if remote is not None and remote.uses > 0:
            remote.uses -= 1

    def serve(self, change: int) -> None:
        self._serving += change
        self._pause = LEAST_PAUSE_S

    def begin(self, read: Read) -> None:
        remote = self._remotes.get(read.peer)
        if remote is None or remote.dead or remote.uses == 0 or self._stopping:
            read.end.fail(TransferFailed(f"The peer {read.peer} is gone."))
            return
        self._reads.append(read)
        self._pause = LEAST_PAUSE_S

    def _run(self) -> None:
        while self._reads or not self._stopping:
            self._take_commands()
            try:
                self._look()
            except Exception:
                log.exception("The transfer thread met an error that it does not know.")
                self._pause = MOST_PAUSE_S
        for remote in list(self._remotes.values()):
            self._forget(remote)
        self._agent.close()

    def _take_commands(self) -> None:
        """Wait for one if nothing is under way, for the pause if something is; then run all there are."""
        wait = self._pause if self._reads or self._serving else None
        try:
            self._commands.get(timeout=wait)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _look(self) -> None:
        """Move on whatever can move, and decide when to look again."""
        begin = time.thread_time()
        looked = 1
        moved = False
        if self._serving:
            self._agent.progress()
        for read in self._reads.copy():
            looked += len(read.posted)
            moved |= self._advance(read, self._remotes[read.peer])
        if moved:
            self._pause = 0.0
        elif time.thread_time() - begin > looked * BUSY_S:
            self._pause = LEAST_PAUSE_S
        else:
            self._pause = min(max(2 * self._pause, LEAST_PAUSE_S), MOST_PAUSE_S)

    def _advance(self, read: Read, remote: _Remote) -> bool:
        """Take what is over, post what may be posted; whether anything was over."""
        before = len(read.posted)
        read.posted = [handle for handle in read.posted if not self._left(handle, read, remote)]
        moved = len(read.posted) < before
        if remote.dead and read.waiting:
            self._give_up(read, remote, "the peer failed")
        while read.waiting and len(read.posted) < WINDOW:
            if self._post(read.waiting.popleft(), read, remote):
                moved = True
                break  # it was copied within the call: the others' turn
        if not read.posted and not read.waiting:
            self._finish(read, remote)
        return moved

    def _left(self, handle: Any, read: Read, remote: _Remote) -> bool:
        """Whether the slice has left "in progress", with or without success."""
        try:
            if not self._agent.done(handle):
                return False
            remote.wired = True
        except AgentError as error:
            self._give_up(read, remote, str(error))
        self._agent.release(handle)
        return True

    def _post(self, piece: tuple[list[int], list[int]], read: Read, remote: _Remote) -> bool:
        """Whether the read of `piece` was over when the call returned."""
        try:
            handle = self._agent.make(remote.blocks, *piece)
        except AgentError as error:
            self._give_up(read, remote, str(error))
            return True
        try:
            inline = self._agent.post(handle)
        except AgentError as error:
            self._give_up(read, remote, str(error))
            self._agent.release(handle)
            return True
        if inline or remote.wired:
            remote.posts += 1
            remote.inline += inline
        if inline:
            remote.wired = True
            self._agent.release(handle)
        else:
            read.posted.append(handle)
        return inline

    def _give_up(self, read: Read, remote: _Remote, reason: str) -> None:
        """Post nothing more to the peer. What is under way leaves "in progress" by itself, with an error."""
        read.error = read.error or f"Reading from {remote.name} failed: {reason}."
        read.waiting.clear()
        remote.dead = True

    def _finish(self, read: Read, remote: _Remote) -> None:
        read.seconds = read.seconds or time.perf_counter() - read.begun
        if not read.error and remote.near and remote.samples < SAMPLES and read.bytes:
            remote.samples += 1
            read.waiting.append(read.sample)
            return
        self._reads.remove(read)
        if remote.dead and all(other.peer != remote.name for other in self._reads):
            self._forget(remote)  # before the end is told, so that whoever hears it can connect anew
        if read.error:
            read.end.fail(TransferFailed(read.error))
        else:
            transport = self._agent.transport(remote.pool, remote.copied)
            read.end.succeed(Pulled(bytes=read.bytes, seconds=read.seconds, transport=transport))

    def _forget(self, remote: _Remote) -> None:
        del self._remotes[remote.name]
        self._agent.remove(remote.name, remote.blocks)

    def _forget_oldest(self) -> None:
        read = {read.peer for read in self._reads}
        unused = [remote for remote in self._remotes.values() if not remote.uses and remote.name not in read]
        for remote in unused[: max(0, len(unused) - KNOWN_LIMIT + 1)]:
            self._forget(remote)

    def _stop(self) -> None:
        self._stopping = True
        for read in self._reads:
            if read.waiting:
                read.error = read.error or "The worker is closing."
                read.waiting.clear()
