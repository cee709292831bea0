"""Server-sent events as bytes: https://html.spec.whatwg.org/multipage/server-sent-events.html"""

from __future__ import annotations

import msgspec

DONE = b"data: [DONE]\n\n"
"""Ends a stream of chunks: what comes without it was cut."""

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip."""


def data_event(body: object) -> bytes:
    """One event of a stream of chunks."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"
