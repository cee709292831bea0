"""
TLS in which both sides show a certificate: one authority's, and of one name.

The files lie in one folder as Kubernetes keeps them in a Secret: `tls.crt`, `tls.key`, `ca.crt`. Each new
connection is made with what they hold then, so a certificate that was replaced, or an authority, needs no
restart; connections that stand go on. Half of a replacement is none: what worked before stays in use until
the files are good again. Peers are known by a name in their certificate and not by their address, which for
pods is a new one each time.
"""

from __future__ import annotations

import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from baton_api import certificate_term
from baton_api.certificate_term import Term
from baton_api.errors import SetupError
from baton_api.watched import WatchedFile

log = logging.getLogger(__name__)

CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"

Clock = Callable[[], float]


def server(folder: str, name: str, clock: Clock = time.monotonic) -> ssl.SSLContext | None:
    """
    For those who listen, with the files of `folder`; None if that is empty.

    A peer's certificate has to have `name` among its DNS names; an empty one stands for all that the
    authority has signed. Raises SetupError if a file is missing, or is none.
    """
    return _Renewed(folder, name, ssl.PROTOCOL_TLS_SERVER, clock) if folder else None


def client(folder: str, name: str, clock: Clock = time.monotonic) -> ssl.SSLContext | None:
    """The same for those who connect."""
    return _Renewed(folder, name, ssl.PROTOCOL_TLS_CLIENT, clock) if folder else None


def term(context: ssl.SSLContext | None) -> Term | None:
    """Of the certificate that is shown with a context that was made here; None without one."""
    return context.term if isinstance(context, _Renewed) else None


class _Renewed(ssl.SSLContext):
    """A context that stands for the one made of the files as they are now."""

    _folder: Path
    _name: str
    _watched: tuple[WatchedFile, ...]
    _now: ssl.SSLContext
    _lock: threading.Lock
    _term: Term | None

    def __new__(cls, folder: str, name: str, protocol: int, clock: Clock) -> _Renewed:
        made = super().__new__(cls, protocol)
        made._folder = Path(folder).expanduser()
        made._name = name
        made._lock = threading.Lock()
        files = (CERTIFICATE, KEY, AUTHORITY)
        made._watched = tuple(WatchedFile(str(made._folder / file), clock) for file in files)
        try:
            made._now = made._read()
        except OSError as error:  # ssl's own errors are such
            raise SetupError(
                f"{made._folder}, named by --tls-folder, has to hold {CERTIFICATE}, {KEY} and {AUTHORITY}: "
                f"{error}."
            ) from error
        return made

    @property
    def term(self) -> Term | None:
        """Of the certificate that is in use now."""
        self._current()
        return self._term

    def wrap_bio(self, *arguments: object, **named: object) -> ssl.SSLObject:
        """What event loops make each connection's TLS with."""
        return self._current().wrap_bio(*arguments, **named)  # type: ignore[arg-type]

    def _current(self) -> ssl.SSLContext:
        with self._lock:
            # All are asked, so that none has its change still to tell the next time.
            changed = [file for file in self._watched if file.changed()]
            if changed:
                try:
                    self._now = self._read()
                    log.info("The certificate in %s has been read again.", self._folder)
                except OSError as error:
                    log.error(
                        "The certificate in %s cannot be read and stays as it was: %s", self._folder, error
                    )
            return self._now

    def _read(self) -> ssl.SSLContext:
        made = ssl.SSLContext(self.protocol)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.check_hostname = False  # by the name that all have, in `_Named`
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_cert_chain(self._folder / CERTIFICATE, self._folder / KEY)
        made.load_verify_locations(self._folder / AUTHORITY)
        if self.protocol == ssl.PROTOCOL_TLS_SERVER:
            made.num_tickets = 0  # nobody comes back without showing a certificate
        made.sslobject_class = _named(self._name)
        try:
            self._term = certificate_term.term((self._folder / CERTIFICATE).read_text())
        except (
            ValueError
        ) as error:  # OpenSSL understands more than we do: it serves, and nobody knows how long
            log.warning("Until when the certificate in %s is good cannot be read: %s", self._folder, error)
            self._term = None
        return made


def _named(name: str) -> type[ssl.SSLObject]:
    """Connections that come about only with a peer of this name."""

    class Named(ssl.SSLObject):
        def do_handshake(self) -> None:
            super().do_handshake()
            shown: Mapping[str, Any] = self.getpeercert() or {}
            names = [value for kind, value in shown.get("subjectAltName", ()) if kind == "DNS"]
            if name and name not in names:
                raise ssl.SSLCertVerificationError(
                    f"a certificate of {', '.join(names) or 'nobody'} was shown, and not of {name}"
                )

    return Named
