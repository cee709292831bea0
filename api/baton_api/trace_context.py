"""
`traceparent`, by which one trace goes through many services: https://www.w3.org/TR/trace-context/

What does not follow the standard is as if it was not there: a trace begins anew.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

TRACEPARENT = b"traceparent"
TRACESTATE = b"tracestate"
HEADERS = frozenset({TRACEPARENT, TRACESTATE})

STATE_LIMIT = 512
"""Bytes of other services' state that are passed on."""

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """Where a request stands in its trace."""

    trace: int
    span: int
    sampled: bool
    state: bytes = b""

    @property
    def parent(self) -> bytes:
        """What `traceparent` says of it."""
        return b"00-%032x-%016x-%02x" % (self.trace, self.span, self.sampled)

    @property
    def lines(self) -> bytes:
        """The headers for whoever is asked next."""
        told = b"%b: %b\r\n" % (TRACEPARENT, self.parent)
        return told + b"%b: %b\r\n" % (TRACESTATE, self.state) if self.state else told


def read(given: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """What the headers of a request say; None if that is nothing, or not well said."""
    parents = [value for name, value in given if name == TRACEPARENT]
    found = _PARENT.fullmatch(parents[0].strip()) if len(parents) == 1 else None
    if found is None or found[1] == b"ff" or (found[1] == b"00" and found[5]):
        return None
    trace, span = int(found[2], 16), int(found[3], 16)
    if not trace or not span:
        return None
    states = b",".join(value for name, value in given if name == TRACESTATE)
    return TraceContext(
        trace, span, bool(int(found[4], 16) & 1), states if len(states) <= STATE_LIMIT else b""
    )
