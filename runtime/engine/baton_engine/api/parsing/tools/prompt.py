"""
Tools for models whose chat template knows none: told in plain words, with calls as `hermes` writes them.

Such a template drops tools, calls and results without a word. So the tools go into the system message, an
earlier call into the text of the assistant, and a result into a message of the user.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton_engine.api.parsing.tools.hermes import END, START
from baton_engine.api.parsing.tools.toolbox import Toolbox

RESULT, RESULT_END = "<tool_response>", "</tool_response>"


def tell(messages: Sequence[Mapping[str, Any]], toolbox: Toolbox | None) -> list[dict[str, Any]]:
    """The same conversation in the roles and texts that every template knows; see `server.messages`."""
    told: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            result = f"{RESULT}\n{_text(message.get('content'))}\n{RESULT_END}"
            if told and told[-1].get("results"):
                told[-1]["content"] += f"\n{result}"
            else:
                told.append({"role": "user", "content": result, "results": True})
        elif message.get("tool_calls"):
            said = _text(message.get("content"))
            calls = [_call(call["function"]) for call in message["tool_calls"]]
            kept = {key: value for key, value in message.items() if key != "tool_calls"}
            told.append(kept | {"content": "\n".join([*([said] if said else []), *calls])})
        elif message["role"] == "user" and told and told[-1].get("results"):
            results = told.pop()["content"]  # many templates want roles to alternate
            told.append(dict(message) | {"content": f"{results}\n{_text(message['content'])}"})
        else:
            told.append(dict(message))
    for message in told:
        message.pop("results", None)
    if toolbox is None or not toolbox.callable:
        return told
    words = _words(toolbox)
    if told and told[0]["role"] in ("system", "developer"):
        return [told[0] | {"content": f"{_text(told[0]['content'])}\n\n{words}"}, *told[1:]]
    return [{"role": "system", "content": words}, *told]


def _words(toolbox: Toolbox) -> str:
    example = _call({"name": "the name of the tool", "arguments": {"parameter": "value"}})
    definitions = [tool.definition["function"] for tool in toolbox.callable.values()]
    tools = [json.dumps(definition, ensure_ascii=False) for definition in definitions]
    wish = "To answer, call" if toolbox.forced else "If it helps to answer, call"
    many = "one of these tools, or several of them" if toolbox.parallel else "one of these tools"
    return "\n".join([f"{wish} {many}:", *tools, "A call is written like this:", example])


def _call(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"{START}\n{json.dumps(call, ensure_ascii=False)}\n{END}"


def _text(content: str | Sequence[str] | None) -> str:
    return content if isinstance(content, str) else "\n".join(content or ())
