"""A router, a prefill and a decode worker that speak to each other only by certificate; blocks over NIXL."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.authority import Authority
from tests.engine.models import make_model
from tests.faults.cluster import CONTEXT, TIMEOUT_S, Cluster, Node, until
from tests.ports import steady_port

pytestmark = [pytest.mark.nixl, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

NAME = "chat.models.svc.cluster.local"
OURS, THEIRS = Authority(), Authority()


class Certified(Cluster):
    """The same cluster by TLS. Clients outside of it ask workers at their ports for probes."""

    folder: Path

    def client(self, folder: Path) -> httpx.AsyncClient:
        """One who shows what is in the folder, if anything is."""
        tls = ssl.create_default_context(cafile=str(self.folder / "ca.crt"))
        tls.check_hostname = False
        if (folder / "tls.crt").exists():
            tls.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        return httpx.AsyncClient(verify=tls, trust_env=False, timeout=TIMEOUT_S)

    async def relayed(self) -> bool:
        """Whether a prompt goes all the way over, and is answered as by the reference worker."""
        prompt = self.prompt(100)
        answer = await self.ask(prompt)
        await self.same_as_reference(prompt, answer)
        async with self.client(self.folder) as asking:
            url = f"https://127.0.0.1:{self.decode.port}/debug/requests"
            rows = (await asking.get(url)).raise_for_status().json()["data"]
        return any(row["relays"] for row in rows if row["id"] == answer["id"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Certified]:
    pytest.importorskip("nixl", reason="the NIXL library is missing")
    folder = tmp_path_factory.mktemp("certified")
    certificates = OURS.fill(folder / "mtls", NAME)
    model = make_model(folder / "tiny", max_position_embeddings=CONTEXT)
    shared = [str(model), "--served-model-name=tiny", "--dtype=float32", "--threads=1"]
    shared += ["--kv-cache-memory=64MiB"]
    tls = [f"--tls-folder={certificates}", f"--tls-name={NAME}"]
    async with (
        httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as http,
        contextlib.AsyncExitStack() as stack,
    ):
        prefill, decode = (
            Node(role, (role, *shared, *tls, f"--health-port={steady_port()}"), http)
            for role in ("prefill", "decode")
        )
        reference = Node("alone", ("serve", *shared), http)
        for node in (prefill, decode, reference):
            stack.push_async_callback(node.stop)
        await asyncio.gather(prefill.start(), decode.start(), reference.start())
        urls = [f"--{node.name}=https://127.0.0.1:{node.port}" for node in (prefill, decode)]
        router = Node("router", ("router", *urls, *tls, "--local-prefill-max-tokens=0"), http)
        stack.push_async_callback(router.stop)
        await router.start()
        certified = Certified(router, prefill, decode, reference, http, random.Random(11))
        certified.folder = certificates
        await until(certified._sees_both, "the router sees both workers")
        await until(certified.relayed, "a prompt is computed by the prefill worker")
        yield certified


async def refused(client: httpx.AsyncClient, url: str) -> bool:
    async with client:
        try:
            await client.get(url)
        except httpx.TransportError:
            return True
    return False


async def test_mutual_tls_worker_admits_only_the_services_certificates(
    cluster: Certified, tmp_path: Path
) -> None:
    for node in (cluster.prefill, cluster.decode):
        url = f"https://127.0.0.1:{node.port}/load"
        assert not await refused(cluster.client(cluster.folder), url)
        assert await refused(cluster.client(tmp_path), url), "nothing is shown"
        assert await refused(cluster.client(THEIRS.fill(tmp_path / "foreign", NAME)), url)
        assert await refused(cluster.client(OURS.fill(tmp_path / "neighbour", "other.models")), url)
        plain = httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_S)
        assert await refused(plain, url.replace("https", "http"))
    await until(cluster.relayed, "it works on")


async def test_mutual_tls_control_server_rejects_other_certificates(
    cluster: Certified, tmp_path: Path
) -> None:
    host, port = "127.0.0.1", cluster.prefill.control_port
    tls = ssl.create_default_context(cafile=str(cluster.folder / "ca.crt"))
    tls.check_hostname = False
    for shown in (None, tls):
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection(host, port, ssl=shown)
            writer.write(b"\0\0\0\1x")
            assert await reader.read(1) == b"", "the connection ends without a word"
            writer.transport.abort()
    await until(cluster.relayed, "it works on")


async def test_mutual_tls_probe_port_serves_only_probes_and_metrics(
    cluster: Certified,
) -> None:
    assert cluster.decode.process is not None
    port = next(one.removeprefix("--health-port=") for one in cluster.decode.arguments if "health" in one)
    for path, status in (
        ("/health", 200),
        ("/ready", 200),
        ("/metrics", 200),
        ("/load", 404),
        ("/v1/models", 404),
    ):
        assert (await cluster.http.get(f"http://127.0.0.1:{port}{path}")).status_code == status, path


async def test_mutual_tls_new_certificate_and_authority_are_reloaded(
    cluster: Certified, tmp_path: Path
) -> None:
    before = OURS.fill(tmp_path / "before", NAME)
    THEIRS.fill(cluster.folder, NAME)

    async def taken_over() -> bool:
        return await refused(_of_both(cluster, before), f"https://127.0.0.1:{cluster.decode.port}/load")

    await until(taken_over, "who shows a certificate of the old authority is let in no more")
    await until(cluster.relayed, "the router and both workers go on by the new one")
    assert all(node.process is not None for node in (cluster.router, cluster.prefill, cluster.decode))


def _of_both(cluster: Certified, folder: Path) -> httpx.AsyncClient:
    """Shows what is in the folder, and trusts both authorities."""
    tls = ssl.create_default_context(cafile=str(cluster.folder / "ca.crt"))
    tls.load_verify_locations(folder / "ca.crt")
    tls.check_hostname = False
    tls.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    return httpx.AsyncClient(verify=tls, trust_env=False, timeout=TIMEOUT_S)
