"""A certificate authority for tests. It signs every request."""

from __future__ import annotations

import datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DAY = datetime.timedelta(days=1)
PEM = serialization.Encoding.PEM


class Authority:
    """Each has a key of its own, and all are called the same."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("authority")
        self.certificate = (
            self._begun(self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )

    def fill(self, folder: Path, name: str, *, over: bool = False) -> Path:
        """Have the folder hold a new key and its certificate for `name`; one whose time is `over` already."""
        folder.mkdir(exist_ok=True)
        key = ec.generate_private_key(ec.SECP256R1())
        builder = (
            self._begun(_name(name), key.public_key(), -DAY if over else DAY)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        secret = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        files = {
            "tls.crt": builder.public_bytes(PEM),
            "tls.key": secret,
            "ca.crt": self.certificate.public_bytes(PEM),
        }
        for file, content in files.items():
            (folder / f"{file}.new").write_bytes(content)
            (folder / f"{file}.new").replace(folder / file)  # another file, as a mounted Secret's is
        return folder

    def _begun(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey, left: datetime.timedelta = DAY
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * DAY)
            .not_valid_after(now + left)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
            .add_extension(own, critical=False)
        )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])
