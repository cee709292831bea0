"""
The secret that signs runners' tokens: from the settings, or kept in the database that routers share.

A secret made of the database's URL would change with the password in it, and routers that have the new
password already would refuse the runners of those that have the old one. So the first router that needs a
secret makes one by chance and keeps it beside the ledger. A router without a shared database keeps its own in
memory: its runners end with it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import secrets
from contextlib import closing

from baton_batches.settings import BatchSettings

NAME = "runner tokens"

BYTES = 32

_MADE = secrets.token_bytes(BYTES)
"""The secret of a router that was given none: made before it forks, so that its processes share it."""


def secret_of(settings: BatchSettings, ticket_secret: str) -> bytes | None:
    """The secret that the settings give; None if it is in the database."""
    if given := settings.batch_secret.get_secret_value():
        return given.encode()
    if settings.database.get_secret_value():
        return None
    if ticket_secret:
        return hmac.new(ticket_secret.encode(), b"baton-batch-runners", hashlib.sha256).digest()
    return _MADE


class RunnerSecret:
    """One process's. Belongs to its event loop, but for `value`."""

    def __init__(self, settings: BatchSettings, ticket_secret: str) -> None:
        """Connects to nothing yet."""
        self._url = settings.database.get_secret_value()
        self._loading = asyncio.Lock()
        self.value = secret_of(settings, ticket_secret) or b""
        """Empty until `get` has read it from the database: no token is good then."""

    async def get(self) -> bytes:
        """Raises StorageUnavailable while it is in a database that is away."""
        if not self.value:
            async with self._loading:
                self.value = self.value or await asyncio.to_thread(kept_in, self._url)
        return self.value


def kept_in(url: str) -> bytes:
    """The secret in the database at `url`, made if there is none. Raises StorageUnavailable."""
    # A library that processes which only pass requests on do not need.
    from sqlalchemy import select

    from baton_batches.database import Database
    from baton_batches.rows import insert_new
    from baton_batches.schema import kept_secrets

    wanted = select(kept_secrets.c.value).where(kept_secrets.c.name == NAME)
    with closing(Database(url)) as database, database.writing() as connection:
        new = {"name": NAME, "value": secrets.token_hex(BYTES)}
        connection.execute(insert_new(connection, kept_secrets).values(new))
        return bytes.fromhex(connection.execute(wanted).scalar_one())
