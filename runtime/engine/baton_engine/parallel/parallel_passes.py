"""
Captured passes of all ranks: each rank captures its part of a pass, in the same order as all others.

An operation of NCCL in a graph waits for the graphs of the other ranks. So rank 0 names the pass of each
replay, and all ranks have the same ones: a pass that one rank cannot capture is dropped by all.
"""

from __future__ import annotations

from torch import Tensor

from baton_api.errors import SetupError
from baton_engine.batch import Batch
from baton_engine.captured_passes import CapturedPasses
from baton_engine.parallel.messages import CapturePass, DropPass, PassCaptured, ReplayPass
from baton_engine.parallel.ranks import Ranks


class CaptureFailed(Exception):
    """A rank cannot capture a pass, for the reason in the text. No rank has it."""


class ParallelPasses:
    """Implementation of `captured_passes.Passes`, on rank 0."""

    def __init__(self, ranks: Ranks, rank0: CapturedPasses, *, of_head: bool = False) -> None:
        """`rank0` are the passes of rank 0: the model's, which begin with its token ids, or the head's."""
        self._ranks = ranks
        self._of_head = of_head
        self._rank0 = rank0
        self._others_used = 0

    @property
    def used(self) -> int:
        return max(self._rank0.used, self._others_used)

    def capture(self, rows: int) -> int:
        """As `Passes`. Raises SetupError if a rank has ended or does not answer."""
        self._post(CapturePass(rows=rows, of_head=self._of_head))
        rank0 = captured(self._rank0, rows)
        others = self._ranks.replies(PassCaptured)
        reasons = [
            f"rank {rank}: {reply.reason}" for rank, reply in enumerate([rank0, *others]) if reply.reason
        ]
        if reasons:
            self.drop(rows)
            raise CaptureFailed("; ".join(reasons))
        self._others_used = max(other.used for other in others)
        return max(rank0.used, self._others_used)

    def drop(self, rows: int) -> None:
        self._post(DropPass(rows=rows, of_head=self._of_head))
        self._rank0.drop(rows)

    def fits(self, rows: int, batch: Batch) -> bool:
        return self._rank0.fits(rows, batch)

    def replay(self, rows: int, batch: Batch) -> Tensor:
        message = ReplayPass.of(rows, batch, states=self._rank0.states, of_head=self._of_head)
        return self._ranks.launch(message, lambda: self._rank0.replay(rows, batch))

    def clear(self) -> None:
        """The graphs of other ranks end with their processes."""
        self._rank0.clear()

    def _post(self, message: CapturePass | DropPass) -> None:
        try:
            self._ranks.post(message)
        except OSError as error:
            raise SetupError(f"Tensor parallelism cannot start: a rank has ended: {error}") from error


def captured(passes: CapturedPasses, rows: int) -> PassCaptured:
    """Capture a pass of one rank. Returns the message to rank 0, with the reason if it failed."""
    try:
        return PassCaptured(used=passes.capture(rows))
    except Exception as error:
        return PassCaptured(used=0, reason=f"{type(error).__name__}: {error}")
