"""
The handshake of a control connection: identities, and the compatibility of KV blocks.

Protocol version and digest are compared before other data is read or sent. The metadata of the transfer
agent, which gives a peer access to this worker's memory, is sent later, in Welcome. The digest is of
everything that determines the bytes of a block; its labels are sent with it, so that an error can name the
differences with both values.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import msgspec
import torch

from baton_api import messages
from baton_api.errors import IncompatiblePeer, TransferFailed
from baton_api.messages import PROTOCOL, Hello, PoolLayout, Refuse, Welcome
from baton_engine.kv.cache import BLOCK_SIZE, FLOAT8_CACHE
from baton_engine.ops.native.products import ONE_ORDER
from baton_engine.spec import ModelSpec
from baton_engine.transfer.control import ControlConnection, Pace

HELLO_LIMIT = 64 * 1024
"""Maximum bytes of the first frame, which limits the memory that unauthenticated peers can use."""

REASON_LIMIT = 2000
"""Maximum characters of a peer's reason in an error."""


LAYOUT = "block, layer, key/value, kv head, slot, dim"
"""The order of `KVCache.kv`'s dimensions."""

LATENT_LAYOUT = "block, layer, latent, slot, dim"
"""The order for latent attention, whose blocks have neither keys and values nor heads."""

BYTES_DO_NOT_DEPEND_ON = frozenset(
    {"context", "eos_ids", "bos_id", "tied_embeddings", "headless", "draft_layers"}
)
"""Fields of a spec that do not affect the bytes of blocks."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """Everything that determines the bytes of a worker's KV blocks."""

    labels: Mapping[str, str]
    """Readable names and values. Equal labels have equal digests."""

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        dtype: torch.dtype,
        weights: str,
        block_size: int = BLOCK_SIZE,
        kv_dtype: torch.dtype | None = None,
        products: str = ONE_ORDER,
    ) -> Compatibility:
        """
        Create it from the model. `weights` is `weights_digest`.

        `dtype` is of weights, and of the KV cache without `kv_dtype`. `products` is `Products.sums` of a
        model that the native kernels compute in bfloat16. All others have the label of the kernels' basic
        way, so that they pair with CPU workers that have it.
        """
        model = {
            field.name.replace("_", " "): str(getattr(spec, field.name))
            for field in fields(spec)
            if field.name not in BYTES_DO_NOT_DEPEND_ON
        }
        kind, cache_kind = (str(given).removeprefix("torch.") for given in (dtype, kv_dtype or dtype))
        return cls(
            {
                "protocol": str(PROTOCOL),
                **model,
                "weights": weights,
                "dtype": kind,
                "kv dtype": "fp8" if kv_dtype == FLOAT8_CACHE else cache_kind,
                "products": products,
                "block size": str(block_size),
                "layout": LAYOUT if spec.latent is None else LATENT_LAYOUT,
            }
        )

    @property
    def digest(self) -> str:
        """32 hexadecimal digits, equal on all machines for equal labels."""
        hasher = hashlib.sha256(b"baton-compatibility")
        for name, value in sorted(self.labels.items()):
            for text in (name.encode(), value.encode()):
                hasher.update(len(text).to_bytes(4) + text)
        return hasher.hexdigest()[:32]

    def differences(self, theirs: Mapping[str, str]) -> str:
        """
        Return the differing labels with both values, for an error message.

        >>> Compatibility({"dtype": "float32"}).differences({"dtype": "bfloat16"})
        'dtype is float32 here and bfloat16 there'
        """
        names = dict.fromkeys((*self.labels, *theirs))
        return ", ".join(
            f"{name} is {self.labels.get(name, 'unknown')} here and {theirs.get(name, 'unknown')[:200]} there"
            for name in names
            if self.labels.get(name) != theirs.get(name)
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a worker in the first frame."""

    worker: str
    """Name for the log, such as `decode-0`."""
    epoch: str
    """Random id of this start of the process."""
    model: str
    compatibility: Compatibility

    def hello(self, request_id: str = "", ticket: str = "", ranks: int = 1) -> Hello:
        return Hello(
            protocol=PROTOCOL,
            worker=self.worker,
            epoch=self.epoch,
            model=self.model,
            digest=self.compatibility.digest,
            labels=dict(self.compatibility.labels),
            request_id=request_id,
            ticket=ticket,
            ranks=ranks,
        )

    def welcome(self, agent: bytes, pools: tuple[PoolLayout, ...]) -> Welcome:
        return Welcome(
            protocol=PROTOCOL,
            worker=self.worker,
            epoch=self.epoch,
            model=self.model,
            digest=self.compatibility.digest,
            agent=agent,
            pools=pools,
        )


def refusal(me: Identity, peer: Hello) -> str | None:
    """Return the reason why the blocks of `me` and `peer` are incompatible, with both values, or None."""
    if peer.protocol != PROTOCOL:
        return (
            f"{me.worker} uses version {PROTOCOL} of the control protocol and {peer.worker} version "
            f"{peer.protocol}. Run the same release of Baton on both."
        )
    if peer.digest != me.compatibility.digest:
        return (
            f"{me.worker} serves {me.model} and {peer.worker} serves {peer.model}, whose KV blocks are "
            f"incompatible: {me.compatibility.differences(peer.labels)} (digests {me.compatibility.digest} "
            f"and {peer.digest}). Start both with the same model, dtype, --speculation and "
            "release, and with BATON_PRODUCTS=pairs if their products differ."
        )
    return None


class _Greeting(msgspec.Struct, tag_field="type", tag="hello"):
    """A Hello of any version. It contains only the fields that never change."""

    protocol: int
    worker: str = "an unnamed worker"


async def accept(
    connection: ControlConnection,
    me: Identity,
    welcome: Callable[[], Welcome],
    admit: Callable[[Hello], str | None],
    pace: Pace,
) -> Hello:
    """
    Perform the prefill side: read Hello, send Welcome. `admit` may return a further reason to reject the
    peer.

    Raises IncompatiblePeer after sending Refuse, and TransferFailed for other errors.
    """
    try:
        async with asyncio.timeout(pace.handshake_s):
            body = await connection.receive_frame(HELLO_LIMIT)
    except TimeoutError as error:
        raise TransferFailed(f"{connection.peer} sent no Hello within {pace.handshake_s:g} s.") from error
    hello = _read_hello(body)
    reason = refusal(me, hello) or admit(hello)
    if reason is not None:
        connection.send(Refuse(reason=reason))
        raise IncompatiblePeer(f"Rejected {hello.worker[:200]} at {connection.peer}: {reason}")
    connection.send(welcome())
    connection.start_heartbeat()
    return hello


async def introduce(connection: ControlConnection, me: Identity, hello: Hello, pace: Pace) -> Welcome:
    """Perform the decode side: send Hello, read Welcome. Raises IncompatiblePeer or TransferFailed."""
    connection.send(hello)
    try:
        async with asyncio.timeout(pace.handshake_s):
            answer = await connection.receive()
    except TimeoutError as error:
        raise TransferFailed(
            f"{connection.peer} did not answer Hello within {pace.handshake_s:g} s."
        ) from error
    match answer:
        case Refuse(reason=reason):
            raise IncompatiblePeer(f"{connection.peer} rejected this worker: {reason[:REASON_LIMIT]}")
        case Welcome() if answer.protocol == PROTOCOL and answer.digest == me.compatibility.digest:
            connection.start_heartbeat()
            return answer
        case Welcome():
            raise IncompatiblePeer(
                f"{connection.peer} sent Welcome with protocol {answer.protocol} and digest "
                f"{answer.digest[:64]}, but this worker has {PROTOCOL} and {me.compatibility.digest}."
            )
        case _:
            raise TransferFailed(f"{connection.peer} answered Hello with {type(answer).__name__}.")


def _read_hello(body: bytes) -> Hello:
    try:
        message = messages.decode(body)
    except TransferFailed:
        try:
            greeting = msgspec.msgpack.decode(body, type=_Greeting)
        except messages.UNREADABLE:
            greeting = None
        if greeting is None or greeting.protocol == PROTOCOL:
            raise
        # The Hello of another version may have other fields. Report the version instead of a decoding error.
        return Hello(protocol=greeting.protocol, worker=greeting.worker, epoch="", model="", digest="")
    if not isinstance(message, Hello):
        raise TransferFailed(f"The first message was {type(message).__name__}, not Hello.")
    return message
