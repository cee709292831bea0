"""
Messages between rank 0 and the other ranks of a worker, over a socket pair for each of them.

    rank 0                              rank r
      Start ------------------------->    load its part of the weights
      <------------------------- Loaded
      Connect ----------------------->    connect to the group, measure the memory of passes with all ranks
      <---------------------- Connected
      Allocate ---------------------->    allocate its part of the KV cache
      <---------------------- Allocated
      CapturePass ------------------->    capture its part of a decode pass
      <------------------- PassCaptured
      DropPass ---------------------->    free it, because a rank has not captured it
      Forward, ReplayPass, Project -->    compute; results go through the group
      ReserveDrafts, Draft,
      KeepStates, SelectStates ------>    the same, of the draft head
      an `Order` -------------------->    transfer blocks, behind the passes that were sent before
      <---------------------- a `OrderReply`   with the number of the order

`RankError` may come at any time, and the rank then ends. A rank ends if its socket is closed, which happens
if rank 0 ends for any reason. A frame is 4 bytes of length, big-endian, then a msgpack map.
"""

from __future__ import annotations

import socket
import threading

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton_api.messages import PoolLayout
from baton_engine.batch import Batch, BatchRow
from baton_engine.scheduling.limits import EngineLimits
from baton_engine.spec import Quantize

LENGTH_BYTES = 4


class RankMessage(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The root of all messages."""


class Start(RankMessage, frozen=True):
    """The first message: what to load, and where."""

    rank: int
    size: int
    worker: str
    """The worker's name in the log."""
    checkpoint: str
    name: str
    """The model's name in errors."""
    context: int
    """`ModelSpec.served_to`."""
    dtype: str
    quantize: Quantize
    """`WorkerSettings.quantize`."""
    device: str
    threads: int
    drafts: bool
    """Whether the model has a draft head."""
    eagle3: str
    """The checkpoint of the head. Empty: it is that of the model."""
    store: str
    """File by which the ranks find each other."""
    timeout_s: float
    log_format: str


class Connect(RankMessage, frozen=True):
    """Connect to the group, and then compute the largest passes with all ranks to measure their memory."""

    limits: EngineLimits | None
    """Those of the passes. None: nothing is measured, on a CPU."""
    dtype: str
    """Data type of keys and values."""


class Allocate(RankMessage, frozen=True):
    """Allocate this many KV blocks."""

    blocks: int
    dtype: str
    """Data type of keys and values."""


class PassRow(RankMessage, frozen=True):
    """A `BatchRow`."""

    tokens: list[int]
    start: int
    blocks: bytes
    """Block ids, int32 in this machine's byte order."""
    wanted: int


class Forward(RankMessage, frozen=True):
    """Compute a pass: the logits, or only the hidden states."""

    rows: list[PassRow]
    hidden: bool = False
    fed: bool = False
    """Whether rank 0 broadcasts the token ids first, which its host does not know."""

    @classmethod
    def of(cls, batch: Batch, *, hidden: bool = False) -> Forward:
        return cls(rows=_rows(batch), hidden=hidden, fed=batch.fed is not None)


class Draft(RankMessage, frozen=True):
    """Compute a pass of the draft head."""

    rows: list[PassRow]
    continues: bool
    """`Batch.continues`: states are those of the last such pass."""

    @classmethod
    def of(cls, batch: Batch) -> Draft:
        return cls(rows=_rows(batch), continues=batch.continues)


class ReserveDrafts(RankMessage, frozen=True):
    """`DraftHead.reserve`."""

    rows: int


class KeepStates(RankMessage, frozen=True):
    """`DraftHead.keep`."""

    rows: list[int]
    blocks: list[int]


class SelectStates(RankMessage, frozen=True):
    """`DraftHead.select`."""

    rows: list[int]


def batch_rows(rows: list[PassRow]) -> list[BatchRow]:
    """Return the rows of a batch from those of a message."""
    tables = [np.frombuffer(row.blocks, dtype=np.int32) for row in rows]
    return [
        BatchRow(row.tokens, row.start, (), row.wanted, table=table)
        for row, table in zip(rows, tables, strict=True)
    ]


def _rows(batch: Batch) -> list[PassRow]:
    return [_row(row, batch.block_size) for row in batch.rows]


def _row(row: BatchRow, block_size: int) -> PassRow:
    count = -(-row.context // block_size)
    table = np.asarray(row.blocks[:count] if row.table is None else row.table[:count], dtype=np.int32)
    return PassRow(tokens=list(row.tokens), start=row.start, blocks=table.tobytes(), wanted=row.wanted)


class CapturePass(RankMessage, frozen=True):
    """Capture a decode pass of this many rows. Answered by `PassCaptured`."""

    rows: int
    of_head: bool
    """Whether it is a pass of the draft head."""


class DropPass(RankMessage, frozen=True):
    """Free the captured pass of this many rows, if the rank has it."""

    rows: int
    of_head: bool


class ReplayPass(RankMessage, frozen=True):
    """
    Compute a batch with a captured pass. In those of the model, rank 0 broadcasts the token ids.

    Arrays are in this machine's byte order.
    """

    captured: int
    """Rows of the captured pass."""
    rows: int
    """Tokens of the batch."""
    values: bytes
    """`Batch.values`, int64."""
    tables: bytes
    """`Batch.token_tables`, int32."""
    state_blocks: bytes
    """`Batch.token_state_blocks`, int64. Empty without a draft head."""
    of_head: bool

    @classmethod
    def of(cls, captured: int, batch: Batch, *, states: bool, of_head: bool) -> ReplayPass:
        return cls(
            captured=captured,
            rows=batch.size,
            values=batch.values.tobytes(),
            tables=batch.token_tables.tobytes(),
            state_blocks=batch.token_state_blocks.tobytes() if states else b"",
            of_head=of_head,
        )

    def arrays(self) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int64] | None]:
        """Return `Batch.values`, `token_tables` and `token_state_blocks`, which may be written."""
        values = np.frombuffer(bytearray(self.values), dtype=np.int64)
        tables = np.frombuffer(bytearray(self.tables), dtype=np.int32)
        states = np.frombuffer(bytearray(self.state_blocks), dtype=np.int64)
        of_states = states.reshape(2, self.rows) if len(states) else None
        return values.reshape(3, self.rows), tables.reshape(self.rows, -1), of_states


class Project(RankMessage, frozen=True):
    """Compute the logits of this many states, which rank 0 broadcasts."""

    states: int


class Order(RankMessage, frozen=True):
    """Something about the blocks of the rank, for its `PoolReader`."""

    number: int
    """Given back in the reply."""


class OpenPool(Order, frozen=True):
    """Start the agent. Answered by `Opened`."""

    worker: str
    """The worker's name for its agents."""


class ConnectPeer(Order, frozen=True):
    """`PoolReader.connect`."""

    sealed: list[bytes]
    pools: tuple[PoolLayout, ...]
    epoch: str
    peer: str


class DisconnectPeer(Order, frozen=True):
    """`PoolReader.disconnect`."""

    peer: str


class PullBlocks(Order, frozen=True):
    """`PoolReader.pull`. Answered by `ReadEnded` when no byte can change any more."""

    peer: str
    remote: list[int]
    local: list[int]


class SumBlocks(Order, frozen=True):
    """Compute the sums of the rank's parts. Answered by `Summed`."""

    blocks: list[int]


class ServePeers(Order, frozen=True):
    """`PoolReader.serve`."""

    change: int


class ClosePool(Order, frozen=True):
    """End the agent, for whose reads this time is left."""

    seconds: float


class OrderReply(RankMessage, frozen=True):
    """Answers an order, which has no other result."""

    number: int


class OrderFailed(OrderReply, frozen=True):
    """The order failed, for this reason."""

    reason: str


class Opened(OrderReply, frozen=True):
    """The agent can be reached."""

    sealed: bytes
    """Its sealed metadata."""
    pool: PoolLayout


class ReadEnded(OrderReply, frozen=True):
    """The read was successful: a `Pulled`."""

    bytes: int
    seconds: float
    transport: str


class Summed(OrderReply, frozen=True):
    """The sum of each block."""

    sums: list[int]


class Loaded(RankMessage, frozen=True):
    """The weights are on the device."""

    weights: int
    """Their bytes."""
    at_start: int | None
    """Free bytes of the device before the weights were loaded; None if unknown."""


class Connected(RankMessage, frozen=True):
    """The rank can compute."""

    working: int
    """Bytes that the largest pass needs beside weights and KV cache."""
    free: int | None
    """Free bytes of the device."""


class Allocated(RankMessage, frozen=True):
    """The KV blocks exist."""


class PassCaptured(RankMessage, frozen=True):
    """The rank has captured a pass, or why it has not."""

    used: int
    """Bytes of its device that all captured passes take."""
    reason: str = ""


class RankError(RankMessage, frozen=True):
    """The rank ends, for this reason."""

    reason: str


AnyOrder = OpenPool | ConnectPeer | DisconnectPeer | PullBlocks | SumBlocks | ServePeers | ClosePool
AnyReply = OrderReply | OrderFailed | Opened | ReadEnded | Summed
AnyPass = Forward | ReplayPass | Project | Draft | ReserveDrafts | KeepStates | SelectStates
AnyMessage = (
    Start
    | Loaded
    | Connect
    | Connected
    | Allocate
    | Allocated
    | CapturePass
    | PassCaptured
    | DropPass
    | AnyPass
    | AnyOrder
    | AnyReply
    | RankError
)

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def frame(message: AnyMessage) -> bytes:
    """Return the bytes of a message on the socket."""
    body = _encoder.encode(message)
    return len(body).to_bytes(LENGTH_BYTES) + body


class Channel:
    """One end of the socket pair. One thread sends at a time, and one receives."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._sending = threading.Lock()

    def send(self, message: AnyMessage) -> None:
        """Raises OSError if the other end is closed, or does not read within the socket's timeout."""
        self.send_frame(frame(message))

    def send_frame(self, encoded: bytes) -> None:
        """Send a `frame`, which several channels may share."""
        with self._sending:
            self._end.sendall(encoded)

    def receive(self) -> AnyMessage:
        """Return the next message. Raises EOFError when the other end is closed."""
        return _decoder.decode(self._read(int.from_bytes(self._read(LENGTH_BYTES))))

    def close(self) -> None:
        self._end.close()

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                piece = self._end.recv(size - len(data))
            except OSError as error:
                raise EOFError(f"the connection between ranks failed: {error}") from error
            if not piece:
                raise EOFError("the other rank has closed the connection")
            data += piece
        return bytes(data)
