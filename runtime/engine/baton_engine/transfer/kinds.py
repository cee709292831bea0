"""Creation of the transfer that the setting `transfer` selects."""

from __future__ import annotations

from baton_engine.kv.cache import KVCache
from baton_engine.transfer import Transfer
from baton_engine.transfer.loopback import LoopbackTransfer


async def create_transfer(kind: str, cache: KVCache, worker: str) -> Transfer:
    """
    Create the transfer named `kind`, with `cache` registered. Raises SetupError if it is not available.

    `loopback` works between workers of one process only; it never replaces `nixl` silently.
    """
    match kind:
        case "nixl":
            from baton_engine.transfer.nixl import NixlTransfer

            return await NixlTransfer.create(cache, worker)
        case "loopback":
            return LoopbackTransfer(cache, worker)
        case _:
            raise ValueError(f"unknown transfer {kind!r}")
