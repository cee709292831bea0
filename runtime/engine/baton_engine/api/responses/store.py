"""
Where a response's conversation comes from, and where it goes.

A worker of its own keeps responses itself. Behind a router it keeps none: the next request may come to
another worker, so the router keeps them, and gives each request its whole conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from baton_api.response_items import named
from baton_api.response_store import ResponseStore, Turn

Response = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recalled:
    """What a request is answered from."""

    items: Sequence[object]
    """The whole conversation, oldest first."""
    earlier: int
    """How many of them come from earlier responses."""
    keep: Callable[[Response], None]
    """To be called with the response if it is to be kept."""


class ConversationMemory(Protocol):
    """Belongs to one request."""

    def recall(self, previous: str | None, given: Sequence[object]) -> Recalled:
        """`given` are the items of the request's input. Raises PreviousResponseNotFound."""
        ...


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """Keeps responses here."""

    store: ResponseStore
    owner: bytes

    def recall(self, previous: str | None, given: Sequence[object]) -> Recalled:
        before = None if previous is None else self.store.previous(self.owner, previous)
        earlier = [msgspec.json.decode(item) for item in before.conversation] if before else []

        def keep(response: Response) -> None:
            body = msgspec.json.encode(response)
            self.store.put(self.owner, Turn(response["id"], before, named(given), body))

        return Recalled([*earlier, *given], len(earlier), keep)


@dataclass(frozen=True, slots=True)
class RoutersMemory:
    """The router keeps them, and has put `earlier` items before the input."""

    earlier: int

    def recall(self, previous: str | None, given: Sequence[object]) -> Recalled:
        return Recalled(given, min(self.earlier, len(given)), forget)


def forget(response: Response) -> None:
    """Keep nothing."""
