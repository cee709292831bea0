"""Server-sent events as bytes: https://html.spec.whatwg.org/multipage/server-sent-events.html"""

from __future__ import annotations

import msgspec

from baton_api.errors import BatonError

DONE = b"data: [DONE]\n\n"
"""Ends a stream of chunks: what comes without it was cut."""

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment, which clients skip."""

FAILURE = "baton.failure"
"""The entry of an ASGI scope that is asked for the event with which a stream breaks."""


def data_event(body: object) -> bytes:
    """One event of a stream of chunks."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def error_event(error: BatonError) -> bytes:
    """The event after which a stream of chunks does not go on."""
    return data_event(error.body())
