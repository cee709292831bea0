"""
The thread that owns a transfer agent and performs all reads.

An agent is not thread-safe and makes progress only in calls, so other threads send commands to this thread.
It waits on its queue while idle. During a read, or while peers may read from this worker (`serve`), it polls
the agent every 50 us to 1 ms.

A read ends when all its slices have left the state "in progress", because an abandoned or released slice
continues to write. For the same reason, a peer is removed only after its last read. A disconnected peer that
is alive stays registered, because NIXL leaks a socket for every living peer that is removed.
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
from baton_engine.transfer.reads import PullFuture

log = logging.getLogger(__name__)

Result = TypeVar("Result")

WINDOW = 16
"""Maximum number of concurrent slices of a read, so that the network is always busy. Beside a busy Python
thread, slices are posted only when this one gets the GIL, so they must last from one turn to the next."""

LEAST_PAUSE_S = 50e-6
MOST_PAUSE_S = 1e-3

KNOWN_LIMIT = 64
"""Maximum number of unused peers that stay registered. The oldest one is removed first."""

SAMPLES = 5
"""Number of additional single-block reads that determine the transport of a near peer before its first read
ends. The first read over a new connection can use another transport."""

BUSY_S = 20e-6
"""CPU seconds per polled item that indicate progress, so that the agent is polled again soon. Idle polling
takes 3 to 10 us."""


class AgentError(Exception):
    """A call of the agent, or its operation, failed."""


class Agent(Protocol):
    """Interface to NIXL. All methods except the last five may raise AgentError."""

    def add(self, metadata: bytes) -> str:
        """Register a peer, which may be registered already. Returns its name."""
        ...

    def prepare(self, peer: str, pools: tuple[PoolLayout, ...]) -> Any:
        """Prepare the peer's blocks for `make`."""
        ...

    def make(self, theirs: Any, remote: Sequence[int], local: Sequence[int]) -> Any:
        """Create a read without starting it."""
        ...

    def post(self, handle: Any) -> bool:
        """Start a read. Returns whether it is complete."""
        ...

    def done(self, handle: Any) -> bool:
        """Return whether a read is complete. After AgentError the read has left "in progress" too."""
        ...

    def release(self, handle: Any) -> None: ...

    def remove(self, peer: str, blocks: Any) -> None: ...

    def progress(self) -> None:
        """Answer peers that read from this worker."""
        ...

    def transport(self, pools: tuple[PoolLayout, ...], copied: bool) -> str:
        """Return the transport of reads from `pools`. `copied`: reads complete in the posting call."""
        ...

    def close(self) -> None: ...


@dataclass(slots=True, kw_only=True)
class Read:
    """One read, from its first slice until no slice can write any more."""

    peer: str
    bytes: int
    end: PullFuture
    waiting: deque[tuple[list[int], list[int]]]
    sample: tuple[list[int], list[int]]
    """One block that is read again to determine the transport."""
    posted: list[Any] = field(default_factory=list)
    begun: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0
    error: str = ""


@dataclass(slots=True)
class _Remote:
    """A registered peer."""

    name: str
    epoch: str
    pools: tuple[PoolLayout, ...]
    blocks: Any
    uses: int = 1
    """Number of open connections."""
    dead: bool = False
    near: bool = False
    """Whether UCX can copy directly from the peer's memory."""
    wired: bool = False
    """Whether a slice was completed. Earlier posts do not indicate the transport."""
    posts: int = 0
    inline: int = 0
    """Number of posts that were complete when the call returned."""
    samples: int = 0

    @property
    def copied(self) -> bool:
        """Whether most reads complete within the call. Single reads over TCP can do so by chance."""
        return self.near and 2 * self.inline > self.posts


class BlockReader:
    """
    Owner of an agent.

    Other threads use `post`, `call`, `submit`, `stop` and `join`; the rest runs on its thread.
    """

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
        """Run `function` on the thread and return its result."""
        return await asyncio.wrap_future(self.submit(function))

    def submit(self, function: Callable[[], Result]) -> Future[Result]:
        """Run `function` on the thread."""
        answer: Future[Result] = Future()
        answer.set_running_or_notify_cancel()

        def command() -> None:
            try:
                answer.set_result(function())
            except Exception as error:
                answer.set_exception(error)

        self.post(command)
        return answer

    def stop(self) -> None:
        """Start no further slices, and stop the thread after the last read."""
        self.post(self._stop)

    def join(self, seconds: float) -> bool:
        """Wait for the thread. Returns whether it has ended."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def connect(self, metadata: bytes, pools: tuple[PoolLayout, ...], epoch: str, near: bool) -> str:
        """Connect to a peer and return its name. Raises TransferFailed."""
        self._agent.progress()  # releases the sockets of closed peers
        try:
            name = self._agent.add(metadata)
        except AgentError as error:
            raise TransferFailed(f"Cannot connect to the peer: {error}.") from error
        existing = self._remotes.get(name)
        if existing is None:
            try:
                blocks = self._agent.prepare(name, pools)
            except AgentError as error:
                self._agent.remove(name, None)
                raise TransferFailed(f"Cannot read the pools that {name} announced: {error}.") from error
            self._forget_oldest()
            self._remotes[name] = _Remote(name, epoch, pools, blocks, near=near)
        elif existing.dead or (existing.epoch, existing.pools) != (epoch, pools):
            raise TransferFailed(f"The peer {name} has failed before, or is from an earlier start.")
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
                self._poll()
            except Exception:
                log.exception("Unexpected error in the transfer thread.")
                self._pause = MOST_PAUSE_S
        for remote in list(self._remotes.values()):
            self._forget(remote)
        self._agent.close()

    def _take_commands(self) -> None:
        """Run all queued commands. Waits for the first one, during reads for at most the pause."""
        wait = self._pause if self._reads or self._serving else None
        try:
            self._commands.get(timeout=wait)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            return

    def _poll(self) -> None:
        """Advance all reads, and determine the pause until the next poll."""
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
        """Process completed slices and post further ones. Returns whether any slice was completed."""
        before = len(read.posted)
        read.posted = [handle for handle in read.posted if not self._left(handle, read, remote)]
        moved = len(read.posted) < before
        if remote.dead and read.waiting:
            self._give_up(read, remote, "the peer failed")
        while read.waiting and len(read.posted) < WINDOW:
            if self._post(read.waiting.popleft(), read, remote):
                moved = True
                break  # copied within the call; continue with other reads
        if not read.posted and not read.waiting:
            self._finish(read, remote)
        return moved

    def _left(self, handle: Any, read: Read, remote: _Remote) -> bool:
        """Return whether the slice has left "in progress", with or without success."""
        try:
            if not self._agent.done(handle):
                return False
            remote.wired = True
        except AgentError as error:
            self._give_up(read, remote, str(error))
        self._agent.release(handle)
        return True

    def _post(self, piece: tuple[list[int], list[int]], read: Read, remote: _Remote) -> bool:
        """Post the read of `piece`. Returns whether it was complete when the call returned."""
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
        """Post no further slices to the peer. Slices in progress end by themselves, with an error."""
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
            self._forget(remote)  # before the result is set, so that the caller can connect again
        if read.error:
            read.end.fail(TransferFailed(read.error))
        else:
            transport = self._agent.transport(remote.pools, remote.copied)
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
