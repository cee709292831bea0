"""
Storage of conversations for `previous_response_id`.

A standalone worker stores responses itself. Behind a router, the next request may reach another worker. The
router therefore stores responses, and sends the whole conversation with each request.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from baton_api.response_items import REFERENCE, named
from baton_api.response_store import ResponseStore, Turn

Response = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Recalled:
    """The conversation of a request."""

    items: Sequence[object]
    """The whole conversation, oldest item first."""
    earlier: int
    """Number of items from earlier responses."""
    keep: Callable[[Response], None]
    """Stores the response."""


class ConversationMemory(Protocol):
    """Access of one request to stored conversations."""

    def recall(self, previous: str | None, given: Sequence[object]) -> Recalled:
        """
        Return the conversation that ends with `given`, with kept items in place of references.

        Raises PreviousResponseNotFound, and InvalidRequest for an unknown item.
        """
        ...


@dataclass(frozen=True, slots=True)
class OwnMemory:
    """Stores responses in this worker."""

    store: ResponseStore
    owner: bytes

    def recall(self, previous: str | None, given: Sequence[object]) -> Recalled:
        if any(isinstance(item, dict) and item.get("type") == REFERENCE for item in given):
            resolved = self.store.resolved(self.owner, [msgspec.json.encode(item) for item in given])
            given = [msgspec.json.decode(item) for item in resolved]
        before = None if previous is None else self.store.previous(self.owner, previous)
        earlier = [msgspec.json.decode(item) for item in before.conversation] if before else []

        def keep(response: Response) -> None:
            body = msgspec.json.encode(response)
            self.store.put(self.owner, Turn(response["id"], before, named(given), body))

        return Recalled([*earlier, *given], len(earlier), keep)


@dataclass(frozen=True, slots=True)
class RoutersMemory:
    """The router stores responses, and has put `earlier` items before the input."""

    earlier: int

    def recall(self, previous: str | None, given: Sequence[object]) -> Recalled:
        return Recalled(given, min(self.earlier, len(given)), forget)


def forget(response: Response) -> None:
    """Do not store the response."""
