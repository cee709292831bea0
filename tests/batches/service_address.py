"""One address for several servers, like a Service of Kubernetes for its pods."""

from __future__ import annotations

import contextlib
import itertools
import socket
import socketserver
import threading
from collections import Counter
from collections.abc import Sequence

PIECE = 65536


class ServiceAddress:
    """`with ServiceAddress(ports) as address`: connections go to those servers in turn that take them."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.taken: Counter[int] = Counter()
        """Connections by the server's port."""
        self._ports = itertools.cycle(ports)
        self._count = len(ports)
        self._lock = threading.Lock()
        self._server = _Server(self)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> ServiceAddress:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def connect(self) -> socket.socket:
        """Connect to the next server in turn. Raises OSError if none is reachable."""
        with self._lock:
            for port in itertools.islice(self._ports, self._count):
                with contextlib.suppress(ConnectionRefusedError):
                    connection = socket.create_connection(("127.0.0.1", port))
                    self.taken[port] += 1
                    return connection
        raise ConnectionRefusedError("nobody is there")


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: ServiceAddress) -> None:
        self.address = address
        super().__init__(("127.0.0.1", 0), _Relay)


class _Relay(socketserver.BaseRequestHandler):
    """One connection, until both sides have ended it."""

    server: _Server

    def handle(self) -> None:
        try:
            upstream = self.server.address.connect()
        except OSError:
            return
        with upstream:
            back = threading.Thread(target=_copy, args=(upstream, self.request), daemon=True)
            back.start()
            _copy(self.request, upstream)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    """To the end, which is passed on."""
    with contextlib.suppress(OSError):
        while piece := source.recv(PIECE):
            target.sendall(piece)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
