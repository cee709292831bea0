"""
The control protocol between a decode worker and a prefill worker, over TCP.

    decode                                   prefill
      Hello ------------------------------->   compare protocol and digest before anything else
      <------------------------ Welcome, or Refuse and close
      Prefill(session, epoch, tokens, ...) >   compute chunk by chunk
      <----------------------- Chunk(blocks)   as often as there are finished blocks
      <------------------ Checksums(checksums)   once they are computed, while the blocks are read
      (pull by NIXL READ while the next chunk is computed)
      <------------- Commit(first token, cached tokens, tail hash)
      Done(session, epoch) ---------------->   release the blocks
      <----------------------- Drained(session, epoch)   nothing of this session is left

A worker can also read what another one has cached. `ReadCached` then takes the place of Prefill, one Chunk
announces the leading blocks that the other worker has, one Checksums follows, and nothing is computed:

    prefill                                  decode
      ReadCached(session, epoch, hashes) --->  hold these blocks
      <------------------ Chunk, Checksums     or Failed: it has none of them
      Done(session, epoch) ----------------->  release the blocks
      <----------------------------- Drained

`Failed` may replace Commit. `Abort` may come at any time and is answered by `Drained`. `Ping` and `Pong` go
both ways on an idle connection. A session is one prompt; its epoch numbers the attempt, so that messages of
an earlier attempt are recognized and dropped. On the wire, `session` is called `room`.

A frame is 4 bytes of length, big-endian, then one msgpack map with the message's name under
`type`. Frames above `FRAME_LIMIT` and maps that do not fit the schema end the connection.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from baton_api.errors import TransferFailed
from baton_api.sampling import SamplingParams

PROTOCOL = 10
FRAME_LIMIT = 8 * 1024 * 1024
"""Bytes of one frame. A prompt of a million tokens is 5 MB."""

LENGTH_BYTES = 4


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """The root of all messages."""


class Hello(Message, frozen=True, tag="hello"):
    """The first frame: identifies the worker and the layout of its blocks."""

    protocol: int
    worker: str
    """A name for the log, such as `decode-0`."""
    epoch: str
    """Random, new at every start of the process."""
    model: str
    digest: str
    """Hash of everything that decides the bytes of a block: see `baton_engine.transfer.handshake`."""
    labels: dict[str, str] = {}
    """The digest's inputs, so that a refusal can name the difference."""
    request_id: str = ""
    """The request that needs the connection."""
    ticket: str = ""
    """The request's ticket. Without a valid one the peer does not send its transfer agent's metadata."""
    ranks: int = 1
    """Number of the worker's ranks, which decides the kind of checksums (ADR 37)."""


class PoolLayout(msgspec.Struct, frozen=True, kw_only=True):
    """
    Memory of one rank's part of a worker's KV blocks.

    The part of block `i` is `block_bytes` bytes at `address + i * block_bytes`.
    """

    address: int
    block_bytes: int
    blocks: int
    device: int = 0
    """The accelerator's number; 0 on the CPU."""
    memory: str = "DRAM"
    """NIXL's name for the kind of memory: DRAM or VRAM."""
    rank: int = 0
    """The rank's number."""
    replicas: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Number of adjacent ranks with the same key heads: 1, if there are not more ranks than key heads."""


class Welcome(Message, frozen=True, tag="welcome"):
    """Accepts the connection: protocol and digest are equal. Describes how to read the blocks."""

    protocol: int
    worker: str
    epoch: str
    model: str
    digest: str
    agent: bytes
    """The metadata of the transfer agents of all ranks, opaque here."""
    pools: tuple[PoolLayout, ...]
    """One for each rank, in order. Each has an equal part of the key heads of all blocks."""


class Refuse(Message, frozen=True, tag="refuse"):
    """Refuses the connection, with the reason."""

    reason: str


class Prefill(Message, frozen=True, tag="prefill"):
    """Compute this prompt, announce its blocks from `start_block` on, and sample the first token."""

    session: str = msgspec.field(name="room")
    epoch: int
    tokens: list[int]
    start_block: int
    """First block to announce. The decode worker's cache holds the blocks before it."""
    parent: bytes
    """Chain hash of block `start_block - 1` or the root hash if 0. It must match the tokens."""
    sampling: SamplingParams
    """`SamplingParams.first_token` of the request."""
    salt: str = ""
    adapter: str = ""
    """Name of the LoRA adapter; empty: the base model."""
    adapter_digest: str = ""
    """The prefill worker computes the prompt only with an adapter of this digest."""
    ticket: str = ""
    request_id: str = ""
    tenant: str = ""
    """Whose turn it is in the prefill worker's queue. Empty: the request has turns of its own."""
    trace: str = ""
    """`traceparent` of the request, if it is traced."""
    source: str = ""
    """Control address of a worker that has the blocks before `start_block`, mostly the decode worker itself.
    The prefill worker may read them there instead of computing them. The ticket covers it. Empty: none."""
    deadline_s: float = 60.0
    """Seconds from now until the prefill worker may release the blocks."""


class ReadCached(Message, frozen=True, tag="read_cached"):
    """Announce the leading ones of these blocks that are in the prefix cache. Compute nothing."""

    session: str = msgspec.field(name="room")
    epoch: int
    hashes: list[bytes]
    """Chain hashes of consecutive blocks."""
    ticket: str = ""
    request_id: str = ""
    deadline_s: float = 60.0
    """Seconds from now until the worker may release the blocks."""


class Chunk(Message, frozen=True, tag="chunk"):
    """Announces blocks whose content is final until Done, Abort or the end of the connection."""

    session: str = msgspec.field(name="room")
    epoch: int
    first_block: int
    """Position of `blocks[0]` in the prompt, or in `ReadCached.hashes`."""
    blocks: list[int]
    """Their ids in the pool of the worker that announces them."""


class Checksums(Message, frozen=True, tag="checksums"):
    """The checksums of announced blocks. A block is not used before."""

    session: str = msgspec.field(name="room")
    epoch: int
    first_block: int
    """Position of `checksums[0]` in the prompt, or in `ReadCached.hashes`."""
    checksums: list[int]
    """Of each block's bytes: xxh3-64, or a sum of mixed words for VRAM and for several ranks (ADR 37)."""


class TokenChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One sampled token, with its logprobs if requested."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []


class Commit(Message, frozen=True, tag="commit"):
    """The whole prompt is computed. Follows its last Checksums."""

    session: str = msgspec.field(name="room")
    epoch: int
    first: TokenChoice
    prompt_tokens: int
    cached_tokens: int
    """Tokens from the prefill worker's prefix cache, or read from another worker's."""
    tail: bytes
    """Chain hash of the whole prompt, a partial last block included."""
    queue_s: float = 0.0
    """Seconds that the prompt waited for its first chunk."""
    compute_s: float = 0.0
    """Seconds from the first chunk's start to the last one's end."""
    peer_tokens: int = 0
    """Those of `cached_tokens` that were read from another worker."""
    tier_tokens: tuple[tuple[str, int], ...] = ()
    """Those of `cached_tokens` that were restored, by tier."""


class Failed(Message, frozen=True, tag="failed"):
    """The prompt failed. Announced blocks stay readable until Done."""

    session: str = msgspec.field(name="room")
    epoch: int
    reason: str
    retry: bool
    """Whether another prefill worker may succeed: true for overload and drain, false for a bad request."""
    busy: bool = False
    """Whether the prefill worker is at its limit or draining."""


class Done(Message, frozen=True, tag="done"):
    """The decode worker needs nothing more, and no read is under way."""

    session: str = msgspec.field(name="room")
    epoch: int


class Abort(Message, frozen=True, tag="abort"):
    """Stop computing. Reads may be under way; Done will not follow."""

    session: str = msgspec.field(name="room")
    epoch: int


class Drained(Message, frozen=True, tag="drained"):
    """The prefill worker has released everything of this session and epoch."""

    session: str = msgspec.field(name="room")
    epoch: int


class Ping(Message, frozen=True, tag="ping"):
    """Heartbeat, sent on an idle connection."""

    number: int


class Pong(Message, frozen=True, tag="pong"):
    """Answer to Ping, with the worker's load."""

    number: int
    queued_tokens: int = 0
    free_blocks: int = 0
    draining: bool = False


AnyMessage = (
    Hello
    | Welcome
    | Refuse
    | Prefill
    | ReadCached
    | Chunk
    | Checksums
    | Commit
    | Failed
    | Done
    | Abort
    | Drained
    | Ping
    | Pong
)

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for malformed input: bad structure, text that is not UTF-8, deep nesting."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    """`message` as one frame, length included."""
    body = _encoder.encode(message)
    if len(body) > FRAME_LIMIT:
        raise TransferFailed(
            f"A {type(message).__name__} message of {len(body)} bytes is over the limit of {FRAME_LIMIT}."
        )
    return len(body).to_bytes(LENGTH_BYTES) + body


def frame_length(header: bytes) -> int:
    """The length that a frame's first 4 bytes announce; raises TransferFailed if it is over the limit."""
    length = int.from_bytes(header)
    if length > FRAME_LIMIT:
        raise TransferFailed(f"A frame of {length} bytes is over the limit of {FRAME_LIMIT}.")
    return length


def decode(body: bytes) -> AnyMessage:
    """The message in a frame's body. Raises TransferFailed if it is invalid."""
    try:
        return _decoder.decode(body)
    except UNREADABLE as error:
        raise TransferFailed(f"Not a message of the control protocol: {error}.") from error
