"""
The gRPC server of the endpoint picker: Envoy opens one stream for each HTTP request.

It serves `envoy.service.ext_proc.v3.ExternalProcessor/Process` and gRPC health checks, in the process of the
scheduler. A stream that is cut cancels its handler, which releases the grant.

Gateways speak TLS to an endpoint picker and do not verify its certificate by default, so a self-signed one is
the default. One in a folder is read again for new connections when it has changed.
"""

from __future__ import annotations

import datetime
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from grpc_health.v1 import health_pb2

from baton_api.errors import SetupError
from baton_router.gateway.exchange import GatewayExchange, GatewayServices, UnsupportedMode
from baton_router.gateway.messages import ProcessingRequest, ProcessingResponse

SELF_SIGNED = "self-signed"
PLAINTEXT = "none"

VALID = datetime.timedelta(days=3650)
"""The process makes a new certificate at each start."""


def server_credentials(certificate: str) -> Any:
    """
    Credentials of a gRPC server; None for plaintext.

    `certificate`: `self-signed`, `none`, or a folder with `tls.crt` and `tls.key`. Raises SetupError.
    """
    if certificate == PLAINTEXT:
        return None
    if certificate == SELF_SIGNED:
        return grpc.ssl_server_credentials([_self_signed()])
    folder = CertificateFolder(Path(certificate))
    return grpc.dynamic_ssl_server_credentials(folder.read(), folder.changed)


class CertificateFolder:
    """A folder with `tls.crt` and `tls.key`, such as a mounted Secret."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._used: tuple[bytes, bytes] | None = None

    def read(self) -> Any:
        """The certificate as it is now. Raises SetupError."""
        try:
            self._used = self._pair()
        except OSError as error:
            raise SetupError(
                f"Cannot read the certificate of --gateway-certificate {self._folder}: {error}. The folder "
                "needs tls.crt and tls.key."
            ) from error
        return grpc.ssl_server_certificate_configuration([self._used])

    def changed(self) -> Any:
        """The certificate if it has changed; None if not, or if it cannot be read now."""
        try:
            pair = self._pair()
        except OSError:
            return None
        if pair == self._used:
            return None
        self._used = pair
        return grpc.ssl_server_certificate_configuration([pair])

    def _pair(self) -> tuple[bytes, bytes]:
        return (self._folder / "tls.key").read_bytes(), (self._folder / "tls.crt").read_bytes()


def _self_signed() -> tuple[bytes, bytes]:
    """A new key and its certificate, in PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "baton-router")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("baton-router")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return private, certificate.public_bytes(serialization.Encoding.PEM)


log = logging.getLogger(__name__)

SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH = "grpc.health.v1.Health"

LIVENESS = "liveness"
CHECKED = ("", LIVENESS, "readiness", SERVICE)
"""Services of health checks, as the protocol names them."""

FRAMING = 64 * 1024
"""Bytes of a message beside the body."""


class EndpointPicker:
    """Belongs to one event loop."""

    def __init__(self, services: GatewayServices, unready_reason: Callable[[], str | None]) -> None:
        """`unready_reason`: why the router should get no requests now; None if it may."""
        self._services = services
        self._unready_reason = unready_reason
        self._server: Any = None
        self.port = 0
        """Set once it listens."""

    async def start(self, host: str, port: int, certificate: str) -> None:
        """Listen. `certificate`: see `server_credentials`. Raises SetupError."""
        most = self._services.max_body + FRAMING
        self._server = server = grpc.aio.server(
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", most)]
        )
        server.add_generic_rpc_handlers(self._handlers())
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        credentials = server_credentials(certificate)
        try:
            if credentials is None:
                self.port = server.add_insecure_port(address)
            else:
                self.port = server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise SetupError(
                f"The endpoint picker cannot listen on {address}: another process has the port, or the "
                "address is invalid. Give another --gateway-port (0 takes a free one)."
            ) from error
        await server.start()
        log.info("The endpoint picker listens on %s:%d.", host, self.port)

    async def stop(self, grace_s: float) -> None:
        """Take no new streams, and end those that remain after `grace_s` seconds."""
        if self._server is not None:
            await self._server.stop(grace_s)

    async def process(
        self, requests: AsyncIterator[ProcessingRequest], context: Any
    ) -> AsyncIterator[ProcessingResponse]:
        """Serve one HTTP request."""
        exchange = GatewayExchange(self._services)
        try:
            async for message in requests:
                for reply in await exchange.replies(message):
                    yield reply
        except UnsupportedMode as error:
            log.error("%s", error)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        finally:
            exchange.close()

    async def check(self, request: Any, context: Any) -> Any:
        """Answer a health check."""
        if request.service not in CHECKED:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Unknown service: {request.service[:100]!r}.")
        status = health_pb2.HealthCheckResponse
        serving = request.service == LIVENESS or self._unready_reason() is None
        return status(status=status.SERVING if serving else status.NOT_SERVING)

    def _handlers(self) -> tuple[Any, ...]:
        process = grpc.stream_stream_rpc_method_handler(
            self.process,
            request_deserializer=ext_proc.ProcessingRequest.FromString,
            response_serializer=ext_proc.ProcessingResponse.SerializeToString,
        )
        check = grpc.unary_unary_rpc_method_handler(
            self.check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        return (
            grpc.method_handlers_generic_handler(SERVICE, {"Process": process}),
            grpc.method_handlers_generic_handler(HEALTH, {"Check": check}),
        )
