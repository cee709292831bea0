"""
From when to when a certificate is good, read from its DER: two times, for which no library has to be there.

A certificate is a sequence whose first part holds, after a version that may be left out, a serial number, an
algorithm, an issuer, and then the two times: RFC 5280, 4.1. What is before them is stepped over.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from datetime import UTC, datetime

VERSION, UTC_TIME = 0xA0, 0x17
LONG = 0x80
"""A length below this is written as it is; one above says in how many bytes it follows."""


@dataclass(frozen=True, slots=True)
class Term:
    """Unix times in seconds."""

    begin: float
    end: float


def term(pem: str) -> Term:
    """Of the first certificate of a file. Raises ValueError if there is none."""
    begin, marker = pem.find(ssl.PEM_HEADER), pem.find(ssl.PEM_FOOTER)
    if begin < 0 or marker < begin:
        raise ValueError("there is no certificate in it")
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
        return Term(_time(kind, first), _time(other, second))
    except IndexError as error:
        raise ValueError("the certificate is cut off") from error


def _read(der: bytes) -> tuple[int, bytes, bytes]:
    """The tag of the first value, what it holds, and what comes after it."""
    length, start = der[1], 2
    if length >= LONG:
        start += length - LONG
        length = int.from_bytes(der[2:start], "big")
    if start + length > len(der):
        raise IndexError
    return der[0], der[start : start + length], der[start + length :]


def _time(kind: int, text: bytes) -> float:
    """Two digits of a year are those of 1950 to 2049."""
    said = text.decode("ascii")
    if kind == UTC_TIME:
        said = ("19" if said[:2] >= "50" else "20") + said
    return datetime.strptime(said, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
