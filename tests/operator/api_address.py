"""The address of API servers: connections go to one of them, and break when that one ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class ApiAddress:
    """A TCP proxy. New connections are forwarded to `target`, a port of 127.0.0.1."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.port = 0

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, to_server), _copy(from_server, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until one side ends, which ends the other side."""
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def api_address(target: int) -> AsyncIterator[ApiAddress]:
    address = ApiAddress(target)
    server = await asyncio.start_server(address.forward, "127.0.0.1", 0)
    address.port = server.sockets[0].getsockname()[1]
    try:
        yield address
    finally:
        server.close()
        await server.wait_closed()
