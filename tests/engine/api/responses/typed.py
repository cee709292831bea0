"""Typed events as they stand in a stream, checked against OpenAI's own models of them."""

from __future__ import annotations

from typing import Any, get_args

import msgspec
from openai.types.responses import Response, ResponseStreamEvent

_MODELS = {
    kind: model
    for model in get_args(get_args(ResponseStreamEvent)[0])
    for kind in get_args(model.model_fields["type"].annotation)
}
"""OpenAI's model of each type of event."""


def typed_events(stream: str | bytes) -> list[dict[str, Any]]:
    """Each event's data: named by its type, numbered from 0, as OpenAI has it, and nothing between."""
    text = stream if isinstance(stream, str) else stream.decode()
    blocks = [block for block in text.split("\n\n") if block and not block.startswith(":")]
    events: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = msgspec.json.decode(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        _MODELS[event["type"]].model_validate(event)
        events.append(event)
    return events


def whole_response(body: Any) -> Response:
    """The object as OpenAI's model of it, with every field that it wants."""
    return Response.model_validate(body)


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The events' types without what all have in common, deltas that follow one another as one."""
    short = [event["type"].removeprefix("response.") for event in events]
    return [
        kind
        for kind, before in zip(short, ["", *short], strict=False)
        if not (kind == before and "delta" in kind)
    ]
