"""
Rank 0's side of tensor parallelism: starts the other ranks, sends them its passes, and notices failures.

A rank that ends, fails or hangs ends the worker, because its part of the KV cache is lost. The other ranks
are then killed, and the operations of rank 0's device aborted, so that it does not wait for them.
Transfers reach the blocks of the other ranks by `RankPools`, which orders their agents.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor

from baton_api.errors import SetupError, TransferFailed
from baton_api.messages import PoolLayout
from baton_engine.batch import Batch
from baton_engine.kv.cache import KVCache, MemoryBudget
from baton_engine.model.decoder import Decoder
from baton_engine.model.group import Group, RankFailed
from baton_engine.model.lora import LoraWeights
from baton_engine.parallel.messages import (
    Allocate,
    Allocated,
    AnyMessage,
    AnyOrder,
    AnyPass,
    AnyReply,
    Channel,
    ClosePool,
    Connect,
    Connected,
    ConnectPeer,
    DisconnectPeer,
    Forward,
    Loaded,
    OpenPool,
    OrderFailed,
    OrderReply,
    Project,
    PullBlocks,
    RankError,
    ServePeers,
    Start,
    SumBlocks,
    frame,
)
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.spec import ModelSpec
from baton_engine.streams import streams_of
from baton_engine.transfer import Pulled

log = logging.getLogger(__name__)

LOOKS = 4
"""Times per limit that the thread looks at the wait."""


class PassWatch:
    """
    Calls a function, once, if a wait takes longer than the limit, and up to a quarter of it later.

    torch's watchdog of NCCL does so for operations that it launches, but a replayed graph does not pass it.
    A thread looks from time to time, so that a wait itself costs no system call.
    """

    def __init__(
        self, seconds: float, on_late: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._seconds = seconds
        self._on_late = on_late
        self._clock = clock
        self._since: dict[int, float] = {}
        """Begin of each wait, by its thread."""
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pass-watch", daemon=True)
        self._thread.start()

    @contextmanager
    def limit(self) -> Iterator[None]:
        """Return a context in which a thread waits for the device."""
        thread = threading.get_ident()
        with self._lock:
            self._since[thread] = self._clock()
        try:
            yield
        finally:
            with self._lock:
                del self._since[thread]

    def close(self) -> None:
        """End the thread. `on_late` may call it."""
        self._closed.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._seconds / LOOKS):
            with self._lock:
                since = min(self._since.values(), default=None)
            if since is not None and self._clock() - since > self._seconds:
                self._on_late()
                return


Expected = TypeVar("Expected")
Result = TypeVar("Result")

TIMEOUT_S = 60.0
"""Maximum seconds that a rank waits for another one in an operation. All ranks compute equal parts."""

REASON_S = 2.0
"""Seconds to wait for the reason after an operation failed: its error only says that a connection ended."""


class RankProcess(Protocol):
    """The part of `subprocess.Popen` that rank 0 uses."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None:
        """End the process at once. It may have ended."""
        ...

    def wait(self) -> int:
        """Wait until it has ended. Returns its exit code, or the negative number of a signal."""
        ...


def spawn(end: socket.socket) -> RankProcess:
    """Start the process of a rank, which inherits its `end` of the socket pair."""
    return subprocess.Popen([sys.executable, "-m", "baton_engine.parallel.rank"], stdin=end.fileno())


class Ranks:
    """The ranks of one worker other than 0, as processes. `close` ends them."""

    def __init__(
        self,
        start: Start,
        devices: list[str],
        spawn: Callable[[socket.socket], RankProcess] = spawn,
    ) -> None:
        """
        Start the ranks. `start` is the message to rank 1; `devices` are those of all ranks.

        `spawn` copies the socket that it gets.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="baton-ranks-")
        self._store = Path(self._folder.name) / "store"
        self._timeout_s = start.timeout_s
        self._failure = ""
        self._failed = threading.Event()
        self._closing = False
        self._on_failure: Callable[[str], None] | None = None
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._others: list[_Process] = []
        self._pass_watch = PassWatch(self._timeout_s, self._late)
        self._numbers = itertools.count(1)
        start = msgspec.structs.replace(start, store=str(self._store))
        try:
            for rank in range(1, start.size):
                other = _Process(rank, self._timeout_s, self._fail, spawn)
                self._others.append(other)
                other.start(msgspec.structs.replace(start, rank=rank, device=devices[rank]))
        except BaseException:
            self.close()
            raise

    @property
    def others(self) -> int:
        """Number of ranks other than 0."""
        return len(self._others)

    def load(self) -> list[Loaded]:
        """Wait until all ranks have loaded their weights. Raises SetupError with a rank's reason."""
        return [self._receive(other, Loaded) for other in self._others]

    def replies(self, kind: type[Expected]) -> list[Expected]:
        """Wait for the replies of all other ranks to a `post`. Raises SetupError."""
        return [self._receive(other, kind, self._timeout_s) for other in self._others]

    def connect(self, message: Connect, group: Group, measure: Callable[[], int]) -> list[Connected]:
        """
        Connect `group` to all other ranks, while rank 0's part of the measurement is `measure`.

        Returns the replies of all ranks. Raises SetupError.
        """
        try:
            self.post(message)
            group.connect(self._store, self._timeout_s)
            with self._lock:
                self._group = group
            if self._failed.is_set():  # before there was a group whose operations could be ended
                raise RuntimeError("a rank has failed")
            rank0 = Connected(working=measure(), free=None)
        except (OSError, RuntimeError) as error:
            self._failed.wait(REASON_S)
            raise SetupError(f"Tensor parallelism cannot start: {self._failure or error}") from error
        return [rank0, *(self._receive(other, Connected) for other in self._others)]

    def allocate(self, blocks: int, dtype: torch.dtype) -> None:
        """Allocate the KV blocks of all other ranks. Raises SetupError."""
        try:
            self.post(Allocate(blocks=blocks, dtype=_name(dtype)))
        except OSError as error:
            raise SetupError(f"Tensor parallelism cannot start: a rank has ended: {error}") from error
        for other in self._others:
            self._receive(other, Allocated)

    def order(self, order: AnyOrder) -> list[Future[AnyReply]]:
        """Send `order` with a number of its own. The futures fail with TransferFailed if a rank ends."""
        order = msgspec.structs.replace(order, number=next(self._numbers))
        futures = [other.replies_to(order.number) for other in self._others]
        try:
            self.post(order)
        except OSError as error:
            self._fail(f"a rank does not read its orders: {error}")
        return futures

    def watch(self, on_failure: Callable[[str], None]) -> None:
        """Call `on_failure` with the reason if a rank fails, at once if one has failed. From any thread."""
        with self._lock:
            self._on_failure = on_failure
        if self._failed.is_set():
            on_failure(self._failure)

    def launch(self, message: AnyPass, launch_part: Callable[[], Result]) -> Result:
        """
        Send `message` to all other ranks, and launch rank 0's part. Raises RankFailed.

        The result counts only once an event behind it has been waited for in `waiting`. Rank 0's last
        operation is with all ranks.
        """
        with self._failing():
            self.post(message)
            return launch_part()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context in which a thread waits for rank 0's device. Raises RankFailed."""
        with self._failing():
            with self._pass_watch.limit():
                yield
            if self._failed.is_set():
                raise RuntimeError("operations on the device were aborted")

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """After an error the ranks are at different operations, so no later pass can be computed."""
        try:
            yield
        except Exception as error:
            self._failed.wait(REASON_S)
            self._fail(f"a rank did not answer within {self._timeout_s:g} s, or rank 0 failed: {error}")
            raise RankFailed(f"Tensor parallelism failed: {self._failure}") from error

    def close(self) -> None:
        """End all ranks."""
        self._closing = True
        self._pass_watch.close()
        for other in self._others:
            other.end()
        self._folder.cleanup()

    def post(self, message: AnyMessage) -> None:
        """Send `message` to all other ranks. Raises OSError if one has ended, or does not read."""
        encoded = frame(message)
        for other in self._others:
            other.channel.send_frame(encoded)

    def _receive(self, other: _Process, kind: type[Expected], timeout_s: float | None = None) -> Expected:
        try:
            reply = other.replies.get(timeout=timeout_s)
        except queue.Empty:
            self._fail(f"rank {other.rank} did not answer within {timeout_s:g} s")
            reply = other.replies.get()  # it was killed
        if not isinstance(reply, kind):
            raise SetupError(f"Tensor parallelism cannot start: {self._failure or reply}")
        return reply

    def _late(self) -> None:
        self._fail(f"a rank did not answer within {self._timeout_s:g} s")

    def _fail(self, reason: str) -> None:
        """Record the first reason, kill the ranks, and end what rank 0's device waits for."""
        with self._lock:
            if self._closing or self._failed.is_set():
                return
            self._failure, on_failure = reason, self._on_failure
            self._failed.set()
        log.critical("Tensor parallelism failed: %s", reason)
        for other in self._others:
            other.kill()
        if self._group is not None:
            # It waits until the graphs are freed, so nothing waits for it.
            threading.Thread(target=self._group.abort, name="rank-abort", daemon=True).start()
        if on_failure is not None:
            on_failure(reason)


class _Process:
    """The process of one rank, with a thread that reads its replies."""

    def __init__(
        self,
        rank: int,
        timeout_s: float,
        on_failure: Callable[[str], None],
        spawn: Callable[[socket.socket], RankProcess],
    ) -> None:
        self.rank = rank
        self.replies: queue.SimpleQueue[AnyMessage] = queue.SimpleQueue()
        """The last one is `RankError`."""
        self._orders: dict[int, Future[AnyReply]] = {}
        """Without reply."""
        self._ended = ""
        """Why there are no further replies."""
        self._lock = threading.Lock()
        self._on_failure = on_failure
        own, other = socket.socketpair()
        # A stopped rank does not read. Only sending has a timeout: replies may take any time.
        own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(timeout_s) or 1, 0))
        self.channel = Channel(own)
        with other:
            self._process = spawn(other)
        self._thread = threading.Thread(target=self._listen, name=f"rank-{rank}", daemon=True)

    def start(self, message: Start) -> None:
        self._thread.start()
        self.channel.send(message)

    def replies_to(self, number: int) -> Future[AnyReply]:
        """Return the future for the reply to an order that is about to be sent."""
        future: Future[AnyReply] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if not self._ended:
                self._orders[number] = future
                return future
        future.set_exception(TransferFailed(f"Tensor parallelism failed: {self._ended}"))
        return future

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> None:
        """Kill the process: it has nothing to save. Wait until it has ended."""
        self._process.kill()
        self._process.wait()
        if self._thread.ident is not None:
            self._thread.join()
        self.channel.close()

    def _listen(self) -> None:
        reason = ""
        with contextlib.suppress(EOFError):
            while True:
                reply = self.channel.receive()
                if isinstance(reply, OrderReply):
                    with self._lock:
                        future = self._orders.pop(reply.number)
                    settle(future, reply)
                    continue
                if isinstance(reply, RankError):
                    reason = f"rank {self.rank}: {reply.reason}"
                    break
                self.replies.put(reply)
        if not reason:
            code = self._process.wait()
            cause = f"signal {-code}" if code < 0 else f"exit code {code}"
            reason = f"rank {self.rank} (process {self._process.pid}) ended with {cause}"
        self._on_failure(reason)
        self.replies.put(RankError(reason=reason))
        with self._lock:
            self._ended, left = reason, list(self._orders.values())
        for future in left:
            future.set_exception(TransferFailed(f"Tensor parallelism failed: {reason}"))


def settle(future: Future[AnyReply], reply: AnyReply) -> None:
    """Set the result of an order."""
    if isinstance(reply, OrderFailed):
        future.set_exception(TransferFailed(reply.reason))
    else:
        future.set_result(reply)


class ParallelModel:
    """Implementation of `Model` on all ranks of a worker."""

    def __init__(
        self, spec: ModelSpec, part: Decoder, group: Group, ranks: Ranks, loaded: list[Loaded]
    ) -> None:
        """`spec` is that of the whole model, `part` is rank 0's, and `loaded` of the other ranks."""
        self.spec = spec
        self.part = part
        self.ranks = ranks
        self.group = group
        self._loaded = loaded
        self._connected: list[Connected] = []

    def forward(self, batch: Batch, cache: KVCache) -> Tensor:
        def part() -> Tensor:
            if batch.fed is not None:
                self.group.broadcast(batch.fed)
            return self.part.forward(batch, cache)

        return self.ranks.launch(Forward.of(batch), part)

    def hidden_states(self, batch: Batch, cache: KVCache) -> Tensor:
        message = Forward.of(batch, hidden=True)
        return self._computed(message, lambda: self.part.hidden_states(batch, cache))

    def project(self, states: Tensor) -> Tensor:
        def part() -> Tensor:
            return self.part.project(self.group.broadcast(states.contiguous()))

        return self._computed(Project(states=len(states)), part)

    def _computed(self, message: AnyPass, launch_part: Callable[[], Tensor]) -> Tensor:
        """Return a result that the host reads next, when the device has it."""
        result = self.ranks.launch(message, launch_part)
        streams_of(result.device, self.ranks.waiting).finish()
        return result

    def interrupt(self) -> None:
        pass  # all ranks would have to end at the same place

    def prepare_adapter(self, weights: LoraWeights) -> NoReturn:
        """Refused at startup: adapters are not divided among the ranks."""
        raise SetupError("--tensor-parallel-size does not support LoRA adapters.")

    def open_cache(self, blocks: int, dtype: torch.dtype, device: torch.device) -> KVCache:
        """Allocate the KV cache of all ranks. Returns rank 0's. Raises SetupError."""
        shard = self.group.shard
        replicas = shard.replicas(self.spec.kv_heads)
        cache = KVCache(self.part.spec, blocks, dtype, device, ranks=shard.size, replicas=replicas)
        cache.streams = streams_of(device, self.ranks.waiting)
        self.ranks.allocate(blocks, dtype)
        return cache

    def connect(self, limits: EngineLimits | None, dtype: torch.dtype, measure: Callable[[], int]) -> None:
        """
        Connect the ranks. All others measure the largest passes of `limits` while rank 0 calls `measure`.

        None: nothing is measured, and `measure` returns 0. `dtype` is that of the KV cache.
        Raises SetupError.
        """
        message = Connect(limits=limits, dtype=_name(dtype))
        self._connected = self.ranks.connect(message, self.group, measure)

    @property
    def working(self) -> int:
        """Return the bytes that the largest pass needs on the device where it needs most."""
        return max(rank.working for rank in self._connected)

    @property
    def pools(self) -> RankPools:
        """The KV blocks of the other ranks, for one transfer."""
        return RankPools(self.ranks)

    def budget(self, own_budget: MemoryBudget) -> MemoryBudget:
        """Return the memory for KV blocks. GPUs: that of the fullest one. A CPU: all ranks share it."""
        others = self._loaded
        if not own_budget.gpu:
            return replace(own_budget, weights=own_budget.weights + sum(other.weights for other in others))
        return replace(
            own_budget,
            at_start=_least([own_budget.at_start, *(other.at_start for other in others)]),
            free=_least([own_budget.free, *(other.free for other in self._connected)]),
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _least(values: list[int | None]) -> int | None:
    return min((value for value in values if value is not None), default=None)


class Orders(Protocol):
    """The part of `Ranks` that transfers use."""

    @property
    def others(self) -> int: ...

    def order(self, order: AnyOrder) -> list[Future[AnyReply]]: ...


UNNUMBERED = 0
"""Number of an order before `Ranks.order` gives it one."""


class RankPools:
    """
    Implementation of `transfer.nixl_transfer.OtherRanks`. Any thread may use it, and no call waits.

    A thread of its own sends the orders, because a stopped rank does not read them.
    """

    def __init__(self, ranks: Orders) -> None:
        self._ranks = ranks
        self._sender = ThreadPoolExecutor(1, "rank-pools")

    def open(self, worker: str) -> list[Future[tuple[bytes, PoolLayout]]]:
        return self._order(OpenPool(UNNUMBERED, worker), lambda reply: (reply.sealed, reply.pool))

    def connect(
        self, sealed: Sequence[bytes], pools: tuple[PoolLayout, ...], epoch: str, peer: str
    ) -> list[Future[None]]:
        return self._order(ConnectPeer(UNNUMBERED, list(sealed), pools, epoch, peer), _nothing)

    def disconnect(self, peer: str) -> None:
        self._order(DisconnectPeer(UNNUMBERED, peer), _nothing)

    def pull(self, peer: str, remote: Sequence[int], local: Sequence[int]) -> list[Future[Pulled]]:
        order = PullBlocks(UNNUMBERED, peer, list(remote), list(local))
        return self._order(order, lambda reply: Pulled(reply.bytes, reply.seconds, reply.transport))

    def checksums(self, blocks: Sequence[int]) -> list[Future[list[int]]]:
        return self._order(SumBlocks(UNNUMBERED, list(blocks)), lambda reply: list(reply.sums))

    def serve(self, change: int) -> None:
        self._order(ServePeers(UNNUMBERED, change), _nothing)

    def close(self, seconds: float) -> list[Future[None]]:
        closed = self._order(ClosePool(UNNUMBERED, seconds), _nothing)
        self._sender.shutdown(wait=False)
        return closed

    def _order(self, order: AnyOrder, read: Callable[[Any], Result]) -> list[Future[Result]]:
        """Send `order`, and return what `read` gets from the replies, in the order of the ranks."""
        results: list[Future[Result]] = [Future() for _ in range(self._ranks.others)]

        def send() -> None:
            for result, reply in zip(results, self._ranks.order(order), strict=True):
                reply.add_done_callback(partial(_pass_on, result, read))

        for result in results:
            result.set_running_or_notify_cancel()  # a waiter's cancellation does not propagate
        try:
            self._sender.submit(send)
        except RuntimeError:  # it was shut down
            for result in results:
                result.set_exception(TransferFailed("The worker is closing."))
        return results


def _pass_on(result: Future[Result], read: Callable[[Any], Result], reply: Future[AnyReply]) -> None:
    if (error := reply.exception()) is not None:
        result.set_exception(error)
    else:
        result.set_result(read(reply.result()))


def _nothing(_: AnyReply) -> None:
    return
