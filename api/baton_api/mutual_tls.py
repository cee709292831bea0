"""
Mutual TLS: both sides present a certificate of one authority, for one DNS name.

The files are in one folder, as Kubernetes mounts a Secret: `tls.crt`, `tls.key`, `ca.crt`. Each new
connection uses their current content, so a renewed certificate or authority needs no restart. Open
connections continue. If a renewal is incomplete or invalid, the previous files stay in use. Peers are
identified by the name in their certificate and not by their address, because pods change addresses.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from baton_api.errors import SetupError
from baton_api.watched import WatchedFile

log = logging.getLogger(__name__)

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"

Clock = Callable[[], float]


def server(folder: str, name: str, clock: Clock = time.monotonic) -> ssl.SSLContext | None:
    """
    Return the context of a server with the files of `folder`, or None if `folder` is empty.

    A peer's certificate must have `name` among its DNS names. An empty `name` accepts every certificate of
    the authority. Raises SetupError if a file is missing or invalid.
    """
    return _Renewed(folder, name, ssl.PROTOCOL_TLS_SERVER, clock) if folder else None


def client(folder: str, name: str, clock: Clock = time.monotonic) -> ssl.SSLContext | None:
    """Return the context of a client. See `server`."""
    return _Renewed(folder, name, ssl.PROTOCOL_TLS_CLIENT, clock) if folder else None


def validity(context: ssl.SSLContext | None) -> CertificateValidity | None:
    """Return the validity of the certificate that a context of this module presents."""
    return context.validity if isinstance(context, _Renewed) else None


class _Renewed(ssl.SSLContext):
    """A context that delegates to one with the current content of the files."""

    _folder: Path
    _name: str
    _watched: tuple[WatchedFile, ...]
    _now: ssl.SSLContext
    _lock: threading.Lock
    _validity: CertificateValidity | None

    def __new__(cls, folder: str, name: str, protocol: int, clock: Clock) -> _Renewed:
        context = super().__new__(cls, protocol)
        context._folder = Path(folder).expanduser()
        context._name = name
        context._lock = threading.Lock()
        files = (CERTIFICATE, KEY, AUTHORITY)
        context._watched = tuple(WatchedFile(str(context._folder / file), clock) for file in files)
        try:
            context._now = context._read()
        except OSError as error:  # the base of ssl.SSLError
            raise SetupError(
                f"Cannot read --tls-folder {context._folder}: {error}. "
                f"It needs valid files {CERTIFICATE}, {KEY} and {AUTHORITY}."
            ) from error
        return context

    @property
    def validity(self) -> CertificateValidity | None:
        """The validity of the certificate in use."""
        self._current()
        return self._validity

    def wrap_bio(self, *arguments: object, **named: object) -> ssl.SSLObject:
        """Create the TLS of a connection. Event loops call this."""
        return self._current().wrap_bio(*arguments, **named)  # type: ignore[arg-type]

    def _current(self) -> ssl.SSLContext:
        with self._lock:
            # Check every file, so that no change is left for the next call.
            changed = [file for file in self._watched if file.changed()]
            if changed:
                try:
                    self._now = self._read()
                    log.info("Reloaded the certificate in %s.", self._folder)
                except OSError as error:
                    log.error(
                        "Cannot reload the certificate in %s; the previous one stays in use: %s",
                        self._folder,
                        error,
                    )
            return self._now

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(self.protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False  # `_named` checks the name
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self._folder / CERTIFICATE, self._folder / KEY)
        context.load_verify_locations(self._folder / AUTHORITY)
        if self.protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # no session resumption without a certificate
        context.sslobject_class = _named(self._name)
        try:
            self._validity = read_validity((self._folder / CERTIFICATE).read_text())
        except ValueError as error:  # OpenSSL accepts more formats than this module
            log.warning("Cannot read the expiry of the certificate in %s: %s", self._folder, error)
            self._validity = None
        return context


def _named(name: str) -> type[ssl.SSLObject]:
    """Return a class of connections that require a peer of this name."""

    class Named(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            shown: Mapping[str, Any] = self.getpeercert() or {}
            names = [value for kind, value in shown.get("subjectAltName", ()) if kind == "DNS"]
            if name and name not in names:
                raise ssl.SSLCertVerificationError(
                    f"the peer's certificate is for {', '.join(names) or 'no name'}, not for {name}"
                )

    return Named


VERSION, UTC_TIME = 0xA0, 0x17
LONG = 0x80
"""A DER length below this is the length. From it on, the low bits are the number of length bytes that
follow."""


@dataclass(frozen=True, slots=True)
class CertificateValidity:
    """The validity period of a certificate, in Unix seconds."""

    begin: float
    end: float


def read_validity(pem: str) -> CertificateValidity:
    """
    Read the validity of the first certificate of a file.

    In DER, it follows an optional version, the serial number, the algorithm and the issuer (RFC 5280, 4.1).
    Raises ValueError if the file has no readable certificate.
    """
    begin, marker = pem.find(ssl.PEM_HEADER), pem.find(ssl.PEM_FOOTER)
    if begin < 0 or marker < begin:
        raise ValueError("the file has no certificate")
    der = ssl.PEM_cert_to_DER_cert(pem[begin : marker + len(ssl.PEM_FOOTER)])
    try:
        _, certificate, _ = _read(der)
        _, signed, _ = _read(certificate)
        tag, _, after = _read(signed)
        rest = after if tag == VERSION else signed
        for _ in ("serial number", "algorithm", "issuer"):
            _, _, rest = _read(rest)
        _, times, _ = _read(rest)
        kind, first, rest = _read(times)
        other, second, _ = _read(rest)
        return CertificateValidity(_time(kind, first), _time(other, second))
    except IndexError as error:
        raise ValueError("the certificate is truncated") from error


def _read(der: bytes) -> tuple[int, bytes, bytes]:
    """Split off the first DER value: its tag, its content, and the rest."""
    length, start = der[1], 2
    if length >= LONG:
        start += length - LONG
        length = int.from_bytes(der[2:start], "big")
    if start + length > len(der):
        raise IndexError
    return der[0], der[start : start + length], der[start + length :]


def _time(kind: int, text: bytes) -> float:
    """Parse a DER time. Years of two digits are 1950 to 2049."""
    digits = text.decode("ascii")
    if kind == UTC_TIME:
        digits = ("19" if digits[:2] >= "50" else "20") + digits
    return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
