"""TCP ports of servers that a test ends and starts again at the same place."""

from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
FIRST_EPHEMERAL = 32_768
"""Linux's default, where that file is missing."""

FIRST = 10_000

_random = random.SystemRandom()
_taken: set[int] = set()


def steady_port() -> int:
    """
    Return a free port of 127.0.0.1 that no other process gets while its server is away.

    The system gives ports of its own range to any connection: no server could then come back to one.
    """
    end = FIRST_EPHEMERAL
    with contextlib.suppress(OSError):
        end = int(EPHEMERAL.read_text().split()[0])
    while True:
        port = _random.randrange(FIRST, max(end, FIRST + 1000))
        if port not in _taken and _is_free(port):
            _taken.add(port)
            return port


def steady_ports(count: int) -> list[int]:
    return [steady_port() for _ in range(count)]


def _is_free(port: int) -> bool:
    with contextlib.closing(socket.socket()) as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
