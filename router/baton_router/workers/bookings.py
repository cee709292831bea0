"""
The work of a worker that this router has sent and that is not done: prompts to compute, and streams.

A prompt is booked with its predicted seconds when it is sent, and released with its first token. A worker
computes prompts one after the other, so the backlog ahead of a new one is the sum of the bookings. The time
for which the first of them has been computed is subtracted. Otherwise a worker that is nearly done would look
as busy as one that has just begun.
"""

from __future__ import annotations

from collections import OrderedDict

PROGRESS_LIMIT = 0.95
"""Share of a booking that can have passed while it is not done: the rest is still to come."""


class PrefillBookings:
    """The prompts that one worker has to compute, in the order in which they were sent."""

    __slots__ = ("_booked", "_head_began", "_head_s", "seconds", "tokens", "waiting")

    def __init__(self) -> None:
        self._booked: OrderedDict[int, tuple[float, int]] = OrderedDict()
        """Number -> seconds, tokens."""
        self._head_began = 0.0
        self._head_s = 0.0
        """Seconds of the first one that can have passed while it is not done."""
        self.seconds = 0.0
        """Of all bookings."""
        self.tokens = 0
        self.waiting = 0
        """Number of bookings."""

    def book(self, number: int, seconds: float, tokens: int, now: float) -> None:
        """Add a prompt with `tokens` to compute in predicted `seconds`."""
        if not self._booked:
            self._head_began = now
            self._head_s = PROGRESS_LIMIT * seconds
            self.seconds = 0.0  # sums of floating point drift; an empty list is a chance to be exact
        self._booked[number] = seconds, tokens
        self.waiting += 1
        self.seconds += seconds
        self.tokens += tokens

    def release(self, number: int, now: float) -> None:
        """Remove a prompt that is computed, or never will be. Unknown numbers are ignored."""
        booked = self._booked
        if number not in booked:
            return
        was_head = next(iter(booked)) == number
        seconds, tokens = booked.pop(number)
        self.waiting -= 1
        self.seconds -= seconds
        self.tokens -= tokens
        if was_head:
            self._head_began = now
            self._head_s = PROGRESS_LIMIT * next(iter(booked.values()))[0] if booked else 0.0

    def waited_s(self, number: int, sent: float) -> float | None:
        """
        Seconds for which a prompt sent at `sent` waited until the worker began with it, by the bookings.

        None if an earlier prompt is not done: then the worker computes several at once.
        """
        if number not in self._booked or next(iter(self._booked)) != number:
            return None
        return max(0.0, self._head_began - sent)

    def backlog_s(self, now: float) -> float:
        """Seconds until the worker would begin with another prompt."""
        if not self.waiting:
            return 0.0
        progress = now - self._head_began
        left = self.seconds - (progress if progress < self._head_s else self._head_s)
        return left if left > 0.0 else 0.0


class StreamBookings:
    """The choices that one worker generates, or soon will."""

    __slots__ = ("_booked", "count", "tokens")

    def __init__(self) -> None:
        self._booked: dict[int, tuple[int, int]] = {}
        """Number of a request -> tokens, choices."""
        self.tokens = 0
        """Of all their contexts."""
        self.count = 0

    def book(self, number: int, tokens: int, choices: int = 1) -> None:
        """Add a request, whose choices share the `tokens` of its prompts."""
        self._booked[number] = tokens, choices
        self.tokens += tokens
        self.count += choices

    def release(self, number: int) -> None:
        tokens, choices = self._booked.pop(number, (0, 0))
        self.tokens -= tokens
        self.count -= choices
