"""What is answered about responses that are kept, by a worker of its own and by the router of a cluster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import msgspec

from baton_api import response_items
from baton_api.errors import InvalidRequest
from baton_api.response_store import ResponseStore


def retrieve(store: ResponseStore, owner: bytes, id: str, query: Mapping[str, str]) -> bytes:
    """`GET /v1/responses/{id}`: the response as it was given. Raises ResponseNotFound, InvalidRequest."""
    found = store.get(owner, id)
    if query.get("stream", "false").lower() not in ("false", "0"):
        raise InvalidRequest(
            "Only responses that were made in the background can be streamed again.", param="stream"
        )
    return found.body


def delete(store: ResponseStore, owner: bytes, id: str) -> bytes:
    """`DELETE /v1/responses/{id}`. Raises ResponseNotFound."""
    store.delete(owner, id)
    return msgspec.json.encode({"id": id, "object": "response", "deleted": True})


def input_items(store: ResponseStore, owner: bytes, id: str, query: Mapping[str, str]) -> bytes:
    """`GET /v1/responses/{id}/input_items`. Raises ResponseNotFound, InvalidRequest."""
    return response_items.page(store.get(owner, id).whole_input, query)


def cancel(store: ResponseStore, owner: bytes, id: str) -> NoReturn:
    """`POST /v1/responses/{id}/cancel`: nothing runs in the background, where it could be."""
    store.get(owner, id)
    raise InvalidRequest("Cannot cancel a synchronous response.")
