"""
A thread that publishes KV events over ZMQ, and replays recent ones.

A batch has its number from the moment at which the engine hands it over, so that a snapshot of the pool
knows which batches are in it. What a subscriber missed it asks for at the replay socket, from among the
last batches; when nothing changes, an empty batch now and then shows it that it missed nothing.
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
"""Batches that can be replayed, and as many that wait for a slow subscriber: what is dropped for the one is
kept for the other."""

HEARTBEAT_S = 2.0
"""Seconds after the last batch until an empty one."""

RANK = 0


class KvPublisher:
    """Listens from the start; publishes between `start` and `close`."""

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
        Raises SetupError if it cannot listen there, or others cannot connect there.

        Without `replay` it is beside `endpoint`. `advertise` is the host that others use.
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
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
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
        """Send what waits, and let go of all."""
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
        """The number of the last batch; -1 before the first."""
        return self._last

    def publish(self, changes: Sequence[Change]) -> None:
        """Hand over one batch. From any thread."""
        with self._lock:
            self._last += 1
            if len(self._waiting) < KEPT:  # else its number is missing, and whoever listens asks
                self._waiting.append((self._last, changes))
            self._wake()

    def _wake(self) -> None:
        """With the lock held."""
        if not self._awake:
            self._awake = True
            self._waker.send(b"\0")

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._sleeper, zmq.POLLIN)
        poller.register(self._replays, zmq.POLLIN)
        due = 0.0  # batch 0 comes at once: whatever another process at this address had is void
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
        """Whether there was something to send."""
        with self._lock:
            self._awake = False
            waiting, self._waiting = self._waiting, deque()
        for seq, changes in waiting:
            events = list(events_of(changes, self._block_size, tokens=self._tokens))
            if not seq:
                events.insert(0, AllBlocksCleared())
            batch = msgspec.msgpack.encode(EventBatch(self._clock(), events, RANK))
            self._kept.append((seq, batch))
            self._events.send_multipart((self._topic, sequence_bytes(seq), batch))
        return bool(waiting)

    def _replay(self) -> None:
        """Answer one subscriber that asks for all from a number on."""
        request_frames = self._replays.recv_multipart()
        if len(request_frames) != 3 or len(request_frames[2]) != SEQUENCE_BYTES:
            log.warning(
                "A replay was asked for in %d frames that say no sequence number.", len(request_frames)
            )
            return
        whom, start = request_frames[0], int.from_bytes(request_frames[2])
        for seq, batch in self._kept:
            if seq >= start:
                self._replays.send_multipart((whom, b"", self._topic, sequence_bytes(seq), batch))
        self._replays.send_multipart((whom, b"", b"", REPLAY_END, b""))

    def _listen(self, kind: int, endpoint: str, flag: str) -> tuple[zmq.Socket[bytes], str]:
        listening = self._context.socket(kind)
        # A replay and its end fit; without a bound, one who asks and does not read would cost all memory.
        listening.set_hwm(KEPT + 1)
        try:
            listening.bind(endpoint)
        except zmq.ZMQError as error:
            raise SetupError(
                f"{flag} {endpoint} cannot be listened on: {error}. It looks like tcp://127.0.0.1:5557; port "
                "0 takes a free one."
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
