"""
gpt-oss's wire format, harmony: an answer is several messages, each on a channel.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...<|return|>

The analysis is a thought, a message to a function is a call of it, and all else is said to the user. See
https://github.com/openai/harmony, docs/format.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from baton_engine.api.parsing.parts import AnswerText, Arguments, Part, Reader, Thought, ToolCall
from baton_engine.api.parsing.reasoning.reader import beginning
from baton_engine.api.parsing.tools.toolbox import Toolbox

MESSAGE = "<|message|>"
STARTS = ("<|channel|>", "<|start|>", " to=", "to=")
"""What a header begins with; an answer that begins otherwise has no messages."""
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>", "<|channel|>")
"""What ends the text of a message; the last two begin the next one."""
FINAL = "<|channel|>final<|message|>"
"""What comes before the answer."""
KEEPS = frozenset({MESSAGE, "<|constrain|>", *(mark for mark in (*STARTS, *ENDS) if mark.startswith("<"))})
"""Special tokens that a reader must see."""

_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_FUNCTION = re.compile(r"\bto=functions\.([\w.-]+)")


class HarmonyReader:
    """One choice's messages."""

    def __init__(
        self,
        inner: Reader,
        toolbox: Toolbox | None,
        ids: Callable[[], str],
        *,
        apart: bool = True,
    ) -> None:
        """Not `apart`, the analysis is words. `inner` reads what is said to the user."""
        self._inner = inner
        self._callable = {} if toolbox is None else toolbox.callable
        self._parallel = toolbox is None or toolbox.parallel
        self._ids = ids
        self._apart = apart
        self._header = True
        """Whether the text stands in the header of a message."""
        self._begun = False
        self._calls = 0
        self._tell: Callable[[str], Sequence[Part]] = self._say
        self.thinking = False
        self._held = ""

    def push(self, text: str) -> Sequence[Part]:
        self._held += text
        parts: list[Part] = []
        while self._read_header(parts) if self._header else self._read_text(parts):
            pass
        return parts

    def flush(self) -> Sequence[Part]:
        held, self._held = self._held, ""
        parts: Sequence[Part] = ()
        if not self._header:
            cut = max(beginning(held, mark) for mark in ENDS)
            parts = self._tell(held[: len(held) - cut if cut > 1 else None])
        elif not self._begun and not held.startswith("<|"):
            parts = self._say(held)
        return [*parts, *self._inner.flush()]

    def _read_header(self, parts: list[Part]) -> bool:
        """Take a header if it is there; whether to go on."""
        if not self._begun and not any(_alike(self._held, start) for start in STARTS):
            self._begun, self._header = True, False
            return True
        header, message, rest = self._held.partition(MESSAGE)
        if not message:
            return False
        self._held, self._header, self._begun = rest, False, True
        channel, function = _CHANNEL.search(header), _FUNCTION.search(header)
        self.thinking = False
        if function is not None and function[1] in self._callable:
            self._tell = self._call(function[1], parts)
        elif channel is not None and channel[1] == "analysis":
            self.thinking = True
            self._tell = _think if self._apart else _speak
        else:
            self._tell = self._say
        return True

    def _read_text(self, parts: list[Part]) -> bool:
        """Take the text of a message, as far as it is there; whether it has ended."""
        match = min(((place, mark) for mark in ENDS if (place := self._held.find(mark)) >= 0), default=None)
        if match is None:
            sure = len(self._held) - max(beginning(self._held, mark) for mark in ENDS)
            parts += self._tell(self._held[:sure])
            self._held = self._held[sure:]
            return False
        place, mark = match
        parts += self._tell(self._held[:place])
        self._held = self._held[place if mark in STARTS else place + len(mark) :]
        self._header, self.thinking = True, False
        return True

    def _say(self, text: str) -> Sequence[Part]:
        return self._inner.push(text) if text else ()

    def _call(self, name: str, parts: list[Part]) -> Callable[[str], Sequence[Part]]:
        index, self._calls = self._calls, self._calls + 1
        if index and not self._parallel:
            return lambda text: ()
        parts.append(ToolCall(index, self._ids(), name))
        return lambda text: (Arguments(index, text),) if text else ()


def _think(text: str) -> Sequence[Part]:
    return (Thought(text),) if text else ()


def _speak(text: str) -> Sequence[Part]:
    return (AnswerText(text),) if text else ()


def _alike(text: str, start: str) -> bool:
    """Whether `text` begins with `start`, or may yet."""
    return text.startswith(start) or start.startswith(text)
