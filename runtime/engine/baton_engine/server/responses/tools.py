"""Tools and the choice among them: flat here, nested in chat."""

from __future__ import annotations

from typing import Any

from baton_api import limits
from baton_api.errors import UNSUPPORTED_PARAMETER, InvalidRequest
from baton_engine.server.fields import Fields, shown, wrong_type

CHOICES = ("none", "auto", "required")
OF_FUNCTION = ("name", "description", "parameters", "strict")
OF_CUSTOM = ("name", "description", "format")


def read_tools(fields: Fields) -> list[dict[str, Any]]:
    """The tools as a response object shows them. Raises InvalidRequest for those that others would run."""
    return [
        _tool(tool, f"tools[{position}]")
        for position, tool in enumerate(fields.array("tools", limits.TOOLS.most) or ())
    ]


def _tool(tool: object, path: str) -> dict[str, Any]:
    if not isinstance(tool, dict):
        raise wrong_type(path, "an object", tool)
    fields = Fields(tool, path)
    fields.require("type")
    kind = fields.text("type")
    if kind not in ("function", "custom"):
        raise InvalidRequest(
            f"Tools of type {shown(kind)} are not served here: only 'function' and 'custom' are.",
            param="tools",
            code=UNSUPPORTED_PARAMETER,
        )
    fields.require("name")
    fields.text("name")
    if kind == "custom":
        return {"type": kind, "name": tool["name"]} | {
            "description": tool.get("description") or "",
            "format": fields.mapping("format") or {"type": "text"},
        }
    return {"type": kind} | {name: tool.get(name) for name in OF_FUNCTION}


def for_chat(tool: dict[str, Any]) -> dict[str, Any]:
    kind = tool["type"]
    names = OF_CUSTOM if kind == "custom" else OF_FUNCTION
    inner = {name: tool[name] for name in names if tool[name] is not None}
    if kind == "custom" and inner["format"].get("type") == "grammar":
        grammar = {key: value for key, value in inner["format"].items() if key != "type"}
        inner["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": kind, kind: inner}


def read_choice(fields: Fields) -> str | dict[str, Any]:
    """`tool_choice` as a response object shows it."""
    value = fields.get("tool_choice")
    if value is None:
        return "auto"
    if not isinstance(value, dict):
        return fields.choice("tool_choice", CHOICES) or "auto"
    inner = Fields(value, "tool_choice")
    inner.require("type")
    if inner.choice("type", ("function", "custom", "allowed_tools")) == "allowed_tools":
        inner.choice("mode", ("auto", "required"))
        for position, tool in enumerate(inner.array("tools", limits.TOOLS.most) or ()):
            if not isinstance(tool, dict):
                raise wrong_type(f"tool_choice.tools[{position}]", "an object", tool)
    else:
        inner.require("name")
        inner.text("name")
    return value


def choice_for_chat(choice: str | dict[str, Any]) -> str | dict[str, Any] | None:
    if isinstance(choice, str):
        return None if choice == "auto" else choice
    kind = choice["type"]
    if kind != "allowed_tools":
        return {"type": kind, kind: {"name": choice["name"]}}
    allowed = [
        {"type": tool.get("type"), str(tool.get("type")): {"name": tool.get("name")}}
        for tool in choice.get("tools") or ()
    ]
    return {"type": kind, kind: {"mode": choice.get("mode") or "auto", "tools": allowed}}
