"""
A thread that publishes KV events over ZMQ, and replays recent ones.

The engine numbers a batch when it publishes it, so that a snapshot of the pool knows the batches that it
contains. Subscribers request missed batches at the replay socket, which has the latest ones. Without changes,
an empty batch is sent regularly, so that subscribers detect missed batches.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import zmq

from baton_api import exposure
from baton_api.errors import SetupError
from baton_api.kv_events import REPLAY_END, SEQUENCE_BYTES, AllBlocksCleared, EventBatch, sequence_bytes
from baton_engine.kv.events import Change, events_of

log = logging.getLogger(__name__)

KEPT = 10_000
"""Maximum number of batches that can be replayed, and of batches that are queued for a slow subscriber.
Batches that are dropped from the queue can therefore be replayed."""

HEARTBEAT_S = 2.0
"""Seconds between the last batch and an empty one."""

RANK = 0


class KvPublisher:
    """Listens from its creation; publishes between `start` and `close`."""

    def __init__(
        self,
        endpoint: str,
        replay: str = "",
        *,
        advertise: str = "",
        topic: str = "",
        block_size: int,
        tokens: bool = True,
        clock: Callable[[], float] = time.time,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        """
        Listen at `endpoint` and `replay`. Raises SetupError if an address is unusable or unreachable.

        Default of `replay`: a free port, or a path next to `endpoint`. `advertise` is the host for clients.
        """
        self._topic = topic.encode()
        self._block_size = block_size
        self._tokens = tokens
        self._clock = clock
        self._heartbeat_s = heartbeat_s
        self._lock = threading.Lock()
        self._waiting: deque[tuple[int, Sequence[Change]]] = deque()
        self._last = -1
        self._awake = False
        self._closing = False
        self._published: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._context = zmq.Context()
        try:
            self._events, bound = self._listen(zmq.PUB, endpoint, "--kv-events")
            self._replays, replay_bound = self._listen(zmq.ROUTER, replay or _beside(bound), "--kv-replay")
            self.endpoint = exposure.advertised_endpoint(bound, "--kv-events", advertise)
            self.replay_endpoint = exposure.advertised_endpoint(replay_bound, "--kv-replay", advertise)
        except SetupError:
            self._context.destroy(linger=0)
            raise
        self._sleeper, self._waker = socket.socketpair()
        self._waker.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="baton-kv-events", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Send queued batches and release all sockets."""
        with self._lock:
            self._closing = True
            self._wake()
        if self._thread.ident is not None:
            self._thread.join()
        self._context.destroy(linger=0)
        self._sleeper.close()
        self._waker.close()

    @property
    def last(self) -> int:
        """Number of the last batch; -1 before the first."""
        return self._last

    def publish(self, changes: Sequence[Change]) -> None:
        """Publish one batch. Thread-safe."""
        with self._lock:
            self._last += 1
            if len(self._waiting) < KEPT:  # otherwise subscribers notice the missing number
                self._waiting.append((self._last, changes))
            self._wake()

    def _wake(self) -> None:
        """Wake the thread. Requires the lock."""
        if not self._awake:
            self._awake = True
            self._waker.send(b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._sleeper, zmq.POLLIN)
        poller.register(self._replays, zmq.POLLIN)
        due = 0.0  # batch 0 is sent immediately, and clears the blocks of an earlier process at this address
        while True:
            timeout = max(0.0, due - time.monotonic())
            ready = dict(poller.poll(1 + int(timeout * 1000)))
            if self._sleeper.fileno() in ready:
                self._sleeper.recv(1)
            if self._send_waiting():
                due = time.monotonic() + self._heartbeat_s
            elif time.monotonic() >= due:
                self.publish(())
            if self._closing:
                return
            if self._replays in ready:
                self._replay()

    def _send_waiting(self) -> bool:
        """Send the queued batches. Returns whether there were any."""
        with self._lock:
            self._awake = False
            waiting, self._waiting = self._waiting, deque()
        for seq, changes in waiting:
            events = list(events_of(changes, self._block_size, tokens=self._tokens))
            if not seq:
                events.insert(0, AllBlocksCleared())
            batch = msgspec.msgpack.encode(EventBatch(self._clock(), events, RANK))
            self._published.append((seq, batch))
            self._events.send_multipart((self._topic, sequence_bytes(seq), batch))
        return bool(waiting)

    def _replay(self) -> None:
        """Answer a subscriber that requests all batches from a number on."""
        request_frames = self._replays.recv_multipart()
        if len(request_frames) != 3 or len(request_frames[2]) != SEQUENCE_BYTES:
            log.warning("Invalid replay request: %d frames without a sequence number.", len(request_frames))
            return
        subscriber, start = request_frames[0], int.from_bytes(request_frames[2])
        for seq, batch in self._published:
            if seq >= start:
                self._replays.send_multipart((subscriber, b"", self._topic, sequence_bytes(seq), batch))
        self._replays.send_multipart((subscriber, b"", b"", REPLAY_END, b""))

    def _listen(self, kind: int, endpoint: str, flag: str) -> tuple[zmq.Socket[bytes], str]:
        listening = self._context.socket(kind)
        # A complete replay fits. The limit protects the memory from subscribers that do not read.
        listening.set_hwm(KEPT + 1)
        try:
            listening.bind(endpoint)
        except zmq.ZMQError as error:
            raise SetupError(
                f"Cannot listen on {flag} {endpoint}: {error}. Example: tcp://127.0.0.1:5557. Port 0 selects "
                "a free port."
            ) from error
        return listening, listening.getsockopt_string(zmq.LAST_ENDPOINT)


def _beside(endpoint: str) -> str:
    """
    >>> _beside("tcp://127.0.0.1:5557"), _beside("ipc:///run/kv")
    ('tcp://127.0.0.1:0', 'ipc:///run/kv.replay')
    """
    if endpoint.startswith("tcp://"):
        return endpoint.rpartition(":")[0] + ":0"
    return endpoint + ".replay"
