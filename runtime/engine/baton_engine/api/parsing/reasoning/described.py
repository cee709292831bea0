"""
Answers as the tokenizer's own files describe them: the response template of `transformers`.

Its parser tells regions of text as they come. Regions of thought are thoughts, the content is what is said
to the user, and tool calls are calls once they are whole. White space at the ends of a thought, and before
what is said after one, is left out, as the parser leaves it out of whole messages. A call that cannot be
parsed, since it was cut or is no JSON, is said as it stands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from baton_engine.api.parsing.parts import Arguments, Part, Reader, Thought, ToolCall
from baton_engine.api.parsing.tools.toolbox import Toolbox

THOUGHTS = frozenset({"reasoning_content", "thinking", "reasoning"})
CALLS = "tool_calls"


class Parser(Protocol):
    """What `transformers.utils.chat_parsing.ResponseParser` does."""

    initial_events: list[dict[str, Any]]

    def feed(self, text: str) -> list[dict[str, Any]]: ...

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]: ...


def parser(template: Mapping[str, Any], prompt: str, toolbox: Toolbox | None) -> Parser:
    from transformers.utils.chat_parsing import ResponseParser

    tools = toolbox.definitions if toolbox is not None else None
    created: Parser = ResponseParser(_lenient(template), prefix=prompt, tools=tools)
    return created


def _lenient(template: Mapping[str, Any]) -> dict[str, Any]:
    """Calls that are no JSON become text instead of an error, which would cost what stands around them."""
    fields: dict[str, Any] = dict(template.get("fields", {}))
    calls = fields.get(CALLS)
    if isinstance(calls, dict) and calls.get("content") == "json":
        fields[CALLS] = calls | {"content_args": {**calls.get("content_args", {}), "allow_non_json": True}}
    return {**template, "fields": fields}


class DescribedReader:
    """One choice's regions."""

    def __init__(
        self,
        parser: Parser,
        inner: Reader,
        toolbox: Toolbox | None,
        ids: Callable[[], str],
        *,
        apart: bool = True,
        exact: bool = False,
    ) -> None:
        """`inner` reads what is said to the user; not `apart`, thoughts are said to them too."""
        self._parser: Parser | None = parser
        self._inner = inner
        self._callable = {} if toolbox is None else toolbox.callable
        self._parallel = toolbox is None or toolbox.parallel
        self._ids = ids
        self._apart = apart
        self._exact = exact
        self._calls = 0
        self._unparsed = ""
        """Text of the region that is open, if it may be a call."""
        self._blank = ""
        self._silent = True
        """Whether nothing was thought, or said, since the region began."""
        self.thinking = thinking(parser)

    def push(self, text: str) -> Sequence[Part]:
        if self._parser is None or not text:
            return self._inner.push(text)
        try:
            events = self._parser.feed(text)
        except Exception:  # whatever a call's text did to the parser's transforms, which are the file's own
            return self._give_up(text)
        return self._parts(events)

    def flush(self) -> Sequence[Part]:
        parts: list[Part] = []
        if self._parser is not None:
            try:
                _, events = self._parser.finalize()
            except Exception:  # as above
                parts += self._give_up("")
            else:
                parts += self._parts(events)
        return [*parts, *self._inner.flush()]

    def _give_up(self, text: str) -> Sequence[Part]:
        self._parser = None
        self.thinking = False
        return self._inner.push(self._unparsed + text)

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> Sequence[Part]:
        parts: list[Part] = []
        for event in events:
            field = event["field"]
            match event["type"]:
                case "region_open":
                    self.thinking = field in THOUGHTS
                    self._unparsed = self._blank = ""
                    self._silent = True
                case "region_chunk":
                    parts += self._chunk(field, event["text"])
                case "region_close":
                    self.thinking = False
                    if field == CALLS:
                        parts += self._close(event["value"])
                    self._unparsed = ""
        return parts

    def _chunk(self, field: str, text: str) -> Sequence[Part]:
        if field == CALLS and self._callable:
            self._unparsed += text
            return ()
        thought = field in THOUGHTS and self._apart
        if not self._exact:
            text = self._trimmed(text)
        if not text:
            return ()
        return (Thought(text),) if thought else self._inner.push(text)

    def _trimmed(self, text: str) -> str:
        """Without white space at the ends of the region, as far as they are known."""
        text = self._blank + text
        if self._silent:
            text = text.lstrip()
        text_part = text.rstrip()
        self._blank = text[len(text_part) :]
        self._silent = self._silent and not text_part
        return text_part

    def _close(self, value: Any) -> Sequence[Part]:
        parts: list[Part] = []
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function", call) if isinstance(call, dict) else None
            if not isinstance(function, dict) or function.get("name") not in self._callable:
                parts += self._inner.push(self._unparsed)
                continue
            index, self._calls = self._calls, self._calls + 1
            if index and not self._parallel:
                continue
            arguments = function.get("arguments", {})
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            parts += [ToolCall(index, self._ids(), function["name"]), Arguments(index, text)]
        return parts


def thinking(parser: Parser) -> bool:
    """Whether the prompt ends within a thought; asked before the first text."""
    events = parser.initial_events
    last = next((event for event in reversed(events) if event["type"] != "region_chunk"), None)
    return last is not None and last["type"] == "region_open" and last["field"] in THOUGHTS
