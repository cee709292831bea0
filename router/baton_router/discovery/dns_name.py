"""What DNS is asked for: a host's addresses, or the hosts and ports of a service."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DnsName:
    """What is asked for."""

    name: str
    port: int | None
    """None: that and the host are in SRV records."""

    @classmethod
    def parse(cls, text: str) -> DnsName:
        """
        >>> DnsName.parse("workers:8000"), DnsName.parse("_http._tcp.workers")
        (DnsName(name='workers', port=8000), DnsName(name='_http._tcp.workers', port=None))
        """
        name, colon, port = text.rpartition(":")
        if not colon and text.startswith("_"):
            return cls(text, None)
        if not name or ":" in name or "/" in text or not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(
                f"{text!r} is nothing to ask DNS for: give NAME:PORT, or the name of SRV records, such as "
                "_http._tcp.workers.example.org"
            )
        return cls(name, int(port))
