"""
A fake API server for EndpointSlices: lists, watches, bookmarks, versions that expire.

It fails on command: does not answer, breaks watches off, loses events, rejects requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import json
import ssl
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from baton_api import labels

PATH = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
SELECTOR = "baton.dev/service=chat"


def a_slice(
    name: str, *addresses: str, role: str = "decode", revision: str = "r1", **conditions: bool
) -> Any:
    return {
        "metadata": {"name": name, "labels": {labels.ROLE: role, labels.REVISION: revision}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [address], "conditions": conditions} for address in addresses],
        "ports": [{"name": "http", "port": 8000}],
    }


class FakeKubernetes:
    """`async with FakeKubernetes(folder) as api`; `api.account` is a folder as Kubernetes mounts it."""

    def __init__(self, folder: Path) -> None:
        self.account = folder / "account"
        self.token = "token-1"
        self.silent = False
        """With it, nothing is answered."""
        self.status = 0
        """With it, everything is answered so."""
        self.lists = 0
        self.watches: list[str] = []
        """The versions from which clients watched."""
        self._slices: dict[str, Any] = {}
        self._events: list[tuple[int, str, Any]] = []
        self._version = 100
        self._oldest = 0
        """Watches from before this one have expired."""
        self._news = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> FakeKubernetes:
        self.account.mkdir(exist_ok=True)
        (self.account / "namespace").write_text("models")
        (self.account / "token").write_text(self.token + "\n")
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate(self.account))
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, ssl=tls)
        self.url = f"https://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def addresses(self) -> set[str]:
        return {one["addresses"][0] for item in self._slices.values() for one in item["endpoints"]}

    def put(self, item: Any, *, lose: bool = False) -> None:
        """Make or change a slice; with `lose` no watch hears of it."""
        kind = "MODIFIED" if item["metadata"]["name"] in self._slices else "ADDED"
        self._slices[item["metadata"]["name"]] = item
        self._happen(kind, item, lose)

    def delete(self, name: str, *, lose: bool = False) -> None:
        self._happen("DELETED", self._slices.pop(name), lose)

    def bookmark(self) -> None:
        self._happen("BOOKMARK", {"kind": "EndpointSlice", "metadata": {}}, False)

    def expire(self) -> None:
        """All watches end, and cannot be taken up again from any version up to now."""
        self._version += 1
        self._oldest = self._version
        self._tell()

    def break_off(self) -> None:
        """End all watches in the middle."""
        for writer in list(self._watching):
            writer.transport.abort()

    def _happen(self, kind: str, item: Any, lose: bool) -> None:
        self._version += 1
        stored = json.loads(json.dumps(item))
        stored["metadata"]["resourceVersion"] = str(self._version)
        if not lose:
            self._events.append((self._version, kind, stored))
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                target = head.split(" ")[1]
                if self.silent:
                    await reader.read(1)
                elif f"authorization: Bearer {self.token}\r\n" not in head:
                    writer.write(_answer(401, {}))
                elif self.status:
                    writer.write(_answer(self.status, {}))
                else:
                    await self._give(target, writer)
        writer.close()

    async def _give(self, target: str, writer: asyncio.StreamWriter) -> None:
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        if parts.path != PATH or query["labelSelector"] != SELECTOR:
            writer.write(_answer(403, {}))
        elif "watch" in query:
            await self._watch(query, writer)
        else:
            self.lists += 1
            metadata = {"resourceVersion": str(self._version)}
            writer.write(_answer(200, {"metadata": metadata, "items": list(self._slices.values())}))

    async def _watch(self, query: dict[str, str], writer: asyncio.StreamWriter) -> None:
        seen = int(query["resourceVersion"])
        assert query["allowWatchBookmarks"] == "true"
        self.watches.append(query["resourceVersion"])
        if seen < self._oldest:
            writer.write(_answer(410, {}))
            return
        self._watching.add(writer)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        try:
            async with asyncio.timeout(float(query["timeoutSeconds"])):
                while seen >= self._oldest:
                    for version, kind, item in [one for one in self._events if one[0] > seen]:
                        _event(writer, kind, item)
                        seen = version
                    await writer.drain()
                    await self._news.wait()
                _event(writer, "ERROR", {"kind": "Status", "code": 410, "reason": "Expired"})
        except TimeoutError:
            pass
        finally:
            self._watching.discard(writer)
        writer.write(b"0\r\n\r\n")


def _event(writer: asyncio.StreamWriter, kind: str, item: Any) -> None:
    line = json.dumps({"type": kind, "object": item}).encode() + b"\n"
    for piece in (line[:20], line[20:]):  # events are not cut where chunks are
        writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))


def _answer(status: int, body: Any) -> bytes:
    text = json.dumps(body).encode()
    return b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n%b" % (status, len(text), text)


def certificate(account: Path) -> Path:
    """A file with a server's key and certificate; its authority's goes where clients look for it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "kubernetes")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    key_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    stored = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(key_id, critical=False)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (account / "ca.crt").write_bytes(stored.public_bytes(pem))
    secret = key.private_bytes(
        pem, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    server = account.parent / "server.pem"
    server.write_bytes(secret + stored.public_bytes(pem))
    return server
