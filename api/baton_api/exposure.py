"""Who can reach a server: other machines, and at which address, and web pages (CORS)."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from baton_api import headers
from baton_api.errors import SetupError

if TYPE_CHECKING:
    from starlette.types import ASGIApp

DEFAULT_PORT = 8000
"""Of workers, routers and services of both: what a command starts, another one finds without a flag."""

DOCUMENTATION = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses that belong to no machine (RFC 5737 and 3849). Baton sends no packet to them."""

_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9_-]{1,63}(?<!-))*\.?")


def reachable(host: str) -> bool:
    """
    Return whether other machines can reach a server that listens on `host`.

    Names other than localhost count as reachable.

    >>> reachable("127.0.0.1"), reachable("localhost"), reachable("0.0.0.0"), reachable("::")
    (False, False, True, True)
    """
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def endpoint_reachable(endpoint: str) -> bool:
    """
    Return the same for a ZMQ endpoint. Only TCP leaves the machine.

    >>> endpoint_reachable("tcp://*:5557"), endpoint_reachable("tcp://[::1]:0"), endpoint_reachable("ipc:///kv")
    (True, False, False)
    """
    transport, _, address = endpoint.partition("://")
    return transport == "tcp" and reachable(address.rpartition(":")[0].strip("[]"))


def without_a_key(host: str, port: int, keyed: bool) -> str | None:
    """Return a warning about a reachable server without API key, else None."""
    if keyed or not reachable(host):
        return None
    return (
        f"WARNING: any client that reaches {host}:{port} can use this server, because it has no API key and "
        "listens on a public address. Set BATON_API_KEY or --api-key-file, or listen on --host 127.0.0.1."
    )


def outgoing_address(family: socket.AddressFamily) -> str | None:
    """Return this machine's address for packets to other networks, or None without a default route."""
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((DOCUMENTATION[family], 9))  # selects a route; a UDP socket sends nothing here
        return str(probe.getsockname()[0])
    return None


def advertised_host(
    host: str,
    flag: str,
    advertise: str = "",
    outgoing: Callable[[socket.AddressFamily], str | None] = outgoing_address,
) -> str:
    """
    Return the host at which other machines reach a server that listens on `host`.

    `host` was set by `flag`; `advertise` is the value of --advertise-host. Raises SetupError if no host is
    known, or if `advertise` is not a host to which others can connect.

    >>> advertised_host("10.0.0.7", "--control-host"), advertised_host("0.0.0.0", "--control-host", "node-7")
    ('10.0.0.7', 'node-7')
    """
    if advertise:
        _check_advertised(advertise)
    if not reachable(host):
        return host
    if advertise:
        return advertise
    if not _wildcard(host):
        return host
    address = outgoing(socket.AF_INET6 if ":" in host else socket.AF_INET)
    if address is None:
        raise SetupError(
            f"{flag} {host} listens on every address of this machine, and no default route shows which one "
            "other machines reach. Set --advertise-host to that address, or to a DNS name of this machine."
        )
    return address


def advertised_endpoint(
    endpoint: str,
    flag: str,
    advertise: str = "",
    outgoing: Callable[[socket.AddressFamily], str | None] = outgoing_address,
) -> str:
    """
    Return the same for a ZMQ endpoint. Only the host of a TCP endpoint changes.

    >>> advertised_endpoint("tcp://0.0.0.0:5557", "--kv-events", "10.0.0.7")
    'tcp://10.0.0.7:5557'
    """
    transport, _, address = endpoint.partition("://")
    if transport != "tcp":
        return endpoint
    host, _, port = address.rpartition(":")
    advertised = advertised_host(host.strip("[]"), flag, advertise, outgoing)
    return f"tcp://[{advertised}]:{port}" if ":" in advertised else f"tcp://{advertised}:{port}"


def _check_advertised(host: str) -> None:
    if _wildcard(host):
        raise SetupError(
            f"Invalid --advertise-host {host!r}: no machine can connect to a wildcard. Set it to the "
            "address or DNS name at which other machines reach this one."
        )
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return
    if not _NAME.fullmatch(host) or len(host) > 253:
        raise SetupError(
            f"Invalid --advertise-host {host[:300]!r}. Expected an address such as 10.0.0.7 or fd00::7, or a "
            "DNS name, without a port."
        )


def _wildcard(host: str) -> bool:
    """Return whether `host` means every address of a machine."""
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return host in ("", "*")


EXPOSED = (headers.REQUEST_ID, headers.WORKER, "retry-after")
"""Response headers that a web page may read."""


def allowed_origins(origins: Sequence[str], keyed: bool) -> tuple[str, ...]:
    """
    Return the configured origins. Default: all for a server with API keys, else none.

    A web page has no API key by itself. But without keys, any page open on this machine could use the server.
    """
    return tuple(origins) or (("*",) if keyed else ())


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Return `app` with CORS headers for these origins. It receives no preflight requests."""
    from starlette.middleware.cors import CORSMiddleware

    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=EXPOSED
    )
