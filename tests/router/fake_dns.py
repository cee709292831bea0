"""A small real DNS server on 127.0.0.1. It answers from a table, stays silent, or fails on command."""

from __future__ import annotations

import asyncio
from types import TracebackType

import dns.asyncresolver
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.rrset


class FakeDns(asyncio.DatagramProtocol):
    """`async with FakeDns() as server`; `server.resolver` asks it."""

    def __init__(self) -> None:
        self.records: dict[tuple[str, str], list[str]] = {}
        """(name, kind) -> records as a zone file has them. Names without any are NXDOMAIN."""
        self.silent = False
        self.failing = False
        self.along: list[tuple[str, str]] = []
        """Additional records of every answer: (name, IPv4 address)."""
        self.requests: list[tuple[str, str]] = []

    async def __aenter__(self) -> FakeDns:
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        self.resolver = dns.asyncresolver.Resolver(configure=False)
        self.resolver.nameservers = ["127.0.0.1"]
        self.resolver.port = self._transport.get_extra_info("sockname")[1]
        self.resolver.timeout = 0.05
        self.resolver.search = [dns.name.from_text("svc.cluster.local.")]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        query = dns.message.from_wire(data)
        question = query.question[0]
        name, kind = question.name.to_text(omit_final_dot=True), dns.rdatatype.to_text(question.rdtype)
        self.requests.append((name, kind))
        if self.silent:
            return
        answer = dns.message.make_response(query)
        answer.flags |= dns.flags.AA | dns.flags.RA
        if self.failing:
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif records := self.records.get((name, kind)):
            answer.answer.append(dns.rrset.from_text_list(question.name, 5, "IN", kind, records))
            for host, address in self.along:
                answer.additional.append(dns.rrset.from_text(f"{host}.", 5, "IN", "A", address))
        elif not any(name_of == name for name_of, _ in self.records):
            answer.set_rcode(dns.rcode.NXDOMAIN)
        self._transport.sendto(answer.to_wire(), addr)
