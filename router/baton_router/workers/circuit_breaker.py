"""
The circuit breaker of a worker, which its failed requests open.

    closed -> open, for a pause -> half open: one request decides -> closed, or open for twice as long

A breaker is a value: each method takes an outcome and its time and returns the next breaker. Only failures of
the worker count. A busy worker, or one that rejects an invalid request, is healthy. Without recent failures,
a request costs a check of two fields.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

FAILURES_IN_A_ROW = 5
"""Consecutive failures that open the breaker."""

WINDOW = 20
"""Latest outcomes, from a failure on, that open the breaker if half of them are failures."""

WINDOW_S = 10.0
"""Seconds within which these outcomes must have come."""

PAUSE_S = 2.0
"""Seconds of the first pause; each further pause is twice as long."""

PAUSE_LIMIT_S = 60.0
"""Maximum seconds of a pause. After this time without one, the next pause is a first one again."""


@dataclass(frozen=True, slots=True)
class CircuitBreaker:
    """The breaker of one worker. Requests have unique numbers > 0."""

    failures: int = 0
    """Consecutive ones."""
    recent: tuple[tuple[float, bool], ...] = ()
    """Times of outcomes and whether they were failures, from a failure on; the newest last."""
    openings: int = 0
    """Consecutive pauses, less than `PAUSE_LIMIT_S` apart."""
    opened: bool = False
    since: float = 0.0
    """When it last opened or closed."""
    probe: int = 0
    """Number of the running request that decides whether the breaker closes; 0 without one."""

    @property
    def until(self) -> float:
        """The end of the pause, if it is open."""
        return self.since + min(PAUSE_S * 2.0 ** min(self.openings - 1, 10), PAUSE_LIMIT_S)

    def refuses(self, now: float) -> bool:
        """Whether the worker should get no request now."""
        return self.opened and (now < self.until or self.probe != 0)

    def sent(self, number: int, now: float) -> CircuitBreaker:
        """A request was sent to the worker, even if the breaker refuses."""
        if not self.opened or self.refuses(now):
            return self
        return replace(self, probe=number)

    def served(self, number: int, now: float) -> CircuitBreaker:
        """A request was answered with a status that is not the worker's fault."""
        if self.opened:
            if number != self.probe:
                return self  # sent before the pause, or as a last resort: one answer proves nothing
            return CircuitBreaker(openings=self.openings, since=now)
        if not self.failures and not self.recent:
            return self
        recent = (*self.recent, (now, False))[-WINDOW:]
        return replace(self, failures=0, recent=recent if any(failed for _, failed in recent) else ())

    def failed(self, number: int, now: float) -> CircuitBreaker:
        """A request failed because of the worker."""
        if self.opened:
            return self._open(now) if number == self.probe else self
        recent = (*self.recent, (now, True))[-WINDOW:]
        half = len(recent) == WINDOW and now - recent[0][0] <= WINDOW_S
        half = half and 2 * sum(failed for _, failed in recent) >= WINDOW
        if half or self.failures + 1 >= FAILURES_IN_A_ROW:
            return self._open(now)
        return replace(self, failures=self.failures + 1, recent=recent)

    def release(self, number: int) -> CircuitBreaker:
        """A request has ended; if it was the probe and decided nothing, another one may be."""
        return replace(self, probe=0) if number and number == self.probe else self

    def _open(self, now: float) -> CircuitBreaker:
        again = self.opened or now - self.since <= PAUSE_LIMIT_S
        return CircuitBreaker(openings=self.openings + 1 if again else 1, opened=True, since=now)
