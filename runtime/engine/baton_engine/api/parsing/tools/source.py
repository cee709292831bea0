"""
The text of an answer as a reading takes it: in order, as far as it has come.

A reading is a coroutine. It is written as if the whole text were there and yields wherever it is not, so
that one character at a time and all at once take the same way through it. It decides by what stands ahead and
never by where a piece happened to end. What it took and could not use it gives back with `back`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from baton_engine.api.parsing.parts import AnswerText, Arguments, Part, ToolCall
from baton_engine.api.parsing.tools.toolbox import Tool, Toolbox

T = TypeVar("T")
Wait = Generator[None, None, T]
"""Yields until there is enough text."""
Reading = Wait[None]
"""Goes through a whole answer."""

SPACE = " \t\r\n"
TRIM = 4096
"""Characters that were read before they are let go of."""


class OpenCall:
    """A call whose arguments are coming."""

    def __init__(self, parts: list[Part], index: int | None) -> None:
        self._parts = parts
        self._index = index
        """None for a call that the request does not want to see."""

    def write(self, text: str) -> None:
        if not text or self._index is None:
            return
        if self._parts and isinstance(last := self._parts[-1], Arguments):
            self._parts[-1] = Arguments(self._index, last.text + text)  # one event, not many
        else:
            self._parts.append(Arguments(self._index, text))


class TextSource:
    """One choice's text, and the parts that it turned out to be."""

    def __init__(self, toolbox: Toolbox, ids: Callable[[], str]) -> None:
        self.parts: list[Part] = []
        self.ended = False
        self._toolbox = toolbox
        self._ids = ids
        self._text = ""
        self._at = 0
        self._gone = 0
        """Characters before `_text`, which were let go of."""
        self._calls = 0
        self._blank = ""
        """White space behind what was said: told with what is said next, if that is ever."""
        self._wrote = False
        self._parted = True
        """Whether what stands before the last call is parted from what may follow it."""
        self._behind_call = False
        """Whether nothing was said since the last call."""

    def feed(self, text: str) -> None:
        self._text += text

    def taken(self) -> list[Part]:
        """What is certain since the last time."""
        taken = self.parts.copy()
        self.parts.clear()
        return taken

    # --- What stands ahead ---

    def space(self) -> Wait[None]:
        """Go past white space."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in SPACE:
                self._at += 1
            if self._at < len(self._text) or self.ended:
                return
            yield

    def behind_call(self, marks: str = "") -> Wait[None]:
        """Go past white space and characters of `marks`: what stands between calls, now and then too much."""
        yield from self.space()
        while (ahead := (yield from self.peek())) and ahead in marks:
            self._at += 1
            yield from self.space()

    def peek(self) -> Wait[str]:
        """The next character, which is not taken; empty at the end."""
        while self._at >= len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def literal(self, text: str) -> Wait[bool]:
        """Whether `text` stands ahead, which is then taken."""
        while True:
            if self._text.startswith(text, self._at):
                self._at += len(text)
                return True
            if self.ended or not text.startswith(self._text[self._at :]):
                return False
            yield

    def match(self, pattern: re.Pattern[str], limit: int) -> Wait[str]:
        """What of `pattern`, a set of characters with a star, stands ahead, at most `limit` characters."""
        while True:
            matched = pattern.match(self._text, self._at, self._at + limit)
            end = self._at if matched is None else matched.end()
            if end < len(self._text) or self.ended or end - self._at >= limit:
                taken, self._at = self._text[self._at : end], end
                return taken
            yield

    def until(self, *stops: str, limit: int | None = None) -> Wait[tuple[str, str] | None]:
        """
        The text before the first of `stops`, and which it is; both are taken.

        None, and nothing is taken, if the text ends or `limit` characters pass without any.
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
                return None
            start = max(self._at, len(self._text) - _longest(stops))
            yield

    def chunk(self, stops: re.Pattern[str]) -> Wait[tuple[str, str]]:
        """Some text that has none of the characters `stops`, and the one of them after it; both are taken."""
        while self._at >= len(self._text) and not self.ended:
            yield
        matched = stops.search(self._text, self._at)
        start, self._at = self._at, len(self._text) if matched is None else matched.end()
        end = self._at if matched is None else matched.start()
        return self._text[start:end], matched[0] if matched else ""

    def take(self) -> Wait[str]:
        """The next character; empty at the end."""
        character = yield from self.peek()
        self._at += len(character)
        return character

    def pass_on(self, stop: str, write: Callable[[str], None]) -> Wait[bool]:
        """Write what stands before `stop` as it comes, and take both. False if the text ends without."""
        while True:
            place = self._text.find(stop, self._at)
            end = (
                place
                if place >= 0
                else len(self._text)
                if self.ended
                else _held(self._text, (stop,), self._at)
            )
            write(self._text[self._at : end])
            self._at = end
            if place >= 0:
                self._at += len(stop)
                return True
            if self.ended:
                return False
            self.trim()
            yield

    def rest(self) -> str:
        """All that has come, which is taken: once the text is over, all that there will be."""
        taken, self._at = self._text[self._at :], len(self._text)
        return taken

    def mark(self) -> int:
        """Where the text stands, for `back`; good until `trim` passes it."""
        return self._gone + self._at

    def back(self, mark: int) -> None:
        self._at = mark - self._gone

    def trim(self) -> None:
        """Let go of what was taken: nobody goes back to it."""
        if self._at > TRIM:
            self._text, self._gone, self._at = self._text[self._at :], self._gone + self._at, 0

    # --- What it turned out to be ---

    def find(self, *marks: str) -> Wait[str]:
        """Tell the words up to the first of `marks`, which is taken and returned; empty at the end."""
        while True:
            matched = _first(self._text, marks, self._at)
            if matched is not None:
                self._say(self._text[self._at : matched[0]])
                self._at = matched[0] + len(matched[1])
                return matched[1]
            end = len(self._text) if self.ended else _held(self._text, marks, self._at)
            self._say(self._text[self._at : end])
            self._at = end
            if self.ended:
                return ""
            self.trim()
            yield

    def words(self, text: str) -> None:
        """A mark that begins no call after all."""
        self._say(text)

    def tool(self, name: str) -> Tool | None:
        """The tool of that name, if it may be called."""
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
        """The answer is over: tell the white space at its end, if no call stands before it."""
        if self._blank and not self._behind_call:
            self.parts.append(AnswerText(self._blank))

    def _say(self, text: str) -> None:
        """Tell `text`. White space next to a call belongs to its form, but for one between what is said."""
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
    """A `Reader` by one family's reading."""

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

    def flush(self) -> Sequence[Part]:
        self._source.ended = True
        next(self._reading, None)
        self._source.finish()
        return self._source.taken()


def _first(text: str, marks: Sequence[str], start: int) -> tuple[int, str] | None:
    """Where the first of `marks` stands, and which it is."""
    candidates = [(place, mark) for mark in marks if (place := text.find(mark, start)) >= 0]
    return min(candidates, default=None)


def _held(text: str, marks: Sequence[str], start: int) -> int:
    """Where an end of `text` begins that may go on to be one of `marks`; its length if none may."""
    held = len(text)
    for mark in marks:
        place = text.find(mark[0], max(start, len(text) - len(mark) + 1))
        while place >= 0:
            if mark.startswith(text[place:]):
                held = min(held, place)
                break
            place = text.find(mark[0], place + 1)
    return held


def _longest(marks: Sequence[str]) -> int:
    return max(map(len, marks))
