"""The typed, numbered events of one stream: https://developers.openai.com/api/docs/guides/streaming-responses"""

from __future__ import annotations

import itertools
from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()


class Events:
    """Collects the events of one response until they are taken; a response that is not streamed has none."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._numbers = itertools.count()
        self._waiting: list[bytes] = []

    def add(self, kind: str, body: dict[str, Any]) -> None:
        if self._wanted:
            data = _encoder.encode({"type": kind, "sequence_number": next(self._numbers)} | body)
            self._waiting.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))

    def take(self) -> bytes:
        """All that were added since the last time, as bytes of the stream."""
        taken = b"".join(self._waiting)
        self._waiting.clear()
        return taken
