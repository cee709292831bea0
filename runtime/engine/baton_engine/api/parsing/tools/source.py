"""
The text of an answer as input of a parser coroutine (`Reading`).

A reading is written as if the whole text were available, and yields whenever it needs more. Decisions depend
on the text ahead, never on the boundaries of pieces, so every way of splitting the text has the same result.
A reading returns unusable text with `back`.

If the model did not end the answer, its last text may be part of a mark or of a call. Such text is dropped:
the beginning of a mark counts as the mark, and nothing is given back once a reading lacked text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from baton_engine.api.parsing.parts import AnswerText, Arguments, Part, ToolCall
from baton_engine.api.parsing.tools.toolbox import Tool, Toolbox

T = TypeVar("T")
Wait = Generator[None, None, T]
"""A coroutine step that yields until enough text is available."""
Reading = Wait[None]
"""A coroutine that parses a whole answer."""

SPACE = " \t\r\n"
TRIM = 4096
"""Number of consumed characters that triggers their removal from the buffer."""


class OpenCall:
    """A call whose arguments are being read."""

    def __init__(self, parts: list[Part], index: int | None) -> None:
        self._parts = parts
        self._index = index
        """None for a call that is suppressed because parallel calls are disabled."""

    def write(self, text: str) -> None:
        if not text or self._index is None:
            return
        if self._parts and isinstance(last := self._parts[-1], Arguments):
            self._parts[-1] = Arguments(self._index, last.text + text)  # one event instead of several
        else:
            self._parts.append(Arguments(self._index, text))


class TextSource:
    """The text of one choice, and the parts that were read from it."""

    def __init__(self, toolbox: Toolbox, ids: Callable[[], str]) -> None:
        self.parts: list[Part] = []
        self.ended = False
        self.cut = False
        """Whether the text has ended, but not by the model."""
        self._lacking = False
        """Whether a decision would have needed text behind the end."""
        self._toolbox = toolbox
        self._ids = ids
        self._text = ""
        self._at = 0
        self._gone = 0
        """Number of removed characters before `_text`."""
        self._calls = 0
        self._blank = ""
        """Trailing white space of the emitted text, which is emitted together with the next text."""
        self._wrote = False
        self._parted = True
        """Whether white space separates the text before the last call from text after it."""
        self._behind_call = False
        """Whether no text was emitted since the last call."""

    def feed(self, text: str) -> None:
        self._text += text

    def taken(self) -> list[Part]:
        """Return and remove the completed parts."""
        taken = self.parts.copy()
        self.parts.clear()
        return taken

    # --- Reading ahead ---

    def space(self) -> Wait[None]:
        """Skip white space."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in SPACE:
                self._at += 1
            if self._at < len(self._text) or self.ended:
                return
            yield

    def behind_call(self, marks: str = "") -> Wait[None]:
        """Skip separators between calls: white space and characters of `marks`."""
        yield from self.space()
        while (ahead := (yield from self.peek())) and ahead in marks:
            self._at += 1
            yield from self.space()

    def peek(self) -> Wait[str]:
        """Return the next character without consuming it; empty at the end."""
        while self._at >= len(self._text) and not self.ended:
            yield
        self._lacking |= self._at >= len(self._text)
        return self._text[self._at : self._at + 1]

    def literal(self, text: str) -> Wait[bool]:
        """Consume `text` if it is next. Returns whether it was."""
        while True:
            if self._text.startswith(text, self._at):
                self._at += len(text)
                return True
            if not text.startswith(self._text[self._at :]):
                return False
            if self.ended:
                self._lacking = True
                return self.cut and bool(self.rest())
            yield

    def match(self, pattern: re.Pattern[str], limit: int) -> Wait[str]:
        """Consume at most `limit` characters of `pattern`, a character class with a star. Returns them."""
        while True:
            matched = pattern.match(self._text, self._at, self._at + limit)
            end = self._at if matched is None else matched.end()
            if end < len(self._text) or self.ended or end - self._at >= limit:
                self._lacking |= end == len(self._text)
                taken, self._at = self._text[self._at : end], end
                return taken
            yield

    def until(self, *stops: str, limit: int | None = None) -> Wait[tuple[str, str] | None]:
        """
        Consume the text up to and including the first of `stops`. Returns the text and the stop.

        Returns None and consumes nothing if the text ends, or has `limit` characters, without a stop.
        """
        start = self._at
        while True:
            matched = _first(self._text, stops, start)
            end = self._at + limit if limit is not None else len(self._text)
            if matched is not None and (limit is None or matched[0] - self._at <= limit):
                taken = self._text[self._at : matched[0]]
                self._at = matched[0] + len(matched[1])
                return taken, matched[1]
            if self.ended or (limit is not None and len(self._text) - _longest(stops) > end):
                self._lacking |= self.ended
                return None
            start = max(self._at, len(self._text) - _longest(stops))
            yield

    def chunk(self, stops: re.Pattern[str]) -> Wait[tuple[str, str]]:
        """Consume available text up to and including one of the characters `stops`. Returns both."""
        while self._at >= len(self._text) and not self.ended:
            yield
        self._lacking |= self._at >= len(self._text)
        matched = stops.search(self._text, self._at)
        start, self._at = self._at, len(self._text) if matched is None else matched.end()
        end = self._at if matched is None else matched.start()
        return self._text[start:end], matched[0] if matched else ""

    def take(self) -> Wait[str]:
        """Consume and return the next character; empty at the end."""
        character = yield from self.peek()
        self._at += len(character)
        return character

    def pass_on(self, stop: str, write: Callable[[str], None]) -> Wait[bool]:
        """Pass text to `write` as it arrives and consume it up to `stop`. False if the text ends first."""
        while True:
            found = self._text.find(stop, self._at)
            end = found if found >= 0 else self._sure((stop,))
            write(self._text[self._at : end])
            self._at = end
            if found >= 0:
                self._at += len(stop)
                return True
            if self.ended:
                self._at = len(self._text)
                return False
            self.trim()
            yield

    def rest(self, *marks: str) -> str:
        """Consume all available text. Returns it without the beginning of one of `marks` that was cut off."""
        taken, self._at = self._text[self._at : self._sure(marks)], len(self._text)
        return taken

    def _sure(self, marks: Sequence[str]) -> int:
        """Return the position up to which the text is no part of a mark."""
        return len(self._text) if self.ended and not self.cut else _start_of_mark(self._text, marks, self._at)

    def mark(self) -> int:
        """Return the current position for `back`. `trim` invalidates it."""
        return self._gone + self._at

    def back(self, mark: int) -> None:
        self._at = len(self._text) if self.cut and self._lacking else mark - self._gone

    def trim(self) -> None:
        """Remove consumed text from the buffer. Earlier positions become invalid."""
        if self._at > TRIM:
            self._text, self._gone, self._at = self._text[self._at :], self._gone + self._at, 0

    # --- Emitting parts ---

    def find(self, *marks: str) -> Wait[str]:
        """Emit the text up to the first of `marks`. Consumes and returns the mark; empty at the end."""
        while True:
            matched = _first(self._text, marks, self._at)
            if matched is not None:
                self._emit(self._text[self._at : matched[0]])
                self._at = matched[0] + len(matched[1])
                return matched[1]
            end = self._sure(marks)
            self._emit(self._text[self._at : end])
            self._at = end
            if self.ended:
                self._at = len(self._text)
                return ""
            self.trim()
            yield

    def words(self, text: str) -> None:
        """Emit a mark that does not begin a call, unless the call was cut off."""
        if not (self.cut and self._lacking):
            self._emit(text)

    def tool(self, name: str) -> Tool | None:
        """Return the tool with this name, or None if the answer may not call it."""
        return self._toolbox.callable.get(name)

    def call(self, tool: Tool) -> OpenCall:
        if not self._behind_call:
            self._blank = self._blank if self._wrote else ""
            self._parted = bool(self._blank) or not self._wrote
        self._behind_call = True
        index, self._calls = self._calls, self._calls + 1
        if index and not self._toolbox.parallel:
            return OpenCall(self.parts, None)
        self.parts.append(ToolCall(index, self._ids(), tool.name))
        return OpenCall(self.parts, index)

    def finish(self) -> None:
        """Emit trailing white space at the end of the answer unless a call precedes it."""
        if self._blank and not self._behind_call:
            self.parts.append(AnswerText(self._blank))

    def _emit(self, text: str) -> None:
        """Emit `text`. White space next to a call is dropped unless it separates two texts."""
        if self._behind_call:
            bare = text.lstrip(SPACE)
            if not self._parted:
                self._blank += text[: len(text) - len(bare)]
            text = bare
        visible = text.rstrip(SPACE)
        if visible:
            self.parts.append(AnswerText(self._blank + visible))
            self._blank, self._behind_call, self._wrote = text[len(visible) :], False, True
        else:
            self._blank += text


class CallReader:
    """Implementation of `Reader` with the reading of a family."""

    def __init__(
        self, read: Callable[[TextSource], Reading], toolbox: Toolbox, ids: Callable[[], str]
    ) -> None:
        self._source = TextSource(toolbox, ids)
        self._reading = read(self._source)

    def push(self, text: str) -> Sequence[Part]:
        if not text:
            return ()
        self._source.feed(text)
        next(self._reading, None)
        return self._source.taken()

    def flush(self, cut: bool = False) -> Sequence[Part]:
        self._source.ended, self._source.cut = True, cut
        next(self._reading, None)
        self._source.finish()
        return self._source.taken()


def _first(text: str, marks: Sequence[str], start: int) -> tuple[int, str] | None:
    """Return position and mark of the first of `marks`, or None."""
    candidates = [(found, mark) for mark in marks if (found := text.find(mark, start)) >= 0]
    return min(candidates, default=None)


def _start_of_mark(text: str, marks: Sequence[str], start: int) -> int:
    """Return the position of a suffix of `text` that may become one of `marks`, or the text's length."""
    earliest = len(text)
    for mark in marks:
        found = text.find(mark[0], max(start, len(text) - len(mark) + 1))
        while found >= 0:
            if mark.startswith(text[found:]):
                earliest = min(earliest, found)
                break
            found = text.find(mark[0], found + 1)
    return earliest


def _longest(marks: Sequence[str]) -> int:
    return max(map(len, marks))
