"""
Whether blocks are read or computed: a prediction from measured speeds, without clocks or threads.

A read must be predicted to take at most `SHARE` of the time of computing. It is given up when it takes `LATE`
times as long as predicted, and after `SHARE` at the latest. Then the peer is left alone, the longer the more
time the read has cost and the more reads have failed in a row: one that stalls for long costs at most `LOSS`.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARE = 0.5
"""Fraction of the predicted time of computing that a read may take."""

LATE = 4.0
"""A read that takes so many times the predicted time is given up."""

LEAST_S = 0.25
"""Seconds after which a read is given up at the earliest: the first one connects, and passes delay it."""

LOSS = 0.05
"""Fraction of the time of computing that reads of a peer may cost in vain."""

WINDOW_TOKENS = 8192
"""Prompt tokens over which the speed of computing is averaged."""

WEIGHT = 0.3
"""Weight of the latest read in the averages of a peer."""

FIRST_WAIT_S = 0.02
"""Assumed seconds until a peer announces blocks, before the first read."""

FIRST_BYTES_PER_S = 1e9
"""Assumed speed of the first read from a peer: that of TCP between processes of one machine."""

PAUSE_S = 30.0
"""Seconds for which a peer is not read after a failure, doubled with each further one in a row."""

DOUBLINGS = 4

FORGET_S = 60.0
"""Seconds after which a slow measurement no longer counts, so that the peer is tried again."""


class PromptSpeed:
    """Measured speed of computing prompts, averaged over about the last `WINDOW_TOKENS` tokens."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a forward pass of `seconds` with this number of prompt tokens."""
        if not tokens:
            return
        kept = max(0.0, 1 - tokens / WINDOW_TOKENS)
        self._tokens = kept * self._tokens + tokens
        self._seconds = kept * self._seconds + seconds

    def seconds(self, tokens: int) -> float:
        """Predict the seconds of computing. 0 before the first pass."""
        return tokens * self._seconds / self._tokens if self._tokens else 0.0


@dataclass(frozen=True, slots=True)
class ReadSpeed:
    """Speed of reads from one peer."""

    wait_s: float
    """Seconds until the peer announces its blocks."""
    block_s: float
    """Seconds to read and verify one block."""

    def seconds(self, blocks: int) -> float:
        return self.wait_s + blocks * self.block_s


def read_within_s(blocks: int, compute_s: float, speed: ReadSpeed) -> float:
    """
    Return the seconds that a read of `blocks` blocks may take, which take `compute_s` to compute.

    0: they are computed, because the read is predicted to take longer.
    """
    predicted_s = speed.seconds(blocks)
    if not 0 < predicted_s <= SHARE * compute_s:
        return 0.0
    return min(SHARE * compute_s, max(LEAST_S, LOSS * compute_s, LATE * predicted_s))


CLEAN_SHARE = 0.5
"""Fraction of the pool that is kept ready for new prompts: blocks without content, or that a tier has."""


def cleans(ready: int, capacity: int, room: bool) -> bool:
    """
    Whether unused blocks of the pool are copied to a tier now.

    `ready` of its `capacity` blocks can be handed out, and nothing is lost. `room`: the engine has nothing to
    do, and the tier need not drop a block for the copy.
    """
    return room or ready < CLEAN_SHARE * capacity


class PeerSpeed:
    """What was measured of one peer, or tier. `now` is in seconds of a monotonic clock."""

    def __init__(
        self, block_bytes: int, wait_s: float = FIRST_WAIT_S, bytes_per_s: float = FIRST_BYTES_PER_S
    ) -> None:
        """`wait_s` and `bytes_per_s` are assumed of the first read."""
        self._first = ReadSpeed(wait_s, block_bytes / bytes_per_s)
        self._speed = self._first
        self._measured_at = 0.0
        self._paused_until = 0.0
        self._failures = 0
        """In a row."""

    def add(self, blocks: int, wait_s: float, read_s: float, now: float) -> None:
        """Add a successful read: `wait_s` until its announcement, then `read_s` until it was verified."""
        old = self._known(now)
        self._speed = ReadSpeed(
            old.wait_s + WEIGHT * (wait_s - old.wait_s),
            old.block_s + WEIGHT * (read_s / blocks - old.block_s),
        )
        self._measured_at = now
        self._failures = 0
        self._paused_until = now

    def failed(self, now: float, lost_s: float = 0.0) -> None:
        """Note that a read failed, or was late, after `lost_s`."""
        if now >= self._paused_until:  # reads that began before the pause are one failure
            self._failures += 1
        pause_s = max(PAUSE_S * 2 ** min(self._failures - 1, DOUBLINGS), lost_s / LOSS)
        self._paused_until = max(self._paused_until, now + pause_s)

    def at(self, now: float) -> ReadSpeed | None:
        """Return the speed to predict with. None: the peer is left alone."""
        return None if now < self._paused_until else self._known(now)

    def _known(self, now: float) -> ReadSpeed:
        return self._speed if now < self._measured_at + FORGET_S else self._first
