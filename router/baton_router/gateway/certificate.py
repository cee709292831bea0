"""
Certificates of the gateway port.

Gateways speak TLS to an endpoint picker and do not verify its certificate by default, so a self-signed one is
the default. One in a folder is read again for new connections when it has changed.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import grpc

from baton_api.errors import SetupError

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
