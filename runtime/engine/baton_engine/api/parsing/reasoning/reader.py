"""
Separation of reasoning from the answer after it, in text that arrives in pieces.

    undecided -> thinking -> between -> answering

White space around the reasoning and at the start of the answer is removed. The reader buffers text that may
be part of a mark, and white space before it. The parts therefore do not depend on how the text was split. An
inner reader reads the answer.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from baton_engine.api.parsing.parts import AnswerText, Part, Reader, Thought
from baton_engine.api.parsing.reasoning.families import PromptState, ReasoningFamily


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
        apart: bool = True,
        exact: bool = False,
    ) -> None:
        """Without `apart`, the text includes reasoning and marks. `exact` keeps the answer's white space."""
        self._start = family.start
        self._end = family.end
        self._inner = inner
        self._apart = apart
        self._trims = apart and not exact
        self._phase = FIRST[state]
        self._started = self._begun = False
        """Whether the start mark, and the first character of the reasoning, were read."""
        self._held = ""

    @property
    def thinking(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._phase is ReadingPhase.THINKING

    def push(self, text: str) -> Sequence[Part]:
        if self._phase is ReadingPhase.ANSWERING:
            return self._inner.push(text)
        self._held += text
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
        held, self._held = self._held, ""
        parts: list[Part] = []
        if not self._apart:
            parts += [AnswerText(held)] if held else []
        elif self._phase is ReadingPhase.THINKING:
            mark_length = max(
                beginning(held, self._end), 0 if self._started else beginning(held, self._start)
            )
            thought = held[: len(held) - mark_length if mark_length > (not cut) else None].rstrip()
            self._emit(parts, thought if self._begun else thought.lstrip(), held)
        elif self._phase is ReadingPhase.UNDECIDED and beginning(held, self._start) <= (not cut):
            parts += self._inner.push(held)
        return [*parts, *self._inner.flush(cut)]

    def _decide(self) -> None:
        written = self._held.lstrip()
        if written.startswith(self._start):
            self._phase = ReadingPhase.THINKING
        elif not self._start.startswith(written):
            self._phase = ReadingPhase.ANSWERING

    def _think(self, parts: list[Part]) -> None:
        if not self._begun and not self._begin(parts):
            return
        end = self._held.find(self._end)
        if end >= 0:
            self._take(parts, self._held[:end].rstrip(), end + len(self._end))
            self._phase = ReadingPhase.BETWEEN
            return
        sure = len(self._held) - beginning(self._held, self._end)
        sure = len(self._held[:sure].rstrip())
        self._take(parts, self._held[:sure], sure)

    def _begin(self, parts: list[Part]) -> bool:
        """Skip white space and the start mark, which a model may repeat after the prompt's."""
        written = self._held.lstrip()
        if not self._started:
            if self._start.startswith(written) and written != self._start:
                return False
            if written.startswith(self._start):
                self._started = True
                self._take(parts, "", len(self._held) - len(written) + len(self._start))
                written = self._held.lstrip()
        if not written:
            return False
        self._begun = True
        self._take(parts, "", len(self._held) - len(written))
        return True

    def _arrive(self) -> None:
        if self._trims:
            self._held = self._held.lstrip()
        if self._held or not self._trims:
            self._phase = ReadingPhase.ANSWERING

    def _answer(self) -> Sequence[Part]:
        if self._phase is not ReadingPhase.ANSWERING or not self._held:
            return ()
        held, self._held = self._held, ""
        return self._inner.push(held)

    def _take(self, parts: list[Part], thought: str, length: int) -> None:
        """Remove `length` characters from the buffer and emit their reasoning, `thought`."""
        written, self._held = self._held[:length], self._held[length:]
        self._emit(parts, thought, written)

    def _emit(self, parts: list[Part], thought: str, written: str) -> None:
        if self._apart and thought:
            parts.append(Thought(thought))
        elif not self._apart and written:
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
