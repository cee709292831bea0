"""An event loop whose clock jumps to the next timer when nothing else is to be done."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Value = TypeVar("Value")


class _Jumping(selectors.DefaultSelector):
    jumped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        assert timeout is not None, "everybody waits for something that nobody will bring about"
        self.jumped += max(0.0, timeout)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """For work without input and output."""

    def __init__(self) -> None:
        self._selector_ = _Jumping()
        super().__init__(self._selector_)

    def time(self) -> float:
        return self._selector_.jumped


def run(work: Coroutine[Any, Any, Value]) -> Value:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
