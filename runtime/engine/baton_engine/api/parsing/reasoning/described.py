"""
Answers in the format of a response template of `transformers`, which the tokenizer's files contain.

The template's parser splits text into regions. Regions of reasoning become reasoning, the content becomes
text, and complete tool calls become calls. As in the parser's own messages, white space around reasoning and
at the start of the following text is removed. A call that cannot be parsed (truncated, or invalid JSON)
becomes text, unless the model did not end the answer.
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
    """Interface of `transformers.utils.chat_parsing.ResponseParser`."""

    initial_events: list[dict[str, Any]]

    def feed(self, text: str) -> list[dict[str, Any]]: ...

    def finalize(self) -> tuple[dict[str, Any], list[dict[str, Any]]]: ...


def parser(template: Mapping[str, Any], prompt: str, toolbox: Toolbox | None) -> Parser:
    from transformers.utils.chat_parsing import ResponseParser

    tools = toolbox.definitions if toolbox is not None else None
    created: Parser = ResponseParser(_lenient(template), prefix=prompt, tools=tools)
    return created


def _lenient(template: Mapping[str, Any]) -> dict[str, Any]:
    """Allow calls with invalid JSON, so that an error does not discard the surrounding text."""
    fields: dict[str, Any] = dict(template.get("fields", {}))
    calls = fields.get(CALLS)
    if isinstance(calls, dict) and calls.get("content") == "json":
        fields[CALLS] = calls | {"content_args": {**calls.get("content_args", {}), "allow_non_json": True}}
    return {**template, "fields": fields}


class DescribedReader:
    """Reads the regions of one choice."""

    def __init__(
        self,
        parser: Parser,
        inner: Reader,
        toolbox: Toolbox | None,
        ids: Callable[[], str],
        *,
        separate: bool = True,
        keep_space: bool = False,
    ) -> None:
        """`inner` reads the text for the user, which includes the reasoning unless `separate` is set."""
        self._parser: Parser | None = parser
        self._inner = inner
        self._callable = {} if toolbox is None else toolbox.callable
        self._parallel = toolbox is None or toolbox.parallel
        self._ids = ids
        self._separate = separate
        self._keep_space = keep_space
        self._calls = 0
        self._unparsed = ""
        """Text of the open region, if it may be a call."""
        self._blank = ""
        self._empty = True
        """Whether the open region has had only white space so far."""
        self._cut = False
        """Whether the answer has ended, but not by the model."""
        self.thinking = thinking(parser)

    def push(self, text: str) -> Sequence[Part]:
        if self._parser is None or not text:
            return self._inner.push(text)
        try:
            events = self._parser.feed(text)
        except Exception:  # the template's transforms can raise any exception for a malformed call
            return self._give_up(text)
        return self._parts(events)

    def flush(self, cut: bool = False) -> Sequence[Part]:
        self._cut = cut
        parts: list[Part] = []
        if self._parser is not None:
            try:
                _, events = self._parser.finalize()
            except Exception:  # the same transforms
                parts += self._give_up("")
            else:
                parts += self._parts(events)
        return [*parts, *self._inner.flush(cut)]

    def _give_up(self, text: str) -> Sequence[Part]:
        self._parser = None
        self.thinking = False
        return self._inner.push(self._no_call() + text)

    def _no_call(self) -> str:
        """Return the text that turned out not to be a call."""
        return "" if self._cut else self._unparsed

    def _parts(self, events: Sequence[Mapping[str, Any]]) -> Sequence[Part]:
        parts: list[Part] = []
        for event in events:
            field = event["field"]
            match event["type"]:
                case "region_open":
                    self.thinking = field in THOUGHTS
                    self._unparsed = self._blank = ""
                    self._empty = True
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
        thought = field in THOUGHTS and self._separate
        if not self._keep_space:
            text = self._trimmed(text)
        if not text:
            return ()
        return (Thought(text),) if thought else self._inner.push(text)

    def _trimmed(self, text: str) -> str:
        """Remove white space at the start of the region, and buffer trailing white space."""
        text = self._blank + text
        if self._empty:
            text = text.lstrip()
        text_part = text.rstrip()
        self._blank = text[len(text_part) :]
        self._empty = self._empty and not text_part
        return text_part

    def _close(self, value: Any) -> Sequence[Part]:
        parts: list[Part] = []
        for call in value if isinstance(value, list) else [value]:
            function = call.get("function", call) if isinstance(call, dict) else None
            if not isinstance(function, dict) or function.get("name") not in self._callable:
                parts += self._inner.push(self._no_call())
                continue
            index, self._calls = self._calls, self._calls + 1
            if index and not self._parallel:
                continue
            arguments = function.get("arguments", {})
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            parts += [ToolCall(index, self._ids(), function["name"]), Arguments(index, text)]
        return parts


def thinking(parser: Parser) -> bool:
    """Return whether the prompt ends within reasoning. Call it before the first text."""
    events = parser.initial_events
    last = next((event for event in reversed(events) if event["type"] != "region_chunk"), None)
    return last is not None and last["type"] == "region_open" and last["field"] in THOUGHTS
