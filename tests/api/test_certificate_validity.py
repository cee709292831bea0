"""The validity of certificates, compared with the library that created them."""

from __future__ import annotations

import datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from baton_api import mutual_tls
from baton_api.mutual_tls import CertificateValidity, read_validity
from baton_api.watched import LOOK_S
from tests.authority import Authority

NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "x" * 60)])
SPANS = {
    "a day": ("2026-11-21 10:00:00", "2026-11-22 10:00:00"),
    "of this century and the last": ("1999-12-31 23:59:59", "2031-01-01 00:00:00"),
    "beyond two digits of a year": ("2026-11-21 10:00:00", "2059-02-28 12:30:01"),
}


def certificate(begin: str, end: str, *, large: bool) -> str:
    key = rsa.generate_private_key(65537, 2048) if large else ec.generate_private_key(ec.SECP256R1())
    builder = (
        x509.CertificateBuilder()
        .subject_name(NAME)
        .issuer_name(NAME)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime.fromisoformat(begin))
        .not_valid_after(datetime.datetime.fromisoformat(end))
        .sign(key, hashes.SHA256())
    )
    return builder.public_bytes(serialization.Encoding.PEM).decode()


def unix(text: str) -> float:
    return datetime.datetime.fromisoformat(text).replace(tzinfo=datetime.UTC).timestamp()


@pytest.mark.parametrize("case", SPANS)
@pytest.mark.parametrize("large", [False, True])
def test_validity_is_read_from_pem(case: str, large: bool) -> None:
    begin, end = SPANS[case]
    pem = certificate(begin, end, large=large)
    assert read_validity(pem) == CertificateValidity(unix(begin), unix(end))
    assert read_validity(f"# leaf\n{pem}{certificate(*SPANS['a day'], large=False)}") == CertificateValidity(
        unix(begin), unix(end)
    )


@pytest.mark.parametrize(
    "text", ["", "no certificate", "-----BEGIN CERTIFICATE-----\nMAAAAA==\n-----END CERTIFICATE-----"]
)
def test_invalid_certificate_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="certificate"):
        read_validity(text)


def test_context_reports_the_certificate_that_it_presents(tmp_path: Path) -> None:
    now = 0.0
    folder, authority = tmp_path / "shown", Authority()
    authority.fill(folder, "chat", over=True)
    context = mutual_tls.client(str(folder), "chat", lambda: now)
    before = mutual_tls.validity(context)
    assert before == read_validity((folder / "tls.crt").read_text())
    authority.fill(folder, "chat")
    now += 2 * LOOK_S
    after = mutual_tls.validity(context)
    assert before is not None and after is not None and after.end > before.end
    (folder / "tls.crt").write_text("half of one")
    now += 2 * LOOK_S
    assert mutual_tls.validity(context) == after, "what worked before stays in use"
    assert mutual_tls.validity(None) is None
