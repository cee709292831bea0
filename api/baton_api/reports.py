"""
What a worker says of a prompt with the first byte of its answer, in one header, for those who route.

Figures only: how much of the prompt was cached, what the rest took, and where. A router learns from them
what a worker is like and corrects what it believed; clients see them too, and may wonder less.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from dataclasses import dataclass
from typing import Self

FIELD_LIMIT = 64
"""Characters of one figure; a longer one is none of ours."""


class Fallback(enum.StrEnum):
    """Why a prompt did not come over whole from a prefill worker, and was computed where it was wanted."""

    UNREACHABLE = "unreachable"
    LOST = "lost"
    """The connection ended, or nothing was heard over it for too long."""
    BUSY = "busy"
    """The prefill worker had no room for one more, or is draining."""
    REJECTED = "rejected"
    """The prefill worker computes no such prompt: it is too long for it, or asks for what it lacks."""
    FAILED = "failed"
    """The prefill worker broke over it, and said so."""
    MISMATCH = "mismatch"
    """What the prefill worker computed is not what was asked for."""
    PROTOCOL = "protocol"
    """The prefill worker said what the protocol forbids."""
    REFUSED = "refused"
    """The two do not fit, or the ticket is not good."""
    TRANSPORT = "transport"
    """A read ended in an error."""
    CHECKSUM = "checksum"
    """Blocks arrived damaged."""
    DEADLINE = "deadline"
    """A read, or the whole prompt, took too long."""
    CANCELLED = "cancelled"
    TRANSFER_FAILED = "transfer_failed"
    """The decode worker failed while it asked for the prompt; its log has the exception."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReport:
    """One prompt, whoever computed it."""

    tokens: int
    """Of the prompt."""
    cached: int
    """Of those, how many were not computed."""
    held: int
    """How many the generating worker held before it asked anybody."""
    queue_s: float
    """From its arrival at the worker that computed it to the begin of the computation."""
    compute_s: float
    """From there to its first token."""
    transfer_s: float
    """In which blocks were moved; mostly while others were computed."""
    remote: bool
    """Whether a prefill worker computed it."""
    tail: str = ""
    """The prompt's last full block, as `baton_api.kv_events` name it, in hex; empty if it has none."""
    fallback: str = ""
    """Why a prefill worker that was asked did not bring the prompt, mostly in a word of `Fallback`; empty if
    it did, or nobody was asked."""

    def encode(self) -> str:
        """
        >>> report = PromptReport(tokens=270, cached=240, held=0, queue_s=0.001, compute_s=0.12,
        ...                       transfer_s=0.003, remote=True)
        >>> report.encode()
        'tokens=270;cached=240;held=0;queue_s=0.001000;compute_s=0.120000;transfer_s=0.003000;remote=1;tail=;fallback='
        """
        return ";".join(f"{name}={_shown(value)}" for name, value in dataclasses.asdict(self).items())

    @classmethod
    def decode(cls, text: str) -> Self | None:
        """None for what is no report: an older worker's, or another server's header."""
        plain = _PLAIN.fullmatch(text)
        if plain is not None:  # as `encode` writes it: there are as many of them as requests
            tokens, cached, held, queue_s, compute_s, transfer_s, remote, tail, fallback = plain.groups("")
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
            sound = report.cached <= report.tokens and report.held <= report.tokens
            return report if sound and report.tokens else None
        given = dict(part.partition("=")[::2] for part in text.split(";"))
        try:
            values = {name: given[name] for name in _NAMES} | {name: given.get(name, "") for name in _LATER}
            if any(len(value) > FIELD_LIMIT for value in values.values()):
                return None
            report = cls(
                tokens=int(values["tokens"]),
                cached=int(values["cached"]),
                held=int(values["held"]),
                queue_s=float(values["queue_s"]),
                compute_s=float(values["compute_s"]),
                transfer_s=float(values["transfer_s"]),
                remote=values["remote"] == "1",
                tail=values["tail"],
                fallback=values["fallback"],
            )
        except (KeyError, ValueError):
            return None
        times = (report.queue_s, report.compute_s, report.transfer_s)
        sound = (
            report.tokens > 0 and 0 <= report.cached <= report.tokens and 0 <= report.held <= report.tokens
        )
        sound = sound and _TAIL.fullmatch(report.tail) is not None
        sound = sound and _WORD.fullmatch(report.fallback) is not None
        return report if sound and all(0 <= time < 1e6 for time in times) else None


def _shown(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:.6f}" if isinstance(value, float) else str(int(value))


_LATER = ("tail", "fallback")
_NAMES = tuple(field.name for field in dataclasses.fields(PromptReport) if field.name not in _LATER)
"""What every report says; the others came later."""

_PLAIN = re.compile(
    r"tokens=([0-9]{1,9});cached=([0-9]{1,9});held=([0-9]{1,9});"
    r"queue_s=([0-9]{1,5}\.[0-9]{6});compute_s=([0-9]{1,5}\.[0-9]{6});transfer_s=([0-9]{1,5}\.[0-9]{6});"
    r"remote=([01]);tail=([0-9a-f]{16})?(?:;fallback=([a-z_]{0,32}))?"
)
_TAIL = re.compile("([0-9a-f]{16})?")
_WORD = re.compile("[a-z_]{0,32}")
