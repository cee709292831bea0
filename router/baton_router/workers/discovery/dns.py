"""
Discovery by DNS: all addresses of a name, resolved again every few seconds.

`workers.example.org:8000` stands for its IPv4 addresses, or its IPv6 addresses if it has no other;
`_http._tcp.workers.example.org` for the addresses and ports of its SRV records. A server that does not
answer changes nothing. An empty answer counts after three times in a row, because a resolver that has just
started may know no names yet. Health checks detect a worker that is really gone.

DNS carries no roles, revisions or draining state: a worker that leaves the list gets no new requests.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import dns.asyncresolver
import dns.exception
import dns.rdatatype
import dns.resolver
from dns.rdtypes.IN.SRV import SRV

from baton_api.workers import Role
from baton_router.settings import DnsName
from baton_router.workers.discovery.listed import ListedWorker

log = logging.getLogger(__name__)

EMPTY_ANSWERS_LIMIT = 3
"""Consecutive answers without an address after which the list is empty."""

Address = tuple[str, int]


class LastGoodAddresses:
    """The addresses that count after the answers so far."""

    def __init__(self) -> None:
        self.addresses: frozenset[Address] = frozenset()
        self._empty_answers = 0

    def took(self, addresses: frozenset[Address]) -> frozenset[Address]:
        """Take another answer; returns the addresses that count now."""
        self._empty_answers = 0 if addresses else self._empty_answers + 1
        if addresses or self._empty_answers >= EMPTY_ANSWERS_LIMIT:
            self.addresses = addresses
        return self.addresses


class DnsWorkers:
    """The workers of one role under one name."""

    def __init__(
        self,
        query: DnsName,
        role: Role,
        interval_s: float,
        secure: bool = False,
        resolver: dns.asyncresolver.Resolver | None = None,
    ) -> None:
        """
        `secure`: the workers serve TLS, which DNS does not report.

        Without a `resolver`, the settings of the machine choose the name server.
        """
        self.trouble = ""
        self._query = query
        self._role = role
        self._interval_s = interval_s
        self._secure = secure
        self._resolver = resolver

    async def watch(self, on_list: Callable[[frozenset[ListedWorker]], None]) -> None:
        good = LastGoodAddresses()
        while True:
            if (addresses := await self._look()) is not None:
                addresses = good.took(addresses)
                on_list(
                    frozenset(
                        ListedWorker(host, port, self._role, secure=self._secure) for host, port in addresses
                    )
                )
            await asyncio.sleep(self._interval_s)

    async def _look(self) -> frozenset[Address] | None:
        query = self._query
        try:
            addresses = frozenset(
                await (self._hosts(query.name, query.port) if query.port else self._services())
            )
        except (dns.exception.DNSException, OSError) as error:
            reason = str(error).partition(": Server ")[0]  # and then each try of each server
            trouble = f"DNS did not return the addresses of {query.name}: {reason}"
            if not self.trouble:
                log.warning("%s. The known workers stay.", trouble)
            self.trouble = trouble
            return None
        if self.trouble:
            log.info("DNS resolves %s again.", query.name)
        self.trouble = "" if addresses else f"{query.name} has no address"
        return addresses

    async def _hosts(self, name: str, port: int) -> list[Address]:
        for kind in (dns.rdatatype.A, dns.rdatatype.AAAA):
            if answer := await self._ask(name, kind):
                return [(record.address, port) for record in answer]
        return []

    async def _services(self) -> list[Address]:
        answer = await self._ask(self._query.name, dns.rdatatype.SRV)
        services = [record for record in answer or () if isinstance(record, SRV)]
        if answer is None:
            return []
        sent_along = {
            (records.name, record.address)
            for records in answer.response.additional
            if records.rdtype == dns.rdatatype.A
            for record in records
        }
        addresses: list[Address] = []
        for service in services:
            hosts = [(host, service.port) for name, host in sent_along if name == service.target]
            addresses += hosts or await self._hosts(service.target.to_text(), service.port)
        return addresses

    async def _ask(self, name: str, kind: dns.rdatatype.RdataType) -> dns.resolver.Answer | None:
        """The records; None if the server says that there are none."""
        if self._resolver is None:
            self._resolver = dns.asyncresolver.Resolver()
        try:
            answer = await self._resolver.resolve(name, kind, raise_on_no_answer=False, search=True)
        except dns.resolver.NXDOMAIN:
            return None
        return answer if answer.rrset is not None else None
