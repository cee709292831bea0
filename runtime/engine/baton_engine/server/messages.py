"""A conversation as clients send it, checked, and as chat templates take it: role and text."""

from __future__ import annotations

from typing import Any

from baton_api import limits
from baton_api.errors import InvalidRequest
from baton_engine.server.fields import Fields, shown, wrong_type
from baton_engine.server.parameters import not_served

ROLES = ("developer", "system", "user", "assistant", "tool", "function")
TEXT_PARTS = ("text", "input_text", "output_text")
OTHER_PARTS = ("image_url", "input_image", "input_audio", "file", "input_file", "video_url", "audio_url")


def read_messages(fields: Fields, template: str) -> list[dict[str, str]]:
    """The request's `messages`, for a model whose chat template is `template`."""
    fields.require("messages")
    items = fields.array("messages", limits.MESSAGES.most) or []
    if not items:
        raise InvalidRequest(
            "Invalid 'messages': empty array. Expected at least 1 message.",
            param="messages",
            code="empty_array",
        )
    messages = [_message(item, f"messages[{position}]") for position, item in enumerate(items)]
    if "developer" not in template:
        for message in messages:
            if message["role"] == "developer":
                message["role"] = "system"
    return messages


def _message(item: object, path: str) -> dict[str, str]:
    if not isinstance(item, dict):
        raise wrong_type(path, "an object", item)
    fields = Fields(item, path)
    fields.require("role")
    role = fields.choice("role", ROLES)
    assert role is not None
    if role == "tool":
        fields.require("tool_call_id")
    if role in ("tool", "function"):
        raise not_served(fields.param("role"), f"The role {role!r}")
    for name in ("tool_calls", "function_call", "audio"):
        if fields.given(name):
            raise not_served(fields.param(name))
    message = {"role": role, "content": _content(fields)}
    speaker = fields.text("name")
    return message if speaker is None else message | {"name": speaker}


def _content(fields: Fields) -> str:
    content = fields.require("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        fields.wrong_type("content", "a string or an array of text parts", content)
    path = fields.param("content")
    if not content:
        raise InvalidRequest(
            f"Invalid '{path}': empty array. Expected at least 1 part.", param=path, code="empty_array"
        )
    return "\n".join(_part(part, f"{path}[{position}]") for position, part in enumerate(content))


def _part(part: Any, path: str) -> str:
    if not isinstance(part, dict):
        raise wrong_type(path, "an object", part)
    fields = Fields(part, path)
    kind = fields.require("type")
    if kind in OTHER_PARTS:
        fields.wrong_value("type", f"the model takes text only, not {kind}")
    if kind not in TEXT_PARTS:
        fields.wrong_value("type", f"Expected 'text', but got {shown(kind)}")
    fields.require("text")
    text = fields.text("text")
    assert text is not None
    return text
