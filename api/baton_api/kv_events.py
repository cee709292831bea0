"""
What a worker tells of its prefix cache, as bytes: which blocks it keeps, which it has dropped.

The form is vLLM's, so that routers made for vLLM read our workers: ZMQ messages of three frames, [topic,
sequence number as 8 bytes, batch as msgpack]. Sequence numbers begin at 0 with each process; a number that
is missing is asked for again at the replay socket, and if that has forgotten it, `GET /kv/snapshot` tells
all blocks at once, with the number of the last batch that is in it.

Here blocks are named by 64 bits, the last 8 bytes of the 16 that `baton_api.hashing` gives them: that is
what vLLM's events hold, and enough to choose a worker by. Nobody's memory is read by these names.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

SEQUENCE_BYTES = 8
REPLAY_END = (-1).to_bytes(SEQUENCE_BYTES, signed=True)
"""In place of a sequence number: the replay is over."""

IN_USE = "GPU"
"""vLLM's word for the memory that the model computes in, whatever it is; the others are further away."""

FRAME_ENTRIES = 16_384
"""Blocks in one frame of a snapshot: reading one takes a few milliseconds."""

_LENGTH_BYTES = 4
_FRAME_LIMIT = 1024**2


class BlockStored(msgspec.Struct, tag=True):
    """Blocks that are known from now on, each the child of the one before it."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Of the first of them; None at the beginning of a prompt. Under a tenant's salt a prompt begins with a
    parent that nobody else has."""
    token_ids: list[int]
    """Of all of them; empty if the worker keeps prompts to itself."""
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks that are not known any more."""

    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True):
    """Nothing is known any more."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """What one step has changed. An empty one says that the worker lives and nothing was missed."""

    ts: float
    """Seconds since 1970, by the worker's clock."""
    events: list[Event]
    data_parallel_rank: int | None = None


class SnapshotFrame(msgspec.Struct, frozen=True):
    """A part of a snapshot; its frames differ in `blocks` and `last`."""

    epoch: str
    """The process's: see `baton_api.workers.Load`."""
    seq: int
    """Of the last batch whose changes are in; -1 if there was none."""
    block_size: int
    blocks: list[tuple[int, int | None]]
    """(hash, parent's hash) of each."""
    last: bool
    """Whether that is all."""


def block_number(name: bytes) -> int:
    """
    A block's name in events.

    >>> block_number(bytes(15) + b"*")
    42
    """
    return int.from_bytes(name[-8:])


def frame(message: bytes) -> bytes:
    """One part of a snapshot's body: its length as 4 bytes, then itself as msgpack."""
    return len(message).to_bytes(_LENGTH_BYTES) + message


class Frames:
    """Bytes of a snapshot's body going in, whole messages coming out."""

    def __init__(self) -> None:
        self._left = bytearray()

    def push(self, piece: bytes) -> Iterator[bytes]:
        """Raises ValueError for what is no snapshot."""
        self._left += piece
        while len(self._left) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._left[:_LENGTH_BYTES])
            if end > _FRAME_LIMIT:
                raise ValueError(f"a frame of {end} bytes")
            if len(self._left) < end:
                return
            yield bytes(self._left[_LENGTH_BYTES:end])
            del self._left[:end]


def sequence_bytes(seq: int) -> bytes:
    return seq.to_bytes(SEQUENCE_BYTES)
