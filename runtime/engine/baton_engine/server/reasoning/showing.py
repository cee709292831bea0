"""Thoughts as a client wants them: all at once, or not at all."""

from __future__ import annotations

from collections.abc import Sequence

from baton_engine.server.parts import Part, Reader, Thought
from baton_engine.server.reasoning.formats import Thinker


class Showing:
    """Another reader's parts, the thoughts among them in one piece, or left out."""

    def __init__(self, inner: Reader, *, left_out: bool) -> None:
        self._inner = inner
        self._thinker = inner if isinstance(inner, Thinker) else None
        self._left_out = left_out
        self._thought: list[str] = []

    @property
    def thinking(self) -> bool:
        return self._thinker is not None and self._thinker.thinking

    def push(self, text: str) -> Sequence[Part]:
        return self._shown(self._inner.push(text))

    def flush(self) -> Sequence[Part]:
        return [*self._shown(self._inner.flush()), *self._told()]

    def _shown(self, parts: Sequence[Part]) -> Sequence[Part]:
        shown: list[Part] = []
        for part in parts:
            if not isinstance(part, Thought):
                shown += self._told()
                shown.append(part)
            elif not self._left_out:
                self._thought.append(part.text)
        return shown

    def _told(self) -> Sequence[Part]:
        whole = "".join(self._thought)
        self._thought.clear()
        return [Thought(whole)] if whole else []
