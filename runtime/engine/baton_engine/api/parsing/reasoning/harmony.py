"""
Harmony, the response format of gpt-oss: an answer consists of messages, each on a channel.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

The analysis is reasoning, a message to a function is a call, and other messages are text for the user. See
https://github.com/openai/harmony, docs/format.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from baton_engine.api.parsing.parts import AnswerText, Arguments, Part, Reader, Thought, ToolCall
from baton_engine.api.parsing.reasoning.marked import beginning
from baton_engine.api.parsing.tools.toolbox import Toolbox

MESSAGE = "<|message|>"
STARTS = ("<|channel|>", "<|start|>", " to=", "to=")
"""Possible starts of a header. An answer with another start is plain text."""
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
"""Marks at the end of a message's text; the last two start the next message."""
FINAL = "<|channel|>final<|message|>"
"""Header of the answer."""
KEEPS = frozenset({MESSAGE, "<|constrain|>", *(mark for mark in (*STARTS, *ENDS) if mark.startswith("<"))})
"""Special tokens that the reader needs in the text."""

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([\w.-]+)")


class HarmonyReader:
    """Reads the messages of one choice."""

    def __init__(
        self,
        inner: Reader,
        toolbox: Toolbox | None,
        ids: Callable[[], str],
        *,
        separate: bool = True,
    ) -> None:
        """`inner` reads the text for the user. Without `separate`, the analysis is part of the text."""
        self._inner = inner
        self._callable = {} if toolbox is None else toolbox.callable
        self._parallel = toolbox is None or toolbox.parallel
        self._ids = ids
        self._separate = separate
        self._header = True
        """Whether the next character belongs to the header of a message."""
        self._begun = False
        self._calls = 0
        self._emit: Callable[[str], Sequence[Part]] = self._emit_text
        self.thinking = False
        self._buffer = ""

    def push(self, text: str) -> Sequence[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._read_header(parts) if self._header else self._read_text(parts):
            pass
        return parts

    def flush(self, cut: bool = False) -> Sequence[Part]:
        rest, self._buffer = self._buffer, ""
        parts: Sequence[Part] = ()
        if not self._header:
            mark_length = max(beginning(rest, mark) for mark in ENDS)
            parts = self._emit(rest[: len(rest) - mark_length if mark_length > (not cut) else None])
        elif not self._begun and not rest.startswith("<|"):
            parts = self._emit_text(rest)
        return [*parts, *self._inner.flush(cut)]

    def _read_header(self, parts: list[Part]) -> bool:
        """Consume a header if it is complete. Returns whether to continue with the text."""
        if not self._begun and not any(_alike(self._buffer, start) for start in STARTS):
            self._begun, self._header = True, False
            return True
        header, message, rest = self._buffer.partition(MESSAGE)
        if not message:
            return False
        self._buffer, self._header, self._begun = rest, False, True
        channel, function = _CHANNEL.search(header), _FUNCTION.search(header)
        self.thinking = False
        if function is not None and function[1] in self._callable:
            self._emit = self._call(function[1], parts)
        elif channel is not None and channel[1] == "analysis":
            self.thinking = True
            self._emit = _reasoning if self._separate else _answer
        else:
            self._emit = self._emit_text
        return True

    def _read_text(self, parts: list[Part]) -> bool:
        """Consume the available text of a message. Returns whether the message has ended."""
        match = min(((start, mark) for mark in ENDS if (start := self._buffer.find(mark)) >= 0), default=None)
        if match is None:
            length = len(self._buffer) - max(beginning(self._buffer, mark) for mark in ENDS)
            parts += self._emit(self._buffer[:length])
            self._buffer = self._buffer[length:]
            return False
        start, mark = match
        parts += self._emit(self._buffer[:start])
        self._buffer = self._buffer[start if mark in STARTS else start + len(mark) :]
        self._header, self.thinking = True, False
        return True

    def _emit_text(self, text: str) -> Sequence[Part]:
        return self._inner.push(text) if text else ()

    def _call(self, name: str, parts: list[Part]) -> Callable[[str], Sequence[Part]]:
        index, self._calls = self._calls, self._calls + 1
        if index and not self._parallel:
            return lambda text: ()
        parts.append(ToolCall(index, self._ids(), name))
        return lambda text: (Arguments(index, text),) if text else ()


def _reasoning(text: str) -> Sequence[Part]:
    return (Thought(text),) if text else ()


def _answer(text: str) -> Sequence[Part]:
    return (AnswerText(text),) if text else ()


def _alike(text: str, start: str) -> bool:
    """Return whether `text` begins with `start`, or could with more text."""
    return text.startswith(start) or start.startswith(text)
