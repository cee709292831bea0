"""
`traceparent`, which carries one trace through many services: https://www.w3.org/TR/trace-context/

A header that violates the standard is ignored, and a new trace begins.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

TRACEPARENT = b"traceparent"
TRACESTATE = b"tracestate"
HEADERS = frozenset({TRACEPARENT, TRACESTATE})

STATE_LIMIT = 512
"""Maximum bytes of `tracestate` to forward."""

_PARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The position of a request in its trace."""

    trace: int
    span: int
    sampled: bool
    state: bytes = b""

    @property
    def parent(self) -> bytes:
        """The value of `traceparent`."""
        return b"00-%032x-%016x-%02x" % (self.trace, self.span, self.sampled)

    @property
    def lines(self) -> bytes:
        """The header lines for the next service."""
        parent = b"%b: %b\r\n" % (TRACEPARENT, self.parent)
        return parent + b"%b: %b\r\n" % (TRACESTATE, self.state) if self.state else parent


def read(given: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """Read the headers of a request. None: they have no valid `traceparent`."""
    parents = [value for name, value in given if name == TRACEPARENT]
    match = _PARENT.fullmatch(parents[0].strip()) if len(parents) == 1 else None
    if match is None or match[1] == b"ff" or (match[1] == b"00" and match[5]):
        return None
    trace, span = int(match[2], 16), int(match[3], 16)
    if not trace or not span:
        return None
    states = b",".join(value for name, value in given if name == TRACESTATE)
    return TraceContext(
        trace, span, bool(int(match[4], 16) & 1), states if len(states) <= STATE_LIMIT else b""
    )
