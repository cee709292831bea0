"""
How many lines of a batch are sent at once: as many as help, fewer when somebody says that it is too much.

Pure: times are passed in. A round is the time in which as many lines come back as the window is wide. As long
as nobody refuses, the window is doubled for as long as a wider one brings more lines per second, then left
where it was, and tried anew now and then. Who refuses (429, 503) is taken at his word: the window is halved,
nothing is sent for the seconds of `Retry-After`, and from there on it grows as TCP's does, quickly to half of
what was too much and then by a little per round.
"""

from __future__ import annotations

FIRST = 32
MOST = 512

ROUND_S = 0.25
"""Seconds of the shortest round: answers that come at once say little in less."""

GAIN = 0.25
"""Of the lines per second that a wider window would bring if nothing limited it, what it must bring."""

REST_ROUNDS = 16
"""Rounds after which a window that did not help is tried again; twice as many every time it does not."""

REST_LIMIT = 256

SMOOTHING = 0.3
"""Weight of the last round in the rate that others are held against."""


class Window:
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
        """A size that was tried, and its lines per second: what a larger one is held against."""
        self._resting = 0
        self._rest = REST_ROUNDS

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
        if self._kept is None or self.size <= self._kept[0]:
            before = rate if self._kept is None else self._kept[1]
            self._kept = (self.size, before + SMOOTHING * (rate - before))
            if self._resting:
                self._resting -= 1
                return
            self.size = min(self._most, self.size * 2)
            return
        size, before = self._kept
        wanted = 1 + GAIN * (self.size / size - 1)
        if rate >= before * wanted:
            self._kept = (self.size, rate)
            self._rest = REST_ROUNDS
            self.size = min(self._most, self.size * 2)
        else:
            self.size = size
            self._resting = self._rest
            self._rest = min(REST_LIMIT, self._rest * 2)
