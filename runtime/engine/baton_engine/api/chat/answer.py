"""
Response format of chat completions: a message per choice, or chunks with its additions.

The stream of a choice begins with its role. Chunks with reasoning, text and calls follow in the model's
order. The last chunk has the finish reason. The first chunk of a piece contains all tokens of the piece,
although some of its text may be buffered and follow in a later chunk.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton_api import __version__
from baton_engine.api.answer_shape import Choice
from baton_engine.api.logprobs import Name, chat_logprobs, prompt_logprobs
from baton_engine.api.parsing.parts import AnswerText, Arguments, Part, Thought, ToolCall, merged
from baton_engine.api.parsing.tools.toolbox import Toolbox
from baton_engine.api.streaming import HOLE, Streaming, TextEvents, Usage
from baton_engine.api.transcript import Piece, Transcript
from baton_engine.model.tokenizer import Tokenizer
from baton_engine.requests import FinishReason

CHUNK = "chat.completion.chunk"


class ChoiceStream:
    def __init__(self, toolbox: Toolbox | None) -> None:
        self._calls = None if toolbox is None else CallDeltas(toolbox)
        self.called = False

    def delta(self, part: Part) -> dict[str, Any]:
        match part:
            case AnswerText(text):
                return {"content": text}
            case Thought(text):
                return _thought(text)
            case ToolCall() | Arguments():
                self.called = True
                return {} if self._calls is None else self._calls.delta(part)


@dataclass(slots=True, kw_only=True)
class ChatShape:
    """Chat completions and their chunks."""

    tokenizer: Tokenizer
    model: str
    streaming: Streaming
    alternatives: int | None
    name: Name
    prompt: Sequence[int]
    prompt_alternatives: int | None
    """Alternatives of each prompt token in `prompt_logprobs`. None: no `prompt_logprobs`."""
    prompt_ids: Sequence[int] | None
    """The prompt's token ids, if the response contains token ids."""
    metadata: Mapping[str, str] | None
    toolbox: Toolbox | None = None
    echo: str = ""
    """Text before each answer: the message that the answer continues."""
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    _streams: dict[int, ChoiceStream] = field(default_factory=dict)
    """The streams of the choices whose first chunk was written, by index."""
    _texts: dict[int, TextEvents] = field(default_factory=dict)
    """By index, the chunks that are no more than a text."""

    def events(self, choice: Choice, piece: Piece, usage: Callable[[], Usage]) -> bytes:
        index = choice.index
        if index in self._texts and piece.finish is None and len(piece.parts) == 1:
            (part,) = piece.parts
            if isinstance(part, AnswerText):
                return self._texts[index].event(part.text)
        stream = self._streams.get(index)
        deltas: list[dict[str, Any]] = []
        opening = 0
        if stream is None:
            stream = self._streams[index] = ChoiceStream(self.toolbox)
            deltas = self._opening()
            opening = len(deltas)
            if self.alternatives is None and self.prompt_ids is None and not self.streaming.continuous_usage:
                chunk = _chunk(index, {"content": HOLE})
                event = self.streaming.event(self._envelope(CHUNK, [chunk]), usage)
                self._texts[index] = TextEvents(event)
        parts = piece.parts if len(piece.parts) < 2 else merged(piece.parts)
        deltas += [stream.delta(part) for part in parts]
        shows_tokens = bool(piece.tokens) and (self.alternatives is not None or self.prompt_ids is not None)
        if shows_tokens and len(deltas) == opening:
            deltas.append({"content": ""})
        chunks = [_chunk(index, delta) for delta in deltas]
        if shows_tokens:
            chunks[opening] |= {"logprobs": self._logprobs(piece)} | self._token_ids(piece)
        if piece.finish is not None:
            chunks.append(
                {"index": index, "delta": {}, "logprobs": None} | self._end(choice.transcript, stream.called)
            )
        return b"".join(self.streaming.event(self._envelope(CHUNK, [chunk]), usage) for chunk in chunks)

    def resume(self, answer: str, created: int) -> None:
        self.id, self.created = answer, created

    def closing(self, usage: Usage) -> bytes:
        return self.streaming.closing(self._envelope(CHUNK, []), usage)

    def answer(self, choices: Sequence[tuple[Choice, Piece]], usage: Usage) -> dict[str, Any]:
        body = self._envelope("chat.completion", [self._choice(choice, piece) for choice, piece in choices])
        body["usage"] = usage.body()
        if self.metadata is not None:
            body["metadata"] = self.metadata
        if self.prompt_ids is not None:
            body["prompt_token_ids"] = self.prompt_ids
        scores = choices[0][0].scores
        if self.prompt_alternatives is not None and scores is not None:
            body["prompt_logprobs"] = prompt_logprobs(
                self.tokenizer, self.prompt, scores, self.prompt_alternatives
            )
        return body

    def _opening(self) -> list[dict[str, Any]]:
        """Return the deltas of the first chunks. Content is null if calls may replace it."""
        opening = [{"role": "assistant", "content": None if self._offers else ""}]
        return [*opening, {"content": self.echo}] if self.echo else opening

    @property
    def _offers(self) -> bool:
        """Whether the answer may contain calls instead of content."""
        return self.toolbox is not None and bool(self.toolbox.callable)

    def _choice(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        calls = {} if self.toolbox is None else message_calls(piece.parts, self.toolbox)
        content_text = self.echo + "".join(part.text for part in piece.parts if isinstance(part, AnswerText))
        thought = "".join(part.text for part in piece.parts if isinstance(part, Thought))
        message: dict[str, Any] = {
            "role": "assistant",
            "content": None if not content_text and self._offers else content_text,
            "refusal": None,
            "annotations": [],
        }
        message |= _thought(thought or None) | calls
        body = {"index": choice.index, "message": message, "logprobs": self._logprobs(piece)}
        return body | self._end(choice.transcript, bool(calls)) | self._token_ids(piece)

    def _envelope(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "service_tier": "default",
            "system_fingerprint": f"baton-{__version__}",
        }

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if self.alternatives is None:
            return None
        return chat_logprobs(self.tokenizer, piece.tokens, self.alternatives, self.name)

    def _token_ids(self, piece: Piece) -> dict[str, Any]:
        return {} if self.prompt_ids is None else {"token_ids": [choice.token for choice in piece.tokens]}

    def _end(self, transcript: Transcript, called: bool) -> dict[str, Any]:
        reason: str | None = transcript.finish
        if (
            called
            and self.toolbox is not None
            and not self.toolbox.named  # OpenAI's answers to a choice by name end with "stop"
            and transcript.finish is FinishReason.STOP
        ):
            reason = finish_reason(self.toolbox)
        return {
            "finish_reason": reason,
            "matched_stop": transcript.matched,
            "stop_reason": transcript.stop_reason,
        }


def _chunk(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _thought(text: str | None) -> dict[str, Any]:
    """Return reasoning under the names of SGLang and vLLM."""
    return {"reasoning_content": text, "reasoning": text}


def message_calls(parts: Iterable[Part], toolbox: Toolbox) -> dict[str, Any]:
    """Return the `tool_calls` or `function_call` of a message; empty if `parts` contain no calls."""
    calls: dict[int, tuple[ToolCall, list[str]]] = {}
    for part in parts:
        if isinstance(part, ToolCall):
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
    """Deltas of the calls of one choice: id, type and name once, then pieces of arguments."""

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox
        self._custom: set[int] = set()

    def delta(self, part: ToolCall | Arguments) -> dict[str, Any]:
        """Return the members of `part` in a chunk's `delta`."""
        if self._toolbox.legacy:
            named = (
                {"name": part.name, "arguments": ""}
                if isinstance(part, ToolCall)
                else {"arguments": part.text}
            )
            return {"function_call": named}
        if isinstance(part, ToolCall):
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
    """Return the finish reason of an answer that ends with calls."""
    return "function_call" if toolbox.legacy else "tool_calls"


def _opened(name: str, text: str, custom: bool) -> dict[str, Any]:
    if custom:
        return {"type": "custom", "custom": {"name": name, "input": text}}
    return {"type": "function", "function": {"name": name, "arguments": text}}


def _is_custom(call: ToolCall, toolbox: Toolbox) -> bool:
    return toolbox.callable[call.name].custom
