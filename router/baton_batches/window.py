"""
How many lines of a batch are in flight: it grows while throughput grows, and shrinks on overload.

Pure: times are passed in. A round is the time in which as many lines come back as the window is wide. As
long as nobody refuses, the window is doubled while that brings more lines per second, then widened by less,
and from then on tried a little wider and a little narrower in turn: it stays where a line more brings a
quarter of what a line brought at first, because what is beyond that only makes others wait. Who refuses (429,
503) is taken at his word: the window is halved, nothing is sent for the seconds of `Retry-After`, and from
there on it grows as TCP's does, quickly to half of what was too much and then by a little per round.
"""

from __future__ import annotations

import math

FIRST = 32
MOST = 512

ROUND_S = 0.25
"""Seconds of the shortest round: answers that come at once say little in less."""

GAIN = 0.25
"""Of the lines per second that a wider window would bring if nothing limited it, what it must bring."""

WIDEST_STEP = 2.0
STEP = 1.25
"""By how much another width is tried, at first and in the end; the excess is halved from one to the other."""

REST_ROUNDS = 8
"""Rounds from one trial of another width to the next, once a good one is found."""

SMOOTHING = 0.3
"""Weight of the last round in the rate that others are held against."""


class SendWindow:
    """The window of one runner."""

    def __init__(self, now: float, first: int = FIRST, most: int = MOST) -> None:
        self.size = min(first, most)
        self.open_at = now
        """Nothing is to be sent before."""
        self._most = most
        self._began = now
        self._answered = 0
        self._cut_at = now
        self._served = True
        """Whether anything was answered since the last cut."""
        self._half = 0
        """Half of the size that was too much; 0 as long as none was. Then refusals bound the window."""
        self._kept: tuple[int, float] | None = None
        """The width that is good, and its lines per second: what others are held against."""
        self._step = WIDEST_STEP
        self._narrower = False
        """Whether the next trial is of a narrower one."""
        self._resting = 0
        self._doubted = False
        """Whether the width on trial has failed once: it has two rounds, because chance is in each."""

    def bound(self, most: int) -> None:
        """It is to be no wider than that from now on, and may be as wide."""
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
        """A line came back with something that is not a refusal."""
        self._answered += 1
        self._served = True
        seconds = now - self._began
        if self._answered < self.size or seconds < ROUND_S:
            return
        self._turn(self._answered / seconds)
        self._began = now
        self._answered = 0

    def refused(self, sent: float, now: float, wait_s: float) -> None:
        """A line that was sent at `sent` came back with a request to come later, in `wait_s` seconds."""
        self.pause(now, wait_s)
        if sent < self._cut_at:
            return  # it was sent when the window was still as wide as that; to cut again would punish twice
        if self._served:  # if nobody is served at all, it was not the size that was too much
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
        """A round is over that brought so many lines per second: how wide is the next?"""
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
        """A round with another width is over; `size` had `before` lines per second."""
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
        """The next round is one with another width."""
        if self._narrower:
            self.size = max(1, math.floor(self.size / self._step))
        else:
            self.size = min(self._most, math.ceil(self.size * self._step))
        if self._kept is not None and self.size == self._kept[0]:  # there is none on this side
            self._narrower = not self._narrower
            self._resting = REST_ROUNDS
