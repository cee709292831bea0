"""
Tickets: signed permissions of the router for one prompt at one prefill worker.

NIXL has no authentication: a process with the metadata can read and write the memory. So a prefill worker
computes and announces blocks only for a valid ticket, which names the worker, has not expired and has the
right HMAC. A decode worker checks the ticket when the request arrives and connects nowhere without a valid
one. It signs a new ticket for its own request to the prefill worker, which may come much later. So the
lifetime covers one hop and the clock skew of two machines, and no queue. Without a secret (one machine,
loopback) every ticket is valid.

    v1.<expiry, seconds since 1970>.<session>.<HMAC-SHA-256 of what stands before and the addresses>

A ticket can also name a source: a worker whose cached blocks the prefill worker may read. The prefill worker
trusts these blocks, so it connects to no other source.
"""

from __future__ import annotations

import hashlib
import hmac

LIFETIME_S = 60.0
"""Lifetime of a ticket in seconds. It is normally used within milliseconds."""

CLOCK_SKEW_S = 60.0
"""Maximum clock skew between two machines in seconds."""


CHECK = "check"
"""The session of a router's tickets for `GET /load`, at no prefill worker. They admit nothing."""


def _signature(secret: bytes, text: str, prefill: str, source: str) -> str:
    addresses = f"{prefill}|{source}" if source else prefill
    return hmac.new(secret, f"{text}|{addresses}".encode(), hashlib.sha256).hexdigest()


def issue(secret: bytes, session: str, prefill: str, now: float, source: str = "") -> str:
    """A ticket for `session` at the worker whose control address is `prefill`, with `source` if it is set."""
    text = f"v1.{int(now + LIFETIME_S)}.{session}"
    return f"{text}.{_signature(secret, text, prefill, source)}"


def refusal(
    secret: bytes, ticket: str, session: str, prefill: str, now: float, source: str = ""
) -> str | None:
    """Why `ticket` does not admit `session` at `prefill` with `source`, or None if it does."""
    if not secret:
        return None
    text, _, signature = ticket.rpartition(".")
    expected = _signature(secret, text, prefill, source)
    if not hmac.compare_digest(signature.encode(), expected.encode()):  # as bytes: a str must be ASCII
        return f"the ticket was not signed for {prefill}" + (f" with source {source[:200]}" if source else "")
    version, _, rest = text.partition(".")
    expiry, _, named = rest.partition(".")
    if version != "v1" or named != session:
        return f"the ticket is not for session {session}"
    if now > int(expiry) + CLOCK_SKEW_S:
        return f"the ticket expired {now - int(expiry):.0f} s ago"
    return None
