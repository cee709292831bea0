"""
What a process tells the supervisor that started it, one JSON line at a time, over a pipe of their own.

A child binds its own ports and says which it got, so that nobody guesses a free one; it says what it is
loading, so that a command line can draw a bar; and it says when it is ready, which is after a real
request passed. Log lines go their own way. Without a pipe nothing is said.
"""

from __future__ import annotations

import os

import msgspec


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag="listening"):
    """The port is this process's own from now on, whether it answers already or not."""

    host: str
    port: int


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag="loading"):
    """How far the start is."""

    label: str
    done: int
    total: int
    """0 where nobody knows."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Requests are answered."""

    control: str = ""
    """`host:port` of the control server of a prefill worker."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The start failed in a way that only a person can change: the message of the SetupError."""

    reason: str


Announcement = Listening | Loading | Ready | Refused

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Announcement] = msgspec.json.Decoder(Announcement)


class Announcer:
    """The child's end of the pipe."""

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor` is inherited from the supervisor; None says nothing to nobody."""
        self._descriptor = descriptor

    def __call__(self, announcement: Announcement) -> None:
        """Write one line. Raises BrokenPipeError if the supervisor is gone."""
        if self._descriptor is not None:
            # Lines are shorter than PIPE_BUF, so that each goes out in one piece.
            os.write(self._descriptor, _encoder.encode(announcement) + b"\n")


def read(line: bytes) -> Announcement:
    """One line of the pipe; raises msgspec.DecodeError if it is none."""
    return _decoder.decode(line)


class Bar:
    """`Progress` of a start, announced as it grows; at most one line per hundredth."""

    def __init__(self, announce: Announcer) -> None:
        self._announce = announce
        self._label = ""
        self._done = 0
        self._total = 0
        self._said = 0

    def start(self, label: str, total_bytes: int) -> None:
        self._label, self._total, self._done, self._said = label, total_bytes, 0, 0
        self._say()

    def advance(self, size: int) -> None:
        self._done += size
        if self._done - self._said >= max(1, self._total // 100):
            self._say()

    def done(self) -> None:
        self._done = self._total = max(self._done, self._total)
        self._say()

    def _say(self) -> None:
        self._said = self._done
        self._announce(Loading(label=self._label, done=self._done, total=self._total))
