"""
What this router has given one worker to do that is not done, and how long it will take.

A prompt is booked with its predicted seconds when it is sent, and let go with its first token. A worker
computes prompts one after the other, so what is ahead of a new one is the sum of the bookings, less the
time that the first of them has been computed for: to count that one in full until it ends would make a
worker that is nearly done look as busy as one that has just begun.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

PROGRESS_LIMIT = 0.95
"""Share of a booking that can have passed while it is not done: the rest is still to come."""


@dataclass(frozen=True, slots=True)
class Booking:
    """One prompt that a worker is to compute."""

    seconds: float
    """Predicted."""
    tokens: int
    """To be computed."""


class PrefillBookings:
    """The prompts that one worker has to compute, in the order in which they were sent."""

    __slots__ = ("_booked", "_head_began", "seconds", "tokens")

    def __init__(self) -> None:
        self._booked: OrderedDict[int, Booking] = OrderedDict()
        self._head_began = 0.0
        self.seconds = 0.0
        """Of all bookings."""
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._booked)

    def book(self, number: int, booking: Booking, now: float) -> None:
        if not self._booked:
            self._head_began = now
            self.seconds = 0.0  # sums of floating point drift; an empty list is a chance to be exact
        self._booked[number] = booking
        self.seconds += booking.seconds
        self.tokens += booking.tokens

    def release(self, number: int, now: float) -> None:
        """It is done, or will not be; a number that is not booked is none of ours."""
        head = next(iter(self._booked), None)
        booking = self._booked.pop(number, None)
        if booking is None:
            return
        self.seconds -= booking.seconds
        self.tokens -= booking.tokens
        if number == head:
            self._head_began = now

    def backlog_s(self, now: float) -> float:
        """Seconds until the worker would begin with another prompt."""
        if not self._booked:
            return 0.0
        head = next(iter(self._booked.values()))
        progress = min(PROGRESS_LIMIT * head.seconds, max(0.0, now - self._head_began))
        return max(0.0, self.seconds - progress)


class StreamBookings:
    """The requests for which one worker generates, or soon will."""

    __slots__ = ("_booked", "tokens")

    def __init__(self) -> None:
        self._booked: dict[int, int] = {}
        self.tokens = 0
        """Of all their contexts."""

    def __len__(self) -> int:
        return len(self._booked)

    def book(self, number: int, tokens: int) -> None:
        self._booked[number] = tokens
        self.tokens += tokens

    def release(self, number: int) -> None:
        self.tokens -= self._booked.pop(number, 0)
