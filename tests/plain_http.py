"""Plain HTTP on this machine: for clients of it, and servers whose answers a test gives."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""
The `verify` of httpx's clients. It trusts no certificate.

By default, httpx reads all certificate authorities for each client, in 30 ms.
"""


@contextmanager
def served(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Serve on a free port, and yield the address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
