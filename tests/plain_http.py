"""For clients of plain HTTP: by default, httpx reads all certificate authorities for each, in 30 ms."""

from __future__ import annotations

import ssl

PLAIN = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""The `verify` of such clients. It trusts no certificate."""
