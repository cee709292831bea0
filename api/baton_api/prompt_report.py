"""
The report of a prompt: a header that the worker sends with the first byte of its response.

It has numbers only: how much of the prompt was cached, the times of the rest, and where it was computed. The
router corrects its state of the worker with it. Clients can read it too.
"""

from __future__ import annotations

import enum
import re
from typing import Self

import msgspec


class Fallback(enum.StrEnum):
    """Reasons for which a decode worker computed a prompt instead of a prefill worker."""

    UNREACHABLE = "unreachable"
    LOST = "lost"
    """The connection ended, or the peer timed out."""
    BUSY = "busy"
    """The prefill worker is full or draining."""
    REJECTED = "rejected"
    """The prefill worker cannot compute this prompt: it is too long, or needs a missing feature."""
    FAILED = "failed"
    """The prefill worker reported a failure."""
    MISMATCH = "mismatch"
    """The prefill worker computed another prompt than the requested one."""
    PROTOCOL = "protocol"
    """The prefill worker violated the protocol."""
    REFUSED = "refused"
    """The workers are incompatible, or the ticket is invalid."""
    TRANSPORT = "transport"
    """A read of blocks failed."""
    CHECKSUM = "checksum"
    """Blocks arrived damaged."""
    DEADLINE = "deadline"
    """A read, or the whole prompt, took too long."""
    MISSING = "missing"
    """Storage that workers share does not have the blocks."""
    CANCELLED = "cancelled"
    TRANSFER_FAILED = "transfer_failed"
    """The decode worker failed while it fetched the prompt. Its log has the exception."""


class PromptReport(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one prompt."""

    tokens: int
    """Tokens of the prompt."""
    cached: int | None
    """Tokens that came from a cache. None: the engine does not report them."""
    held: int
    """Tokens that were in the decode worker's own cache."""
    queue_s: float
    """Seconds in the queue of the worker that computed the prompt."""
    compute_s: float
    """Seconds from the start of computing to the first token."""
    transfer_s: float
    """Seconds of transferring blocks, which mostly overlaps with computing."""
    remote: bool
    """Whether a prefill worker computed it."""
    tail: str = ""
    """Hex name of the prompt's last full block, as in `baton_api.kv_events`. Empty: no full block."""
    fallback: str = ""
    """Reason for which the requested prefill worker did not compute the prompt, mostly a value of
    `Fallback`. Empty: it did, or none was requested."""
    estimated: bool = False
    """Whether the router measured the times, because the engine does not report them: `compute_s` includes
    the worker's queue, and 0 is unknown. Never part of the header."""

    def completed(self, cached: int | None) -> Self:
        """The report with `cached`, if the end of the answer reported it and the beginning did not."""
        if cached is None or self.cached is not None:
            return self
        return msgspec.structs.replace(self, cached=min(cached, self.tokens))

    def encode(self) -> str:
        """
        Write the header.

        >>> times = {"queue_s": 0.5, "compute_s": 1.0, "transfer_s": 0.0}
        >>> PromptReport(tokens=9, cached=8, held=0, remote=True, **times).encode()
        'tokens=9;cached=8;held=0;queue_s=0.500000;compute_s=1.000000;transfer_s=0.000000;remote=1;tail=;fallback='
        """
        return ";".join(f"{name}={_shown(getattr(self, name))}" for name in _NAMES)

    @classmethod
    def decode(cls, text: str) -> Self | None:
        """Read a header of `encode`, also with further fields at its end. None: it is not valid."""
        match = _HEADER.fullmatch(text)
        if match is None:
            return None
        tokens, cached, held, queue_s, compute_s, transfer_s, remote, tail, fallback = match.groups("")
        report = cls(
            tokens=int(tokens),
            cached=int(cached),
            held=int(held),
            queue_s=float(queue_s),
            compute_s=float(compute_s),
            transfer_s=float(transfer_s),
            remote=remote == "1",
            tail=tail,
            fallback=fallback,
        )
        sound = 0 < report.tokens >= max(int(cached), report.held)
        return report if sound else None


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.6f}" if isinstance(value, float) else str(int(value))


_NAMES = tuple(name for name in PromptReport.__struct_fields__ if name != "estimated")

_HEADER = re.compile(
    r"tokens=([0-9]{1,9});cached=([0-9]{1,9});held=([0-9]{1,9});"
    r"queue_s=([0-9]{1,6}\.[0-9]{6});compute_s=([0-9]{1,6}\.[0-9]{6});transfer_s=([0-9]{1,6}\.[0-9]{6});"
    r"remote=([01]);tail=([0-9a-f]{16})?;fallback=([a-z_]{0,32})(?:;.*)?"
)
