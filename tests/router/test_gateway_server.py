"""The gateway port: its certificates, and how it fails to start."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from baton_api.errors import SetupError
from tests.authority import PEM, Authority
from tests.ports import steady_port
from tests.router.fake_worker import FakeWorker, whole_answer
from tests.router.running import QUESTION, running_router
from tests.router.test_frontend_pool import running_pool

grpc = pytest.importorskip("grpc")
pytest.importorskip("envoy.service.ext_proc.v3.external_processor_pb2")

from tests.router.fake_envoy import RoutedHead, envoy  # noqa: E402

NAME = "baton-router"


async def chosen(port: int, roots: bytes, name: str = NAME) -> str:
    """The destination of a request over TLS to a server that `roots` vouch for."""
    credentials = grpc.ssl_channel_credentials(roots)
    options = [("grpc.ssl_target_name_override", name)]
    async with envoy(port, credentials, options) as gateway:
        reply = await gateway.stream().request(QUESTION)
    assert isinstance(reply, RoutedHead)
    return reply.destination


async def test_port_speaks_tls_with_self_signed_certificate() -> None:
    async with FakeWorker() as decode, running_router([decode], gateway_port=0) as running:
        assert running.router.endpoint_picker is not None
        port = running.router.endpoint_picker.port
        pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port), timeout=60)
        assert await chosen(port, pem.encode()) == decode.name


async def test_replaced_certificate_is_used_for_new_streams(tmp_path: Path) -> None:
    """A rotated Secret needs no restart; files that are missing meanwhile change nothing."""
    first, second = Authority(), Authority()
    first.fill(tmp_path, NAME)
    async with (
        FakeWorker() as decode,
        running_router([decode], gateway_port=0, gateway_certificate=str(tmp_path)) as running,
    ):
        assert running.router.endpoint_picker is not None
        port = running.router.endpoint_picker.port
        old = first.certificate.public_bytes(PEM)
        assert await chosen(port, old) == decode.name
        (tmp_path / "tls.key").rename(tmp_path / "aside")
        assert await chosen(port, old) == decode.name
        second.fill(tmp_path, NAME)
        assert await chosen(port, second.certificate.public_bytes(PEM)) == decode.name


async def test_missing_certificate_names_folder_and_files(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"--gateway-certificate .*tls.crt and tls.key"):
        async with running_router(gateway_port=0, gateway_certificate=str(tmp_path / "none"), wait=False):
            pass


async def test_taken_port_is_a_setup_error() -> None:
    async with running_router(gateway_port=0, gateway_certificate="none", wait=False) as running:
        assert running.router.endpoint_picker is not None
        taken = running.router.endpoint_picker.port
        with pytest.raises(SetupError, match=rf"127\.0\.0\.1:{taken}.*--gateway-port"):
            async with running_router(gateway_port=taken, gateway_certificate="none", wait=False):
                pass


@pytest.mark.slow
async def test_frontend_pool_serves_gateways_from_its_scheduler() -> None:
    """With several processes the scheduler's process has the gateway port."""
    port = steady_port()
    async with (
        FakeWorker() as decode,
        running_pool(decode, gateway_port=port, gateway_certificate="none") as pool,
        envoy(port) as gateway,
    ):
        stream = gateway.stream()
        reply = await stream.request(QUESTION)
        assert isinstance(reply, RoutedHead) and reply.destination == decode.name
        await stream.response_headers(200, {"content-type": "application/json"})
        await stream.response_body(whole_answer(), end=True)
        await stream.done()
        assert (await pool.counted(1))["scheduler"] == 1
