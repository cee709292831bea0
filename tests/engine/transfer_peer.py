"""Workers in processes of their own, for the tests of the transfer: see `transfer_links.Child`."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

from baton_api.errors import TransferFailed
from baton_api.messages import PoolLayout
from baton_engine.transfer import ucx
from baton_engine.transfer.integrity import seal, unseal
from baton_engine.transfer.nixl_transfer import NixlTransfer
from tests.engine.local_ranks import local_pools
from tests.engine.transfer_pools import fill, pattern, pool, pools_of


async def serve(parent: Connection, blocks: int, layers: int, seed: int, ranks: int) -> None:
    """Hold `pattern(blocks, layers, seed)`, say where, and serve; then obey `rest` and `serve`."""
    parts = pools_of(ranks, blocks, layers)
    for part in parts:
        fill(part, pattern(blocks, layers, seed))
    transfer = await NixlTransfer.create(parts[0], "peer", local_pools(parts))
    parent.send((transfer.metadata, transfer.pools, secrets.token_hex(8)))
    with ExitStack() as serving:
        serving.enter_context(transfer.serve())
        while True:
            match await asyncio.to_thread(parent.recv):
                case "rest":
                    serving.close()
                case "serve":
                    serving.enter_context(transfer.serve())
            parent.send("ok")


async def read(
    parent: Connection, blocks: int, layers: int, metadata: bytes, theirs: tuple[PoolLayout, ...]
) -> None:
    """Read all blocks of a peer again and again; say `prompt_output` after the first time."""
    transfer = await NixlTransfer.create(pool(blocks, layers), "reader")
    peer = await transfer.connect(metadata, theirs, "epoch")
    scattered = random.Random(1).sample(range(blocks), blocks)
    await transfer.pull(peer, scattered, range(blocks)).settled()
    parent.send("reading")
    Thread(target=end_with, args=(parent,), daemon=True).start()
    while True:
        await transfer.pull(peer, scattered, range(blocks)).settled()


def end_with(parent: Connection) -> None:
    try:
        parent.recv()
    except EOFError:
        os._exit(0)


async def fuzz(parent: Connection, seed: int, count: int) -> None:
    """Hand NIXL `count` mutated metadata; say how it took each."""
    chance = random.Random(seed)
    victim = await NixlTransfer.create(pool(4), "victim")
    reader = await NixlTransfer.create(pool(4), "reader")
    with ucx.environment():
        wire = ucx.wire()
    plain, place = unseal(victim.metadata, wire)
    for _ in range(count):
        mutant = bytearray(plain)
        for _ in range(chance.randint(1, 8)):
            mutant[chance.randrange(len(mutant))] = chance.randrange(256)
        del mutant[chance.randint(len(mutant) // 2, 2 * len(mutant)) :]
        try:
            peer = await reader.connect(seal(bytes(mutant), wire, place), victim.pools, "epoch")
            await reader.disconnect(peer)
            parent.send("taken")
        except TransferFailed:
            parent.send("refused")


ROLES: dict[str, Callable[..., Coroutine[Any, Any, None]]] = {"serve": serve, "read": read, "fuzz": fuzz}


def run(role: str, tls: str | None, parent: Connection, *details: Any) -> None:
    """The process's main function; it ends with its parent."""
    if tls is None:
        os.environ.pop("UCX_TLS", None)
    else:
        os.environ["UCX_TLS"] = tls
    try:
        asyncio.run(ROLES[role](parent, *details))
    except EOFError:
        return
