"""
The router's signed word that a decode worker may have this prompt computed by that prefill worker.

NIXL has no authentication of its own: whoever holds the metadata can read and write the memory. So
a prefill worker computes and announces blocks only for a ticket that names it, is not expired and
carries the right HMAC. A decode worker checks the ticket when the request arrives and connects nowhere
without a valid one; when it asks the prefill worker, perhaps much later, it signs a new one. So a ticket
outlasts one hop and the difference of two clocks, and no queue. Without a secret (one machine, loopback)
every ticket is accepted.

    v1.<expiry, seconds since 1970>.<room>.<HMAC-SHA-256 of what stands before and the prefill address>
"""

from __future__ import annotations

import hashlib
import hmac

LIFETIME_S = 60.0
"""Seconds for which a ticket can be used; it is spent within milliseconds when all is well."""

CLOCK_SKEW_S = 60.0
"""Seconds by which two machines' clocks may differ."""


def _signature(secret: bytes, text: str, prefill: str) -> str:
    return hmac.new(secret, f"{text}|{prefill}".encode(), hashlib.sha256).hexdigest()


def issue(secret: bytes, room: str, prefill: str, now: float) -> str:
    """A ticket for `room` at the prefill worker whose control address is `prefill`."""
    text = f"v1.{int(now + LIFETIME_S)}.{room}"
    return f"{text}.{_signature(secret, text, prefill)}"


def refusal(secret: bytes, ticket: str, room: str, prefill: str, now: float) -> str | None:
    """Why `ticket` does not admit `room` at `prefill`, or None if it does."""
    if not secret:
        return None
    text, _, signature = ticket.rpartition(".")
    expected = _signature(secret, text, prefill)
    if not hmac.compare_digest(signature.encode(), expected.encode()):  # as bytes: a str must be ASCII
        return f"the ticket was not signed for {prefill}"
    version, _, rest = text.partition(".")
    expiry, _, named = rest.partition(".")
    if version != "v1" or named != room:
        return f"the ticket is not for room {room}"
    if now > int(expiry) + CLOCK_SKEW_S:
        return f"the ticket expired {now - int(expiry):.0f} s ago"
    return None
