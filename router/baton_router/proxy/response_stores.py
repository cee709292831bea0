"""
Where the router keeps responses of `/v1/responses`: in its memory, or in a Redis that several routers share.

Both stores have the same limits and evict by the same rule (`baton_api.response_store`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from baton_api import installing
from baton_api.errors import SetupError
from baton_api.response_store import ResponseStore, StoreLimits, Turn
from baton_router.settings import RouterSettings

MEMORY = "memory"
"""The value of `--response-store` that is no URL."""


class RouterResponseStore(Protocol):
    """
    The responses of all owners, for one event loop.

    Each method raises StorageUnavailable within seconds if the store does not answer.
    """

    async def put(self, owner: bytes, turn: Turn) -> None:
        """Store `turn` and evict others if needed. A turn larger than the store is not stored."""
        ...

    async def get(self, owner: bytes, id: str) -> Turn:
        """Return a response. Raises ResponseNotFound if it does not exist or has another owner."""
        ...

    async def items(self, owner: bytes, ids: Collection[str]) -> dict[str, bytes]:
        """Return those of an owner's items that retrievable responses have, by their ids."""
        ...

    async def delete(self, owner: bytes, id: str) -> None:
        """Delete a response. Raises ResponseNotFound."""
        ...

    async def close(self) -> None: ...


class MemoryResponseStore:
    """A store that this router has alone, and that a restart empties."""

    def __init__(self, store: ResponseStore) -> None:
        self.store = store

    async def put(self, owner: bytes, turn: Turn) -> None:
        self.store.put(owner, turn)

    async def get(self, owner: bytes, id: str) -> Turn:
        return self.store.get(owner, id)

    async def items(self, owner: bytes, ids: Collection[str]) -> dict[str, bytes]:
        return self.store.items(owner, ids)

    async def delete(self, owner: bytes, id: str) -> None:
        self.store.delete(owner, id)

    async def close(self) -> None:
        pass


def open_store(settings: RouterSettings, failed: Callable[[str], None]) -> RouterResponseStore:
    """
    Return the store of `--response-store`; `failed` hears of each operation, read or write, that failed.

    Raises SetupError for an invalid URL, and if the package is missing.
    """
    limits = StoreLimits(settings.responses_kept, settings.responses_memory, settings.responses_ttl_s)
    where = settings.response_store.get_secret_value()
    if where == MEMORY:
        return MemoryResponseStore(ResponseStore(limits))
    try:
        from baton_router.proxy.redis_responses import RedisResponseStore
    except ModuleNotFoundError as error:
        raise SetupError(
            f"--response-store needs one package more: {installing.command('redis')}."
        ) from error
    return RedisResponseStore(where, limits, failed)
