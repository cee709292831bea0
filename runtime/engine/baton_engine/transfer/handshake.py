"""
The handshake on a control connection: both workers, and whether their KV blocks are compatible.

Protocol version and digest are compared before anything else is read or told. In particular the
transfer agent's metadata, with which a peer can read and write this worker's memory, is only in the
Welcome that follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from baton_api import messages
from baton_api.errors import IncompatiblePeer, TransferFailed
from baton_api.messages import PROTOCOL, Hello, PoolLayout, Refuse, Welcome
from baton_engine.transfer.compatibility import Compatibility
from baton_engine.transfer.control import ControlConnection, Pace

HELLO_LIMIT = 64 * 1024
"""Bytes of the first frame: nobody who is not known yet makes this worker buffer more."""

REASON_LIMIT = 2000
"""Characters of a peer's reason that are passed on."""


@dataclass(frozen=True, slots=True)
class Identity:
    """What a worker says of itself in the first frame."""

    worker: str
    """A name for the log, such as `decode-0`."""
    epoch: str
    """Random, new at every start of the process."""
    model: str
    compatibility: Compatibility

    def hello(self, request_id: str = "", ticket: str = "") -> Hello:
        return Hello(
            protocol=PROTOCOL,
            worker=self.worker,
            epoch=self.epoch,
            model=self.model,
            digest=self.compatibility.digest,
            labels=dict(self.compatibility.labels),
            request_id=request_id,
            ticket=ticket,
        )

    def welcome(self, agent: bytes, pool: PoolLayout) -> Welcome:
        return Welcome(
            protocol=PROTOCOL,
            worker=self.worker,
            epoch=self.epoch,
            model=self.model,
            digest=self.compatibility.digest,
            agent=agent,
            pool=pool,
        )


def refusal(me: Identity, peer: Hello) -> str | None:
    """Why blocks of `me` and `peer` cannot be mixed, naming both sides' values, or None if they can."""
    if peer.protocol != PROTOCOL:
        return (
            f"{me.worker} speaks version {PROTOCOL} of the control protocol and {peer.worker} version "
            f"{peer.protocol}; run the same release of Baton on both."
        )
    if peer.digest != me.compatibility.digest:
        return (
            f"{me.worker} serves {me.model} and {peer.worker} serves {peer.model}, whose KV blocks cannot be "
            f"mixed: {me.compatibility.differences(peer.labels)} (digests {me.compatibility.digest} and "
            f"{peer.digest}). Start both with the same model, dtype and release."
        )
    return None


class _Greeting(msgspec.Struct, tag_field="type", tag="hello"):
    """A Hello of any version: only what must never change is read."""

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
    The prefill side: read Hello, answer Welcome. `admit` may name a further reason to refuse.

    Raises IncompatiblePeer after a Refuse was sent, TransferFailed for everything else.
    """
    try:
        async with asyncio.timeout(pace.handshake_s):
            body = await connection.receive_frame(HELLO_LIMIT)
    except TimeoutError as error:
        raise TransferFailed(f"{connection.peer} said nothing for {pace.handshake_s:g} s.") from error
    hello = _read_hello(body)
    reason = refusal(me, hello) or admit(hello)
    if reason is not None:
        connection.send(Refuse(reason=reason))
        raise IncompatiblePeer(f"Refused {hello.worker[:200]} at {connection.peer}: {reason}")
    connection.send(welcome())
    connection.start_heartbeat()
    return hello


async def introduce(connection: ControlConnection, me: Identity, hello: Hello, pace: Pace) -> Welcome:
    """The decode side: send Hello, read Welcome. Raises IncompatiblePeer or TransferFailed."""
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
            raise IncompatiblePeer(f"{connection.peer} refused this worker: {reason[:REASON_LIMIT]}")
        case Welcome() if answer.protocol == PROTOCOL and answer.digest == me.compatibility.digest:
            connection.start_heartbeat()
            return answer
        case Welcome():
            raise IncompatiblePeer(
                f"{connection.peer} welcomed this worker with protocol {answer.protocol} and digest "
                f"{answer.digest[:64]}, but here they are {PROTOCOL} and {me.compatibility.digest}."
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
        # Another version's Hello may have other fields; say so instead of "not a message".
        return Hello(protocol=greeting.protocol, worker=greeting.worker, epoch="", model="", digest="")
    if not isinstance(message, Hello):
        raise TransferFailed(f"The first message was {type(message).__name__}, not Hello.")
    return message
