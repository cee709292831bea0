"""
KV events: the changes of a worker's prefix cache, for routers.

The format is vLLM's, so that routers made for vLLM can read it: ZMQ messages of three frames, [topic,
sequence number as 8 bytes, batch as msgpack]. Sequence numbers start at 0 with each process. A missing
number is requested again at the replay socket. When the replay has expired, `GET /kv/snapshot` returns all
blocks and the number of the last batch in it.

Blocks are named by 64 bits: the last 8 of the 16 bytes of `baton_api.hashing`, as in vLLM's events. That is
enough to select a worker. These names give no access to memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

SEQUENCE_BYTES = 8
REPLAY_END = (-1).to_bytes(SEQUENCE_BYTES, signed=True)
"""In place of a sequence number: the end of the replay."""

IN_USE = "GPU"
"""vLLM's name for the memory in which the model computes, of any kind. Other media are tiers."""

HOST_MEMORY, STORAGE = "CPU", "STORAGE"
"""vLLM's names for the host's memory and for disks."""

SHARED_STORAGE = "EXTERNAL"
"""SGLang's name for a pool that workers share."""

FRAME_ENTRIES = 16_384
"""Blocks per frame of a snapshot. Parsing a frame takes a few milliseconds."""

_LENGTH_BYTES = 4
_FRAME_LIMIT = 1024**2


class BlockStored(msgspec.Struct, tag=True):
    """Blocks that were cached, each the child of the previous one."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Parent of the first block. None at the start of a prompt without a salt; a tenant's salt gives a
    parent of its own."""
    token_ids: list[int]
    """Tokens of all blocks. Empty: the worker does not publish prompts."""
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    """Further parts of the name of each block: the adapter, the salt, images. vLLM only."""
    group_idx: int | msgspec.UnsetType | None = msgspec.UNSET
    """Group of layers whose blocks they are. vLLM only: each group has its own event."""
    locality: str | msgspec.UnsetType | None = msgspec.UNSET
    """`REMOTE` for storage that is not the publisher's own. vLLM only."""


class BlockRemoved(msgspec.Struct, tag=True):
    """Blocks that were evicted."""

    block_hashes: list[int]
    medium: str | None = None
    group_idx: int | msgspec.UnsetType | None = msgspec.UNSET
    locality: str | msgspec.UnsetType | None = msgspec.UNSET


class AllBlocksCleared(msgspec.Struct, tag=True):
    """All blocks of the pool were evicted. In SGLang, also those in the host's memory."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, array_like=True):
    """Changes of one engine step. An empty batch is a heartbeat."""

    ts: float
    """Unix time in seconds, of the worker's clock."""
    events: list[Event]
    data_parallel_rank: int | None = None


class SnapshotFrame(msgspec.Struct, frozen=True):
    """A part of a snapshot. Frames differ in `blocks` and `last`."""

    epoch: str
    """Epoch of the process. See `baton_api.workers.Load`."""
    seq: int
    """Sequence number of the last included batch. -1: none."""
    block_size: int
    blocks: list[tuple[int, int | None]]
    """Hash and parent hash of each block."""
    last: bool
    """Whether this is the last frame."""


def block_number(name: bytes) -> int:
    """
    Return the name of a block in events.

    >>> block_number(bytes(15) + b"*")
    42
    """
    return int.from_bytes(name[-8:])


def frame(message: bytes) -> bytes:
    """Frame a part of a snapshot: its length as 4 bytes, then the message."""
    return len(message).to_bytes(_LENGTH_BYTES) + message


class Frames:
    """Splits the body of a snapshot into messages."""

    def __init__(self) -> None:
        self._left = bytearray()

    def push(self, piece: bytes) -> Iterator[bytes]:
        """Add bytes and yield complete messages. Raises ValueError if a frame is too long."""
        self._left += piece
        while len(self._left) >= _LENGTH_BYTES:
            end = _LENGTH_BYTES + int.from_bytes(self._left[:_LENGTH_BYTES])
            if end > _FRAME_LIMIT:
                raise ValueError(f"the frame has {end} bytes, more than {_FRAME_LIMIT}")
            if len(self._left) < end:
                return
            yield bytes(self._left[_LENGTH_BYTES:end])
            del self._left[:end]


def sequence_bytes(seq: int) -> bytes:
    return seq.to_bytes(SEQUENCE_BYTES)
