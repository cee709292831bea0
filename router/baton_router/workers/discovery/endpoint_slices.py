"""
The workers in a set of Kubernetes EndpointSlices.

Slices are pieces without a meaning of their own. The workers are what all of them say together: an
endpoint that is being moved stands in two, a pod with two address families in two of different kinds.
Role and generation are labels, which a Service's slices take over from the Service.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from baton_api import labels as label_names
from baton_api.workers import Role
from baton_router.workers.discovery.listed import Listed, Standing

ROLE = label_names.ROLE
"""decode, both, prefill; without it decode. Slices of anything else, such as routers, are none of ours."""

REVISION = label_names.REVISION

HTTPS = "https"
"""What a Service says as `appProtocol` of workers that are spoken to by TLS."""

FAMILIES = ("IPv4", "IPv6")
"""In the order in which they are preferred. There are slices of host names too, which are no addresses."""

ROLES = {"": Role.DECODE, Role.DECODE: Role.DECODE, Role.BOTH: Role.DECODE, Role.PREFILL: Role.PREFILL}


class Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None
    serving: bool | None = None
    terminating: bool | None = None

    @property
    def standing(self) -> Standing:
        if self.terminating:
            return Standing.TERMINATING
        # A Service may say `ready` of whoever has an address; `serving` is always true to the probe.
        able = self.ready if self.serving is None else self.serving
        return Standing.UNREADY if able is False else Standing.SERVING


class Target(msgspec.Struct, frozen=True):
    uid: str = ""


class Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: tuple[str, ...] = ()
    conditions: Conditions = Conditions()
    target_ref: Target | None = None


class Port(msgspec.Struct, frozen=True, rename="camel"):
    name: str | None = None
    port: int | None = None
    app_protocol: str | None = None

    @property
    def secure(self) -> bool:
        return (self.app_protocol or "").lower() == HTTPS


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""
    labels: dict[str, str] | None = None


class Slice(msgspec.Struct, frozen=True, rename="camel"):
    """What of an EndpointSlice counts here."""

    metadata: Metadata
    address_type: str = ""
    endpoints: tuple[Endpoint, ...] | None = None
    ports: tuple[Port, ...] | None = None


def listed(slices: Iterable[Slice], port: str) -> frozenset[Listed]:
    """The workers, at the port of that name; the only port of a slice may have any name."""
    found: dict[tuple[str, Role, int], tuple[int, list[Listed]]] = {}
    for one in slices:
        labels = one.metadata.labels or {}
        role = ROLES.get(labels.get(ROLE, ""))
        there = _port(one.ports or (), port)
        if role is None or there is None or there.port is None or one.address_type not in FAMILIES:
            continue
        family = FAMILIES.index(one.address_type)
        for endpoint in one.endpoints or ():
            if not endpoint.addresses:
                continue
            worker = Listed(
                endpoint.addresses[0],
                there.port,
                role,
                labels.get(REVISION, ""),
                endpoint.conditions.standing,
                there.secure,
            )
            target = endpoint.target_ref
            pod = target.uid if target is not None and target.uid else worker.name
            best, workers = found.get((pod, role, there.port), (family, []))
            if family < best:
                best, workers = family, []
            if family == best:
                workers.append(worker)
            found[pod, role, there.port] = best, workers
    return frozenset(worker for _, workers in found.values() for worker in workers)


def _port(ports: Iterable[Port], name: str) -> Port | None:
    named = {one.name or "": one for one in ports if one.port is not None}
    return next(iter(named.values())) if len(named) == 1 else named.get(name)
