"""
Output items of a response, and the typed, numbered events of their stream.

One item is open at a time: reasoning, a message, or a call. The next item closes it. Clients rely on the
order of an item's events: item added, content added, deltas, content done, item done. White space between
items is dropped. Logprobs cover the tokens of messages only. They are located by the offsets of tokens in the
whole text. See https://developers.openai.com/api/docs/guides/streaming-responses
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton_api.errors import BatonError
from baton_api.json_text import on_one_line
from baton_api.messages import TokenChoice
from baton_api.response_items import new_id
from baton_engine.api.answer_shape import Choice
from baton_engine.api.logprobs import chat_logprobs
from baton_engine.api.parsing.parts import AnswerText, Arguments, Part, Thought, ToolCall, merged
from baton_engine.api.responses.request import OfferedTool
from baton_engine.api.streaming import Usage
from baton_engine.api.transcript import Piece
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.requests import FinishReason


@dataclass(frozen=True, slots=True)
class ItemKind:
    type: str
    event: str
    """Prefix of the events of its text: `{event}.delta` and `{event}.done`."""
    name: str
    """Member with the text, in the item or its content part, and in `{event}.done`."""
    content: str = ""
    """Type of the content part with the text; empty if the item itself contains the text."""


REASONING = ItemKind("reasoning", "response.reasoning_text", "text", "reasoning_text")
MESSAGE = ItemKind("message", "response.output_text", "text", "output_text")
FUNCTION_CALL = ItemKind("function_call", "response.function_call_arguments", "arguments")
CUSTOM_CALL = ItemKind("custom_tool_call", "response.custom_tool_call_input", "input")


@dataclass(slots=True)
class OpenItem:
    kind: ItemKind
    index: int
    id: str
    call: ToolCall | None = None
    tool: OfferedTool | None = None
    """The called tool."""
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    position: dict[str, Any] = field(init=False)
    """Members of its events that identify the item."""

    def __post_init__(self) -> None:
        self.position = {"item_id": self.id, "output_index": self.index}
        if self.kind.content:
            self.position["content_index"] = 0

    @property
    def name(self) -> str:
        """The called tool's name, as the client knows it."""
        if self.tool is not None:
            return self.tool.name
        return "" if self.call is None else self.call.name

    @property
    def _space(self) -> dict[str, Any]:
        return {} if self.tool is None or self.tool.space is None else {"namespace": self.tool.space}

    def part(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        part: dict[str, Any] = {"type": self.kind.content, "text": text}
        return part | {"annotations": [], "logprobs": logprobs} if self.kind is MESSAGE else part

    def item(self, status: str) -> dict[str, Any]:
        """Return the item, without its text while it is in progress."""
        text = "" if status == "in_progress" else "".join(self.texts)
        item: dict[str, Any] = {"id": self.id, "type": self.kind.type, "status": status}
        if self.call is not None:
            return item | {"call_id": self.call.id, "name": self.name, self.kind.name: text} | self._space
        before: dict[str, Any] = {"role": "assistant"} if self.kind is MESSAGE else {"summary": []}
        return (
            item | before | {"content": [] if status == "in_progress" else [self.part(text, self.logprobs)]}
        )


class ResponseItems:
    def __init__(
        self, events: Events, tools: Sequence[OfferedTool], logprobs: MessageLogprobs | None
    ) -> None:
        """`tools` are those that the model may call."""
        self.items: list[dict[str, Any]] = []
        """The completed items."""
        self._events = events
        self._tools = {tool.qualified: tool for tool in tools}
        self._logprobs = logprobs
        self._open: OpenItem | None = None
        self._blank = ""
        """White space that may be the start of a message."""

    def push(self, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case AnswerText(text):
                    self._add_text(text)
                case Thought(text):
                    if self._logprobs is not None:
                        self._logprobs.skip(text)
                    self._grow(self._of(REASONING), text)
                case ToolCall(name=name):
                    tool = self._tools.get(name)
                    custom = tool is not None and tool.custom
                    self._begin(CUSTOM_CALL if custom else FUNCTION_CALL, part, tool)
                case Arguments(text=text):
                    assert self._open is not None and self._open.call is not None
                    self._grow(self._open, text)

    def close(self, status: str) -> None:
        """End the answer: close the open item with this status. An empty answer becomes a message."""
        if self._open is None and not self.items:
            blank = self._blank
            self._grow(self._of(MESSAGE), blank)
        self._end(status)

    def _add_text(self, text: str) -> None:
        if self._open is None or self._open.kind is not MESSAGE:
            text = self._blank + text
            if not text.strip():
                self._blank = text
                return
        self._grow(self._of(MESSAGE), text)

    def _of(self, kind: ItemKind) -> OpenItem:
        """Return the open item if it is of this kind, otherwise a new item."""
        if self._open is not None and self._open.kind is kind:
            return self._open
        return self._begin(kind)

    def _begin(
        self, kind: ItemKind, call: ToolCall | None = None, tool: OfferedTool | None = None
    ) -> OpenItem:
        self._end("completed")
        self._blank = ""
        self._open = item = OpenItem(kind, len(self.items), new_id(kind.type), call, tool)
        self._events.add(
            "response.output_item.added", {"output_index": item.index, "item": item.item("in_progress")}
        )
        if kind.content:
            self._events.add("response.content_part.added", item.position | {"part": item.part("")})
        return item

    def _grow(self, item: OpenItem, text: str) -> None:
        if not text:
            return
        item.texts.append(text)
        delta = item.position | {"delta": text}
        if item.kind is MESSAGE:
            delta["logprobs"] = logprobs = [] if self._logprobs is None else self._logprobs.of(text)
            item.logprobs += logprobs
        self._events.add(f"{item.kind.event}.delta", delta)

    def _end(self, status: str) -> None:
        item, self._open = self._open, None
        if item is None:
            return
        text = "".join(item.texts)
        done = item.position | {item.kind.name: text}
        if item.kind is MESSAGE:
            done["logprobs"] = item.logprobs
        elif item.call is not None:
            done["name"] = item.name
        self._events.add(f"{item.kind.event}.done", done)
        if item.kind.content:
            self._events.add(
                "response.content_part.done", item.position | {"part": item.part(text, item.logprobs)}
            )
        complete = item.item(status)
        self._events.add("response.output_item.done", {"output_index": item.index, "item": complete})
        self.items.append(complete)


_encoder = msgspec.json.Encoder()


class Events:
    """Buffer of the events of one response. Ignores events of a response that is not streamed."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted
        self._numbers = itertools.count()
        self._waiting: list[bytes] = []

    def add(self, kind: str, body: dict[str, Any]) -> None:
        if self._wanted:
            data = on_one_line(_encoder.encode({"type": kind, "sequence_number": next(self._numbers)} | body))
            self._waiting.append(b"event: %b\ndata: %b\n\n" % (kind.encode(), data))

    def take(self) -> bytes:
        """Return and remove the buffered events, as bytes of the stream."""
        taken = b"".join(self._waiting)
        self._waiting.clear()
        return taken


class MessageLogprobs:
    """Logprobs of the messages of one answer. Add the tokens of a piece before reading its parts."""

    def __init__(self, tokenizer: Tokenizer, alternatives: int) -> None:
        self._tokenizer = tokenizer
        self._alternatives = alternatives
        self._text = ""
        self._read = 0
        """Number of characters of the text that were read."""
        self._tokens: deque[tuple[int, TokenChoice]] = deque()
        """Tokens that were not read, with their offsets."""

    def add(self, piece: Piece) -> None:
        self._text += piece.text
        self._tokens.extend(zip(piece.offsets, piece.tokens, strict=True))

    def skip(self, thought: str) -> None:
        """Skip the tokens of reasoning."""
        at = self._text.find(thought, self._read)
        if at >= 0:
            self._read = at + len(thought)

    def of(self, text: str) -> list[dict[str, Any]]:
        """Return the entries of the tokens of `text`, the next text of a message."""
        start = max(self._text.find(text, self._read), self._read)
        end = self._read = start + len(text)
        tokens: list[TokenChoice] = []
        while self._tokens and self._tokens[0][0] < end:
            offset, token = self._tokens.popleft()
            if offset >= start:
                tokens.append(token)
        entries: list[dict[str, Any]] = chat_logprobs(self._tokenizer, tokens, self._alternatives)["content"]
        return entries


def response_id() -> str:
    return f"resp_{uuid.uuid4().hex}"


@dataclass(slots=True, kw_only=True)
class ResponseShape:
    """One response. It has one choice."""

    model: str
    echo: dict[str, Any]
    """Members of the request that the response repeats."""
    events_of: Events
    output: ResponseItems
    logprobs: MessageLogprobs | None
    keep: Callable[[dict[str, Any]], None]
    """Called with the complete response."""
    id: str = field(default_factory=response_id)
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: bool = False
    _finish: FinishReason | None = None

    def events(self, choice: Choice, piece: Piece, usage: Callable[[], Usage]) -> bytes:
        if not self._begun:
            self._begun = True
            for kind in ("response.created", "response.in_progress"):
                self.events_of.add(kind, {"response": self._body("in_progress")})
        self._take(piece)
        return self.events_of.take()

    def closing(self, usage: Usage) -> bytes:
        body = self._complete(usage)
        self.events_of.add(f"response.{body['status']}", {"response": body})
        return self.events_of.take()

    def answer(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        _, piece = choices[0]
        self._take(piece)
        return self._complete(usage)

    def failure(self, error: BatonError) -> bytes:
        """Return the last event of a failed stream, with OpenAI's general error code."""
        error_body = {"code": "server_error", "message": error.message}
        self.events_of.add("response.failed", {"response": self._body("failed", error=error_body)})
        return self.events_of.take()

    def _take(self, piece: Piece) -> None:
        if self.logprobs is not None:
            self.logprobs.add(piece)
        self.output.push(merged(piece.parts))
        self._finish = piece.finish

    def _complete(self, usage: Usage) -> dict[str, Any]:
        cut = self._finish is FinishReason.LENGTH
        status = "incomplete" if cut else "completed"
        self.output.close(status)
        body = self._body(status, usage=_usage(usage))
        if cut:
            body["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            body["completed_at"] = int(time.time())
        self.keep(body)
        return body

    def _body(self, status: str, **more: Any) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "model": self.model,
            "output": self.output.items,
            "service_tier": "default",
            "usage": None,
            **self.echo,
            **more,
        }


def _usage(usage: Usage) -> dict[str, Any]:
    body = usage.body()
    return {
        "input_tokens": body["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": body["prompt_tokens_details"]["cached_tokens"],
            "cache_write_tokens": 0,
            **usage.by_source,
        },
        "output_tokens": body["completion_tokens"],
        "output_tokens_details": {
            "reasoning_tokens": body["completion_tokens_details"]["reasoning_tokens"],
        },
        "total_tokens": body["total_tokens"],
    }
