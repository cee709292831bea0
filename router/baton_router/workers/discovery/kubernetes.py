"""
Discovery by Kubernetes, from the EndpointSlices of a label selector, and by DNS, from the addresses of a
name.

Every minute begins with a full list, because a watch can lose deletions. In between, a broken watch resumes
at its last resource version. While the API server is away, the known workers stay, and health checks
continue. Token and certificate authority are read for each connection. The account only needs to list and
watch `endpointslices` of `discovery.k8s.io` in one namespace.

Workers follow from all slices together: an endpoint that moves stands in two slices, and a pod with two
address families in two slices of different kinds. Role and revision are labels, copied from the Service.

**DNS** is for clusters without that permission. `workers.example.org:8000` stands for its IPv4 addresses, or
its IPv6 addresses if it has no other; `_http._tcp.workers.example.org` for the addresses and ports of its SRV
records. A server that does not answer changes nothing. An empty answer counts after three times in a row,
because a resolver that has just started may know no names yet. Health checks detect a worker that is really
gone.

DNS carries no roles, revisions or draining state: a worker that leaves the list gets no new requests.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from urllib.parse import quote

import dns.asyncresolver
import dns.exception
import dns.rdatatype
import dns.resolver
import msgspec
from dns.rdtypes.IN.SRV import SRV

from baton_api import labels as label_names
from baton_api.errors import BatonError
from baton_api.workers import EngineKind, Role
from baton_http.kubernetes import GONE, ApiServerConnection, ApiServerError, KubernetesAccess, WatchExpired
from baton_http.upstream import UpstreamExchange, UpstreamLost, read_body
from baton_router.settings import DnsName
from baton_router.workers.discovery.listed import ListedStatus, ListedWorker

ROLE = label_names.ROLE
"""decode, both, prefill; without it decode. Slices with another role, such as routers, are ignored."""

REVISION = label_names.REVISION

HTTPS = "https"
"""`appProtocol` of a Service whose workers serve TLS."""

FAMILIES = ("IPv4", "IPv6")
"""Address families in order of preference. Slices of host names are ignored."""

ENGINES = {str(kind): kind for kind in EngineKind}

ROLES = {"": Role.DECODE, Role.DECODE: Role.DECODE, Role.BOTH: Role.DECODE, Role.PREFILL: Role.PREFILL}


class Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None

    @property
    def discovery_status(self) -> ListedStatus:
        if self.terminating:
            return ListedStatus.TERMINATING
        # A Service may set `ready` for every endpoint with an address; `serving` always follows the probe.
        able = self.ready if self.serving is None else self.serving
        return ListedStatus.UNREADY if able is False else ListedStatus.SERVING


class TargetRef(msgspec.Struct, frozen=True):
    uid: str = ""


class SliceEndpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: tuple[str, ...] = ()
    conditions: Conditions = Conditions()
    target_ref: TargetRef | None = None


class SlicePort(msgspec.Struct, frozen=True, rename="camel"):
    name: str | None = None
    port: int | None = None
    app_protocol: str | None = None

    @property
    def secure(self) -> bool:
        return (self.app_protocol or "").lower() == HTTPS


class SliceMetadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None


class EndpointSlice(msgspec.Struct, frozen=True, rename="camel"):
    """The fields of an EndpointSlice that discovery reads."""

    metadata: SliceMetadata
    address_type: str = ""
    endpoints: tuple[SliceEndpoint, ...] | None = None
    ports: tuple[SlicePort, ...] | None = None


def workers_in(slices: Iterable[EndpointSlice], port: str) -> frozenset[ListedWorker]:
    """The workers, at the port of that name; the only port of a slice may have any name."""
    by_pod: dict[tuple[str, Role, int], tuple[int, list[ListedWorker]]] = {}
    for slice_ in slices:
        labels = slice_.metadata.labels or {}
        role = ROLES.get(labels.get(ROLE, ""))
        slice_port = _port(slice_.ports or (), port)
        if (
            role is None
            or slice_port is None
            or slice_port.port is None
            or slice_.address_type not in FAMILIES
        ):
            continue
        family = FAMILIES.index(slice_.address_type)
        for endpoint in slice_.endpoints or ():
            if not endpoint.addresses:
                continue
            worker = ListedWorker(
                endpoint.addresses[0],
                slice_port.port,
                role,
                labels.get(REVISION, ""),
                endpoint.conditions.discovery_status,
                slice_port.secure,
                ENGINES.get(labels.get(label_names.ENGINE, "")),
            )
            target = endpoint.target_ref
            pod = target.uid if target is not None and target.uid else worker.name
            best, workers = by_pod.get((pod, role, slice_port.port), (family, []))
            if family < best:
                best, workers = family, []
            if family == best:
                workers.append(worker)
            by_pod[pod, role, slice_port.port] = best, workers
    return frozenset(worker for _, workers in by_pod.values() for worker in workers)


def _port(ports: Iterable[SlicePort], name: str) -> SlicePort | None:
    named = {port.name or "": port for port in ports if port.port is not None}
    return next(iter(named.values())) if len(named) == 1 else named.get(name)


log = logging.getLogger(__name__)

LIST_EVERY_S = 60.0
LIST_TIMEOUT_S = 15.0
"""Seconds that one list may take."""

WATCH_GRACE = 1.2
"""A watch that has not ended by itself after this many times its time is dead."""

RETRY_S = 1.0
RETRY_LIMIT_S = 30.0
"""From one failure to the next try, at first and at most; and the least between two watches."""

LIST_LIMIT = 256 * 1024**2
EVENT_LIMIT = 16 * 1024**2
"""Bytes; a slice has at most 1,000 endpoints."""


class WatchedSlices:
    """The slices as they are after the last event."""

    def __init__(self, listed: EndpointSliceList) -> None:
        self.version = listed.metadata.resource_version
        self._slices = {item.metadata.name: item for item in listed.items}

    def listed(self, port: str) -> frozenset[ListedWorker]:
        return workers_in(self._slices.values(), port)

    def apply(self, event: WatchEvent) -> bool:
        """Whether a slice has changed. Raises WatchExpired, ApiServerError and msgspec.DecodeError."""
        if event.type == "ERROR":
            status = msgspec.json.decode(event.object, type=ApiStatus)
            if status.code == GONE:
                raise WatchExpired
            raise ApiServerError(f"it ends the watch: {status.message or status.code}")
        one = msgspec.json.decode(event.object, type=EndpointSlice)
        self.version = one.metadata.resource_version
        if event.type == "BOOKMARK":
            return False
        if event.type == "DELETED":
            self._slices.pop(one.metadata.name, None)
        else:
            self._slices[one.metadata.name] = one
        return True


class EndpointSliceList(msgspec.Struct, frozen=True):
    metadata: SliceMetadata
    items: tuple[EndpointSlice, ...]


class WatchEvent(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class ApiStatus(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class KubernetesWorkers:
    """The workers of all slices that a selector selects."""

    def __init__(
        self,
        access: KubernetesAccess,
        selector: str,
        port: str,
        rng: random.Random,
        list_every_s: float = LIST_EVERY_S,
        retry_s: float = RETRY_S,
        list_s: float = LIST_TIMEOUT_S,
    ) -> None:
        self.trouble = ""
        self._access = access
        self._selector = selector
        self._port = port
        self._rng = rng
        self._list_every_s = list_every_s
        self._retry_s = retry_s
        self._list_s = list_s

    async def watch(self, on_list: Callable[[frozenset[ListedWorker]], None]) -> None:
        pause = self._retry_s
        while True:
            try:
                await self._minute(on_list)
                pause = self._retry_s
            except (ApiServerError, BatonError, TimeoutError, ValueError) as error:
                self._failed(error)
                await asyncio.sleep(pause * self._rng.uniform(0.5, 1.0))
                pause = min(2 * pause, RETRY_LIMIT_S)

    async def _minute(self, on_list: Callable[[frozenset[ListedWorker]], None]) -> None:
        """List all slices, and watch changes until the next list is due. Raises what `watch` catches."""
        loop = asyncio.get_running_loop()
        due = loop.time() + self._list_every_s
        path = _path(self._access.where(), self._selector)
        connected = self._access.open()
        try:
            try:
                slices = await self._list(connected, path)
                on_list(slices.listed(self._port))
                while (left := due - loop.time()) > 0:
                    began = loop.time()
                    await self._watch(connected, path, slices, left, on_list)
                    await asyncio.sleep(min(left, max(0.0, began + self._retry_s - loop.time())))
            except WatchExpired:
                await asyncio.sleep(self._retry_s)  # then list again, as after any other end of the watch
        finally:
            connected.upstream.close()

    async def _list(self, connected: ApiServerConnection, path: str) -> WatchedSlices:
        async with asyncio.timeout(self._list_s):
            exchange = await connected.get(path)
            body = await read_body(exchange, LIST_LIMIT)
        slices = WatchedSlices(msgspec.json.decode(body, type=EndpointSliceList))
        if self.trouble:
            log.info("Kubernetes lists the workers again.")
        self.trouble = ""
        return slices

    async def _watch(
        self,
        connected: ApiServerConnection,
        path: str,
        slices: WatchedSlices,
        seconds: float,
        on_list: Callable[[frozenset[ListedWorker]], None],
    ) -> None:
        """Ends as the watch does, or breaks. Raises what `watch` catches, and WatchExpired."""
        target = (
            f"{path}&watch=true&allowWatchBookmarks=true&resourceVersion={quote(slices.version, safe='')}"
            f"&timeoutSeconds={max(1, round(seconds))}"
        )
        try:
            async with asyncio.timeout(WATCH_GRACE * seconds):
                exchange = await connected.get(target)
                try:
                    await self._events(exchange, slices, on_list)
                finally:
                    exchange.close()
        except UpstreamLost as lost:
            if lost.cause == "connect":
                raise
        except TimeoutError:
            log.debug("A watch did not end by itself.")

    async def _events(
        self,
        exchange: UpstreamExchange,
        slices: WatchedSlices,
        on_list: Callable[[frozenset[ListedWorker]], None],
    ) -> None:
        rest = b""
        while piece := await exchange.read():
            *lines, rest = (rest + piece).split(b"\n")
            changed = False
            for line in lines:
                if line.strip():
                    changed |= slices.apply(msgspec.json.decode(line, type=WatchEvent))
            if changed:
                on_list(slices.listed(self._port))
            if len(rest) > EVENT_LIMIT:
                raise ApiServerError(f"an event of its watch has more than {EVENT_LIMIT} bytes")

    def _failed(self, error: Exception) -> None:
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        if isinstance(error, UpstreamLost):
            reason = f"{error.cause}: {error.__cause__}" if error.__cause__ else error.cause
        trouble = f"Kubernetes at {self._access.url} does not list the workers: {reason}"
        if not self.trouble:
            log.warning("%s. The known workers stay.", trouble)
        self.trouble = trouble


def _path(namespace: str, selector: str) -> str:
    """The list of the EndpointSlices that `selector` selects."""
    slices = f"/apis/discovery.k8s.io/v1/namespaces/{quote(namespace, safe='')}/endpointslices"
    return f"{slices}?labelSelector={quote(selector, safe='')}"


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
