"""
Blocks of a message, and the typed events of their stream.

One block is open at a time: reasoning, text, or a call. The next one closes it. White space between blocks is
dropped, because Anthropic's API has no blank text blocks. See
https://docs.claude.com/en/docs/build-with-claude/streaming
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from baton_api import anthropic
from baton_engine.api.answer_shape import Choice
from baton_engine.api.parsing.parts import AnswerText, Arguments, Part, Thought, ToolCall, merged
from baton_engine.api.streaming import Usage
from baton_engine.api.transcript import Piece, Transcript
from baton_engine.requests import FinishReason

TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
DELTAS = {
    TEXT: ("text_delta", "text"),
    THINKING: ("thinking_delta", "thinking"),
    TOOL_USE: ("input_json_delta", "partial_json"),
}
"""Type of the deltas of a block, and their member with the text."""


@dataclass(slots=True)
class Block:
    """A block and its text so far; of a call, the JSON text of its input."""

    type: str
    call: ToolCall | None = None
    texts: list[str] = field(default_factory=list)

    def body(self, value: Any) -> dict[str, Any]:
        """Return the block with `value` as its text or input."""
        if self.call is not None:
            return {"type": self.type, "id": self.call.id, "name": self.call.name, "input": value}
        signature = {"signature": ""} if self.type == THINKING else {}
        return {"type": self.type, self.type: value} | signature

    @property
    def complete(self) -> dict[str, Any] | None:
        """The complete block; None for a truncated call, whose input is incomplete JSON."""
        text = "".join(self.texts)
        if self.call is None:
            return self.body(text)
        try:
            value = msgspec.json.decode(text or "{}")
        except msgspec.DecodeError:
            return None
        return self.body(value) if isinstance(value, dict) else None


class Blocks:
    def __init__(self) -> None:
        self.all: list[Block] = []
        self._open: Block | None = None
        self._blank = ""
        """White space that may be the start of a text."""

    def push(self, parts: Sequence[Part]) -> bytes:
        """Add parts. Returns the events for them."""
        return b"".join(map(self._push, parts))

    def close(self) -> bytes:
        """End the open block. Returns its last event."""
        if self._open is None:
            return b""
        self._open = None
        return self._event("content_block_stop")

    @property
    def called(self) -> bool:
        return any(block.call is not None for block in self.all)

    def _push(self, part: Part) -> bytes:
        match part:
            case ToolCall():
                return self._begin(TOOL_USE, part)
            case Thought(text):
                return self._grow(THINKING, text)
            case Arguments(text=text):
                return self._grow(TOOL_USE, text)
            case AnswerText(text):
                if self._open is None or self._open.type != TEXT:
                    text = self._blank + text
                    if not text.strip():
                        self._blank = text
                        return b""
                return self._grow(TEXT, text)

    def _begin(self, kind: str, call: ToolCall | None = None) -> bytes:
        before = self.close()
        self._blank = ""
        self._open = block = Block(kind, call)
        self.all.append(block)
        empty: Any = {} if call is not None else ""
        return before + self._event("content_block_start", content_block=block.body(empty))

    def _grow(self, kind: str, text: str) -> bytes:
        if not text:
            return b""
        opening = b"" if self._open is not None and self._open.type == kind else self._begin(kind)
        assert self._open is not None
        self._open.texts.append(text)
        delta, member = DELTAS[kind]
        return opening + self._event("content_block_delta", delta={"type": delta, member: text})

    def _event(self, kind: str, **members: Any) -> bytes:
        return anthropic.event(kind, {"index": len(self.all) - 1, **members})


def message_id() -> str:
    return f"msg_{uuid.uuid4().hex}"


@dataclass(slots=True, kw_only=True)
class MessageShape:
    """One message. It has one choice."""

    model: str
    cut_by_context: bool
    """Whether the context ends before `max_tokens`."""
    edits: bool = False
    """Whether to report the edits of the client's context: none."""
    id: str = field(default_factory=message_id)
    created: int = field(default_factory=lambda: int(time.time()))
    _blocks: Blocks = field(default_factory=Blocks)
    _begun: bool = False

    def events(self, choice: Choice, piece: Piece, usage: Callable[[], Usage]) -> bytes:
        opening = b""
        if not self._begun:
            self._begun = True
            message = self._message([], None, usage())
            opening = anthropic.event("message_start", {"message": message}) + anthropic.event("ping", {})
        events = opening + self._blocks.push(merged(piece.parts))
        if piece.finish is not None:
            events += self._blocks.close()
            delta = self._end(choice.transcript)
            members = {"delta": delta, "usage": _usage(usage())} | self._edited()
            events += anthropic.event("message_delta", members)
        return events

    def resume(self, answer: str, created: int) -> None:
        self.id, self.created = answer, created

    def closing(self, usage: Usage) -> bytes:
        return anthropic.event("message_stop", {})

    def answer(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        choice, piece = choices[0]
        self._blocks.push(merged(piece.parts))
        content = [block.complete for block in self._blocks.all]
        return self._message([block for block in content if block is not None], choice.transcript, usage)

    def _message(self, content: Sequence[Any], transcript: Transcript | None, usage: Usage) -> dict[str, Any]:
        message = {"id": self.id, "type": "message", "role": "assistant", "model": self.model}
        end = {"stop_reason": None, "stop_sequence": None} if transcript is None else self._end(transcript)
        edited = {} if transcript is None else self._edited()
        return message | {"content": content} | end | {"usage": _usage(usage)} | edited

    def _edited(self) -> dict[str, Any]:
        return {"context_management": {"applied_edits": []}} if self.edits else {}

    def _end(self, transcript: Transcript) -> dict[str, Any]:
        stop = transcript.matched if isinstance(transcript.matched, str) else None
        return {"stop_reason": self._reason(transcript, stop), "stop_sequence": stop}

    def _reason(self, transcript: Transcript, stop: str | None) -> str:
        if transcript.finish is FinishReason.LENGTH:
            return "model_context_window_exceeded" if self.cut_by_context else "max_tokens"
        if stop is not None:
            return "stop_sequence"
        return "tool_use" if self._blocks.called else "end_turn"


def _usage(usage: Usage) -> dict[str, Any]:
    """Return the usage; unlike OpenAI's, `input_tokens` excludes cached tokens."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        **usage.by_source,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "service_tier": "standard",
    }
