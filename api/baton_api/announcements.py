"""
Announcements of a process to the supervisor that started it: JSON lines over a pipe.

A child process binds its own ports and announces them, so the supervisor does not guess a free port. It
announces its loading progress for a progress bar, and that it is ready after a real request passed. The log
is separate. A process without a pipe announces nothing. `baton fetch` reports through a file instead.
"""

from __future__ import annotations

import os

import msgspec


class Listening(msgspec.Struct, frozen=True, kw_only=True, tag="listening"):
    """The process has bound its port. It may not serve requests yet."""

    host: str
    port: int


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag="loading"):
    """Progress of the startup."""

    label: str
    done: int
    total: int
    """0: unknown."""


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """The process serves requests."""

    control: str = ""
    """`host:port` of the control server of a prefill worker."""


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The startup failed with a SetupError, whose message it has."""

    reason: str


Announcement = Listening | Loading | Ready | Refused

_encoder = msgspec.json.Encoder()
_decoder: msgspec.json.Decoder[Announcement] = msgspec.json.Decoder(Announcement)


class Announcer:
    """The child's end of the pipe."""

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor` is inherited from the supervisor. Without one, nothing is announced."""
        self._descriptor = descriptor

    def __call__(self, announcement: Announcement) -> None:
        """Write one line. Raises BrokenPipeError if the supervisor has ended."""
        if self._descriptor is not None:
            # Lines are shorter than PIPE_BUF, so each write is atomic.
            os.write(self._descriptor, _encoder.encode(announcement) + b"\n")


def read(line: bytes) -> Announcement:
    """Parse one line of the pipe. Raises msgspec.DecodeError if it is invalid."""
    return _decoder.decode(line)


class Bar:
    """Progress of loading, announced at most once per percent."""

    def __init__(self, announce: Announcer) -> None:
        self._announce = announce
        self._label = ""
        self._done = 0
        self._total = 0
        self._announced = 0

    def start(self, label: str, total_bytes: int) -> None:
        self._label, self._total, self._done, self._announced = label, total_bytes, 0, 0
        self._send()

    def advance(self, size: int) -> None:
        self._done += size
        if self._done - self._announced >= max(1, self._total // 100):
            self._send()

    def done(self) -> None:
        self._done = self._total = max(self._done, self._total)
        self._send()

    def _send(self) -> None:
        self._announced = self._done
        self._announce(Loading(label=self._label, done=self._done, total=self._total))


RESULT_FILE = "BATON_FETCH_RESULT_FILE"
"""Environment variable with the path of the result file of `baton fetch`. The result is the fetched commit,
or the digest of the files' versions. Without the variable, no file is written."""

PINNED_REVISION = "BATON_FETCH_PINNED_REVISION"
"""Environment variable with the commit to fetch, instead of the newest one, when no revision is requested.
Existing files stay, whatever their commit."""
