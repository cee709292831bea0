"""Calls as answers show them: whole in a message, piece by piece in the deltas of a stream."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from baton_engine.api.parsing.parts import Arguments, Call, Part
from baton_engine.api.parsing.tools.toolbox import Toolbox


def message_calls(parts: Iterable[Part], toolbox: Toolbox) -> dict[str, Any]:
    """What the calls in `parts` add to a message: `tool_calls` or `function_call`, or nothing."""
    calls: dict[int, tuple[Call, list[str]]] = {}
    for part in parts:
        if isinstance(part, Call):
            calls[part.index] = part, []
        elif isinstance(part, Arguments):
            calls[part.index][1].append(part.text)
    if not calls:
        return {}
    if toolbox.legacy:
        call, texts = calls[0]
        return {"function_call": {"name": call.name, "arguments": "".join(texts)}}
    return {
        "tool_calls": [
            {"id": call.id} | _opened(call.name, "".join(texts), _is_custom(call, toolbox))
            for call, texts in calls.values()
        ]
    }


class CallDeltas:
    """The deltas of one choice's calls: index always, id, type and name once, then pieces of arguments."""

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self._custom: set[int] = set()

    def delta(self, part: Call | Arguments) -> dict[str, Any]:
        """What `part` adds to a chunk's `delta`."""
        if self._toolbox.legacy:
            named = (
                {"name": part.name, "arguments": ""} if isinstance(part, Call) else {"arguments": part.text}
            )
            return {"function_call": named}
        if isinstance(part, Call):
            custom = _is_custom(part, self._toolbox)
            if custom:
                self._custom.add(part.index)
            entry = {"index": part.index, "id": part.id} | _opened(part.name, "", custom)
        elif part.index in self._custom:
            entry = {"index": part.index, "custom": {"input": part.text}}
        else:
            entry = {"index": part.index, "function": {"arguments": part.text}}
        return {"tool_calls": [entry]}


def finish_reason(toolbox: Toolbox) -> str:
    """Of an answer with calls that the model ended itself."""
    return "function_call" if toolbox.legacy else "tool_calls"


def _opened(name: str, text: str, custom: bool) -> dict[str, Any]:
    if custom:
        return {"type": "custom", "custom": {"name": name, "input": text}}
    return {"type": "function", "function": {"name": name, "arguments": text}}


def _is_custom(call: Call, toolbox: Toolbox) -> bool:
    return toolbox.callable[call.name].custom
