"""
How many lines of a batch are in flight: as many as the workers gain from, and fewer after rejections.

A round is the time in which as many lines are answered as the window is wide. Without rejections, the window
doubles while that brings more lines per second, and then widens by less. From then on, probes of a slightly
wider and a slightly narrower window alternate. The window stays where one more line brings a quarter of the
gain of the first lines, because a wider one only makes other requests wait.

A rejection (429, 503) halves the window and stops sending for the seconds of `Retry-After`. From there it
grows as TCP's window does: quickly to half of the rejected size, and then by a little per round.

Pure: times are passed in.
"""

from __future__ import annotations

import math

FIRST = 32
MOST = 512

ROUND_S = 0.25
"""Seconds of the shortest round: fast answers make shorter ones too noisy."""

GAIN = 0.25
"""Of the lines per second that a wider window would bring if nothing limited it, what it must bring."""

WIDEST_STEP = 2.0
STEP = 1.25
"""Factors of the first and of the last probes; the excess over 1 is halved from one to the next."""

REST_ROUNDS = 8
"""Rounds between two probes, once a good width is found."""

SMOOTHING = 0.3
"""Weight of the last round in the rate of the current width."""


class SendWindow:
    """The window of one runner."""

    def __init__(self, now: float, most: int = MOST) -> None:
        self.size = min(FIRST, most)
        self.open_at = now
        """Time before which no line may be sent."""
        self._most = most
        self._began = now
        self._answered = 0
        self._cut_at = now
        self._served = True
        """Whether anything was answered since the last cut."""
        self._half = 0
        """Half of the rejected size; 0 before a rejection. After one, rejections bound the window."""
        self._kept: tuple[int, float] | None = None
        """The best width so far and its lines per second, with which probes are compared."""
        self._step = WIDEST_STEP
        self._narrower = False
        """Whether the next probe is narrower."""
        self._resting = 0
        self._doubted = False
        """Whether the probed width has failed once: it gets two rounds, because each one is noisy."""

    def bound(self, most: int) -> None:
        """Set the maximum width."""
        if most == self._most:
            return
        self._most = most
        self.size = min(self.size, most)
        self._kept = None
        self._step = WIDEST_STEP
        self._narrower = False
        self._doubted = False
        self._resting = 0

    def answered(self, now: float) -> None:
        """Count a response other than a rejection."""
        self._answered += 1
        self._served = True
        seconds = now - self._began
        if self._answered < self.size or seconds < ROUND_S:
            return
        self._turn(self._answered / seconds)
        self._began = now
        self._answered = 0

    def refused(self, sent: float, now: float, wait_s: float) -> None:
        """Count a rejection with `Retry-After: wait_s` of a line that was sent at `sent`."""
        self.pause(now, wait_s)
        if sent < self._cut_at:
            return  # it was sent before the last cut, which accounts for it
        if self._served:  # without any answer, the size was not the cause
            self._half = max(1, self.size // 2)
        self.size = max(1, self.size // 2)
        self._served = False
        self._cut_at = now
        self._began = now
        self._answered = 0

    def pause(self, now: float, wait_s: float) -> None:
        """Send nothing for so long."""
        self.open_at = max(self.open_at, now + wait_s)

    def _turn(self, rate: float) -> None:
        """Choose the width of the next round after one with `rate` lines per second."""
        if self._half:
            step = self.size if self.size < self._half else max(1, self.size // 16)
            self.size = min(self._most, self.size + step)
            return
        if self._kept is None:
            self._kept = (self.size, rate)
            self._try_another()
        elif self.size == self._kept[0]:
            before = self._kept[1]
            self._kept = (self.size, before + SMOOTHING * (rate - before))
            if self._resting:
                self._resting -= 1
            else:
                self._try_another()
        else:
            self._judge(rate, *self._kept)

    def _judge(self, rate: float, size: int, before: float) -> None:
        """Compare a probe's `rate` with that of `size`, which had `before` lines per second."""
        wanted = before * (1 + GAIN * (self.size / size - 1))
        if rate < wanted and not self._doubted:
            self._doubted = True
            return
        self._doubted = False
        settled = self._step <= STEP
        if rate >= wanted:
            self._kept = (self.size, rate)
        else:
            self.size = size
            if not settled:
                self._step = 1 + (self._step - 1) / 2
        if settled:
            self._resting = REST_ROUNDS
            self._narrower = not self._narrower
        else:
            self._try_another()

    def _try_another(self) -> None:
        """Probe another width in the next round."""
        if self._narrower:
            self.size = max(1, math.floor(self.size / self._step))
        else:
            self.size = min(self._most, math.ceil(self.size * self._step))
        if self._kept is not None and self.size == self._kept[0]:  # at the limit of this side
            self._narrower = not self._narrower
            self._resting = REST_ROUNDS
