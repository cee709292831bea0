"""Creation of the transfer that the setting `transfer` selects."""

from __future__ import annotations

from typing import TYPE_CHECKING

from baton_api.errors import SetupError
from baton_engine.kv.cache import KVCache
from baton_engine.transfer import Transfer
from baton_engine.transfer.loopback import LoopbackTransfer

if TYPE_CHECKING:
    from baton_engine.transfer.nixl_transfer import OtherRanks


async def create_transfer(
    kind: str, cache: KVCache, worker: str, others: OtherRanks | None = None
) -> Transfer:
    """
    Create the transfer named `kind`, with `cache` registered. Raises SetupError if it is not available.

    `cache` is that of rank 0, and `others` transfer the blocks of the other ranks.
    `loopback` works between workers of one process only; it never replaces `nixl` silently.
    """
    match kind:
        case "nixl":
            from baton_engine.transfer.nixl_transfer import NixlTransfer

            return await NixlTransfer.create(cache, worker, others)
        case "loopback" if others is not None:
            raise SetupError("--tensor-parallel-size does not support --transfer loopback. Use nixl.")
        case "loopback":
            return LoopbackTransfer(cache, worker)
        case _:
            raise ValueError(f"unknown transfer {kind!r}")
