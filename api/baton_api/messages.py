"""
What a decode worker and a prefill worker say to each other, on a TCP connection of their own.

    decode                                   prefill
      Hello ------------------------------->   compare protocol and digest before anything else
      <------------------------ Welcome, or Refuse and close
      Prefill(room, epoch, tokens, ...) --->   compute chunk by chunk
      <---------------- Chunk(blocks, checksums)   as often as there are finished blocks
      (pull by NIXL READ while the next chunk is computed)
      <------------- Commit(first token, cached tokens, tail hash)
      Done(room, epoch) ------------------->   let the blocks go
      <----------------------- Drained(room, epoch)   nothing of this room is left

Instead of Commit there may be `Failed`. `Abort` may come at any time and is answered by `Drained`.
`Ping` and `Pong` go both ways when nothing else does. A room is one prompt; its epoch is the number
of the attempt, so that what belongs to an earlier attempt is recognised and dropped.

A frame is 4 bytes of length, big-endian, then one msgpack map with the message's name under
`type`. Frames above `FRAME_LIMIT` and maps that do not fit the schema end the connection.
"""

from __future__ import annotations

import msgspec

from baton_api.errors import TransferFailed
from baton_api.sampling import SamplingParams

PROTOCOL = 5
FRAME_LIMIT = 8 * 1024 * 1024
"""Bytes of one frame. A prompt of a million tokens is 5 MB."""

LENGTH_BYTES = 4


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", forbid_unknown_fields=True):
    """The root of all messages."""


class Hello(Message, frozen=True, tag="hello"):
    """The first frame: who speaks, and with whose blocks mine can be mixed."""

    protocol: int
    worker: str
    """A name for the log, such as `decode-0`."""
    epoch: str
    """Random, new at every start of the process."""
    model: str
    digest: str
    """Hash of everything that decides the bytes of a block: see `baton_engine.transfer.compatibility`."""
    labels: dict[str, str] = {}
    """What the digest was made of, so that a refusal can name what differs."""
    request_id: str = ""
    """The request for whose sake the connection is made."""
    ticket: str = ""
    """Its ticket: without one the transfer agent's metadata is not handed out."""


class PoolLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Where a worker's KV blocks lie: block `i` is `block_bytes` bytes at `address + i * block_bytes`."""

    address: int
    block_bytes: int
    blocks: int
    device: int = 0
    """The accelerator's number; 0 on the CPU."""
    memory: str = "DRAM"
    """NIXL's name for the kind of memory: DRAM or VRAM."""


class Welcome(Message, frozen=True, tag="welcome"):
    """Protocol and digest are equal; here is how my blocks are read."""

    protocol: int
    worker: str
    epoch: str
    model: str
    digest: str
    agent: bytes
    """The transfer agent's own metadata, opaque here."""
    pool: PoolLayout


class Refuse(Message, frozen=True, tag="refuse"):
    """Why there will be no Welcome. The connection ends."""

    reason: str


class Prefill(Message, frozen=True, tag="prefill"):
    """Compute this prompt, announce its blocks from `start_block` on, and draw the first token."""

    room: str
    epoch: int
    tokens: list[int]
    start_block: int
    """Blocks before it are in the decode worker's own cache and are not wanted."""
    parent: bytes
    """Chain hash of block `start_block - 1` (the root hash if 0): the same tokens, or no deal."""
    sampling: SamplingParams
    """Those of the first token: `SamplingParams.first_token`."""
    salt: str = ""
    ticket: str = ""
    request_id: str = ""
    trace: str = ""
    """`traceparent` of the request, if it is traced."""
    deadline_s: float = 60.0
    """Seconds from now after which nobody wants the answer."""


class Chunk(Message, frozen=True, tag="chunk"):
    """These blocks are computed and will not change until Done, Abort or the end of the connection."""

    room: str
    epoch: int
    first_block: int
    """Position in the prompt of `blocks[0]`."""
    blocks: list[int]
    """Their ids in the prefill worker's pool."""
    checksums: list[int]
    """xxh3-64 of each block's bytes."""


class TokenChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One drawn token, with its logprobs if they were asked for."""

    token: int
    logprob: float | None = None
    top: list[tuple[int, float]] = []


class Commit(Message, frozen=True, tag="commit"):
    """The prompt is computed to the end; its last chunk was announced before this."""

    room: str
    epoch: int
    first: TokenChoice
    prompt_tokens: int
    cached_tokens: int
    """Tokens that came from the prefill worker's own prefix cache."""
    tail: bytes
    """Chain hash of the whole prompt, the part in its last block included."""
    queue_s: float = 0.0
    """Seconds that the prompt waited for its first chunk."""
    compute_s: float = 0.0
    """Seconds from the first chunk's start to the last one's end."""


class Failed(Message, frozen=True, tag="failed"):
    """The prompt will not be computed here. What was announced stays readable until Done."""

    room: str
    epoch: int
    reason: str
    retry: bool
    """Whether another prefill worker may do better (overload, drain) or none can (bad request)."""
    busy: bool = False
    """Whether it is only that there is no room for it now, or soon nobody."""


class Done(Message, frozen=True, tag="done"):
    """Everything was pulled and checked, or nothing more is wanted and no read is under way."""

    room: str
    epoch: int


class Abort(Message, frozen=True, tag="abort"):
    """Stop computing; my reads are under way or not, Done is not coming."""

    room: str
    epoch: int


class Drained(Message, frozen=True, tag="drained"):
    """Nothing of this room and epoch is computed, announced or held any more."""

    room: str
    epoch: int


class Ping(Message, frozen=True, tag="ping"):
    """Are you there? Sent when nothing else was for a while."""

    number: int


class Pong(Message, frozen=True, tag="pong"):
    """Here I am, and this is how busy I am."""

    number: int
    queued_tokens: int = 0
    free_blocks: int = 0
    draining: bool = False


AnyMessage = (
    Hello | Welcome | Refuse | Prefill | Chunk | Commit | Failed | Done | Abort | Drained | Ping | Pong
)

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes of a peer's making: bad structure, text that is not UTF-8, deep nesting."""

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
    """The message in a frame's body; raises TransferFailed if it is none."""
    try:
        return _decoder.decode(body)
    except UNREADABLE as error:
        raise TransferFailed(f"Not a message of the control protocol: {error}.") from error
