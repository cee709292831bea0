"""Who can reach a server, told from the address that it listens on."""

from __future__ import annotations

import ipaddress


def reachable(host: str) -> bool:
    """
    Whether other machines may reach a server that listens on `host`; a name other than localhost may.

    >>> reachable("127.0.0.1"), reachable("localhost"), reachable("0.0.0.0"), reachable("::")
    (False, False, True, True)
    """
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def endpoint_reachable(endpoint: str) -> bool:
    """
    The same of a ZMQ endpoint; only TCP leaves the machine.

    >>> endpoint_reachable("tcp://*:5557"), endpoint_reachable("tcp://[::1]:0"), endpoint_reachable("ipc:///kv")
    (True, False, False)
    """
    transport, _, address = endpoint.partition("://")
    return transport == "tcp" and reachable(address.rpartition(":")[0].strip("[]"))


def without_a_key(host: str, port: int, keyed: bool) -> str | None:
    """What is to be said aloud of a server that anybody may use; None if nobody else can."""
    if keyed or not reachable(host):
        return None
    return (
        f"WARNING: anybody who reaches {host}:{port} can use this server: it listens beyond this machine and "
        "wants no API key. Set BATON_API_KEY or --api-key-file, or listen on --host 127.0.0.1."
    )
