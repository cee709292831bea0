"""
Reasoning between two marks, and the answer after it: the marks of model families, and their reader.

The families differ in the marks, and in whether the chat template or the model writes the start mark, or
neither. The end of the prompt shows whether the template has written it. The reader separates text that
arrives in pieces:

    undecided -> thinking -> between -> answering

White space around the reasoning and at the start of the answer is removed. The reader buffers text that may
be part of a mark, and white space before it. The parts therefore do not depend on how the text was split. An
inner reader reads the answer.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton_engine.api.parsing.parts import AnswerText, Part, Reader, Thought


class PromptState(enum.Enum):
    """Position of the answer's start relative to the reasoning."""

    OPEN = "within the reasoning"
    FREE = "before optional reasoning"
    CLOSED = "after the reasoning, or reasoning is disabled"


@dataclass(frozen=True, slots=True)
class ReasoningFamily:
    """One pair of marks."""

    name: str
    start: str
    end: str
    implied: bool = False
    """Whether the answer begins within reasoning even if the prompt does not end with `start`."""

    def state(self, prompt: str, continued: str | None = None) -> PromptState:
        """
        Return the state at the end of a rendered prompt. `continued` is the partial message at its end.

        Only the end of the prompt is examined, because messages of users may contain marks.
        """
        if continued is not None:
            # The message, and marks that the template may have put before it.
            tail = prompt[-len(continued) - len(self.start) - len(self.end) - 16 :]
            started, ended = tail.rfind(self.start), tail.rfind(self.end)
            if started != ended:
                return PromptState.OPEN if started > ended else PromptState.CLOSED
            return PromptState.CLOSED if continued.strip() else self._beginning
        written = prompt.rstrip()
        if written.endswith(self.start):
            return PromptState.OPEN
        return PromptState.CLOSED if written.endswith(self.end) else self._beginning

    @property
    def _beginning(self) -> PromptState:
        return PromptState.OPEN if self.implied else PromptState.FREE


def _tags(name: str, implied: bool = False) -> ReasoningFamily:
    return ReasoningFamily(name, "<think>", "</think>", implied)


THINK = ("qwen3", "glm45", "kimi_k2", "deepseek-v3", "nemotron", "minimax_m2")
"""Families with optional reasoning. The model or its template writes <think>."""
ALWAYS = ("deepseek-r1", "qwen3-thinking")
"""Families that always reason, sometimes without a start mark."""

FAMILIES: Mapping[str, ReasoningFamily] = {
    family.name: family
    for family in (
        *(_tags(name) for name in THINK),
        *(_tags(name, implied=True) for name in ALWAYS),
        ReasoningFamily("mistral", "[THINK]", "[/THINK]"),
        ReasoningFamily("granite", "Here is my thought process:", "Here is my response:"),
    )
}


class ReadingPhase(enum.Enum):
    UNDECIDED = enum.auto()
    THINKING = enum.auto()
    BETWEEN = enum.auto()
    ANSWERING = enum.auto()


FIRST = {
    PromptState.OPEN: ReadingPhase.THINKING,
    PromptState.FREE: ReadingPhase.UNDECIDED,
    PromptState.CLOSED: ReadingPhase.ANSWERING,
}


class ReasoningReader:
    """Reads the reasoning of one choice, then its answer."""

    def __init__(
        self,
        family: ReasoningFamily,
        inner: Reader,
        state: PromptState,
        *,
        separate: bool = True,
        keep_space: bool = False,
    ) -> None:
        """
        Without `separate`, the text includes reasoning and marks.

        `keep_space` keeps the white space at the start of the answer.
        """
        self._start = family.start
        self._end = family.end
        self._inner = inner
        self._separate = separate
        self._trims = separate and not keep_space
        self._phase = FIRST[state]
        self._started = self._begun = False
        """Whether the start mark, and the first character of the reasoning, were read."""
        self._buffer = ""

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._phase is ReadingPhase.THINKING

    def push(self, text: str) -> Sequence[Part]:
        if self._phase is ReadingPhase.ANSWERING:
            return self._inner.push(text)
        self._buffer += text
        parts: list[Part] = []
        if self._phase is ReadingPhase.UNDECIDED:
            self._decide()
        if self._phase is ReadingPhase.THINKING:
            self._think(parts)
        if self._phase is ReadingPhase.BETWEEN:
            self._arrive()
        return [*parts, *self._answer()]

    def flush(self, cut: bool = False) -> Sequence[Part]:
        """Return the buffered parts at the end of the answer, without a truncated mark."""
        rest, self._buffer = self._buffer, ""
        parts: list[Part] = []
        if not self._separate:
            parts += [AnswerText(rest)] if rest else []
        elif self._phase is ReadingPhase.THINKING:
            mark_length = max(
                beginning(rest, self._end), 0 if self._started else beginning(rest, self._start)
            )
            thought = rest[: len(rest) - mark_length if mark_length > (not cut) else None].rstrip()
            self._emit(parts, thought if self._begun else thought.lstrip(), rest)
        elif self._phase is ReadingPhase.UNDECIDED and beginning(rest, self._start) <= (not cut):
            parts += self._inner.push(rest)
        return [*parts, *self._inner.flush(cut)]

    def _decide(self) -> None:
        written = self._buffer.lstrip()
        if written.startswith(self._start):
            self._phase = ReadingPhase.THINKING
        elif not self._start.startswith(written):
            self._phase = ReadingPhase.ANSWERING

    def _think(self, parts: list[Part]) -> None:
        if not self._begun and not self._begin(parts):
            return
        end = self._buffer.find(self._end)
        if end >= 0:
            self._take(parts, self._buffer[:end].rstrip(), end + len(self._end))
            self._phase = ReadingPhase.BETWEEN
            return
        length = len(self._buffer) - beginning(self._buffer, self._end)
        length = len(self._buffer[:length].rstrip())
        self._take(parts, self._buffer[:length], length)

    def _begin(self, parts: list[Part]) -> bool:
        """Skip white space and the start mark, which a model may repeat after the prompt's."""
        written = self._buffer.lstrip()
        if not self._started:
            if self._start.startswith(written) and written != self._start:
                return False
            if written.startswith(self._start):
                self._started = True
                self._take(parts, "", len(self._buffer) - len(written) + len(self._start))
                written = self._buffer.lstrip()
        if not written:
            return False
        self._begun = True
        self._take(parts, "", len(self._buffer) - len(written))
        return True

    def _arrive(self) -> None:
        if self._trims:
            self._buffer = self._buffer.lstrip()
        if self._buffer or not self._trims:
            self._phase = ReadingPhase.ANSWERING

    def _answer(self) -> Sequence[Part]:
        if self._phase is not ReadingPhase.ANSWERING or not self._buffer:
            return ()
        rest, self._buffer = self._buffer, ""
        return self._inner.push(rest)

    def _take(self, parts: list[Part], thought: str, length: int) -> None:
        """Remove `length` characters from the buffer and emit their reasoning, `thought`."""
        written, self._buffer = self._buffer[:length], self._buffer[length:]
        self._emit(parts, thought, written)

    def _emit(self, parts: list[Part], thought: str, written: str) -> None:
        if self._separate and thought:
            parts.append(Thought(thought))
        elif not self._separate and written:
            parts.append(AnswerText(written))


def beginning(text: str, mark: str) -> int:
    """
    Return how many characters at the end of `text` are a proper prefix of `mark`.

    >>> beginning("so.</th", "</think>"), beginning("a < b", "</think>")
    (4, 0)
    """
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0
