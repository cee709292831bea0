"""Mutual TLS: admission by certificate, and replacement of certificates between connections."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from baton_api import mutual_tls
from baton_api.errors import SetupError
from baton_api.watched import LOOK_S
from tests.authority import Authority

NAME = "chat.models.baton"
OURS, THEIRS = Authority(), Authority()


class Clock:
    """A clock that advances at each call, so that the files are checked each time."""

    now = 0.0

    def __call__(self) -> float:
        self.now += 2 * LOOK_S
        return self.now


class Greeter:
    """A server that greets admitted clients."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder = folder
        self.port = port

    async def greets(self, tls: ssl.SSLContext | None) -> bool:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=tls)
        except (ssl.SSLError, ConnectionError):
            return False
        try:
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            return await reader.read(5) == b"hello"
        except (ssl.SSLError, ConnectionError):
            return False
        finally:
            writer.transport.abort()


@asynccontextmanager
async def greeter(folder: Path) -> AsyncIterator[Greeter]:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    tls = mutual_tls.server(str(folder), NAME, Clock())
    server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield Greeter(folder, server.sockets[0].getsockname()[1])


def shows(folder: Path, name: str = NAME) -> ssl.SSLContext:
    context = mutual_tls.client(str(folder), name, Clock())
    assert context is not None
    return context


def without_certificate(folder: Path) -> ssl.SSLContext:
    """Trusts the authority, and shows nothing."""
    context = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    context.check_hostname = False
    return context


async def test_client_needs_a_valid_certificate_of_the_right_name(tmp_path: Path) -> None:
    async with greeter(OURS.fill(tmp_path / "server", NAME)) as server:
        assert await server.greets(shows(OURS.fill(tmp_path / "right", NAME)))
        of_another = OURS.fill(tmp_path / "name", "other.models.baton")
        foreign = THEIRS.fill(tmp_path / "foreign", NAME)
        # He believes us; we must not believe him.
        (foreign / "ca.crt").write_bytes((server.folder / "ca.crt").read_bytes())
        over = OURS.fill(tmp_path / "over", NAME, over=True)
        assert not await server.greets(shows(of_another))
        assert not await server.greets(shows(foreign))
        assert not await server.greets(shows(over))
        assert not await server.greets(without_certificate(server.folder))
        assert not await server.greets(None)
        assert await server.greets(shows(tmp_path / "right")), "it serves on"


@pytest.mark.parametrize(
    ("authority", "name", "over"),
    [(THEIRS, NAME, False), (OURS, "other.models.baton", False), (OURS, NAME, True)],
    ids=["of another authority", "of another name", "over"],
)
async def test_server_with_a_wrong_certificate_is_rejected(
    tmp_path: Path, authority: Authority, name: str, over: bool
) -> None:
    folder = authority.fill(tmp_path / "server", name, over=over)
    async with greeter(folder) as server:
        client = OURS.fill(tmp_path / "client", NAME)
        with pytest.raises(ssl.SSLCertVerificationError):
            await asyncio.open_connection("127.0.0.1", server.port, ssl=shows(client))


async def test_certificate_without_a_name_is_checked_by_authority(tmp_path: Path) -> None:
    async with greeter(OURS.fill(tmp_path / "server", NAME)) as server:
        client = shows(OURS.fill(tmp_path / "client", NAME), name="")
        assert await server.greets(client)


async def test_replaced_certificate_applies_to_the_next_connection(tmp_path: Path) -> None:
    folder, client = OURS.fill(tmp_path / "server", NAME), OURS.fill(tmp_path / "client", NAME)
    ours = shows(client)
    async with greeter(folder) as server:
        assert await server.greets(ours)
        THEIRS.fill(folder, NAME)
        assert not await server.greets(ours), "its authority is another now"
        THEIRS.fill(client, NAME)
        assert await server.greets(ours), "and so is ours"
        stale = shows(OURS.fill(tmp_path / "stale", NAME))
        assert not await server.greets(stale), "the one before is not believed any more"


async def test_incomplete_replacement_has_no_effect(tmp_path: Path) -> None:
    folder, client = OURS.fill(tmp_path / "server", NAME), OURS.fill(tmp_path / "client", NAME)
    async with greeter(folder) as server:
        (folder / "tls.crt").write_text("half")
        assert await server.greets(shows(client))
        (folder / "tls.key").unlink()
        assert await server.greets(shows(client))
        THEIRS.fill(folder, NAME)
        assert await server.greets(shows(THEIRS.fill(client, NAME)))


def test_folder_without_the_files_is_refused(tmp_path: Path) -> None:
    assert mutual_tls.server("", "") is None
    with pytest.raises(SetupError, match=r"It needs valid files tls.crt, tls.key and ca.crt"):
        mutual_tls.server(str(tmp_path), "")
