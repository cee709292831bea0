"""State of a draft model for one sequence: a part of the sequence, so that it ends with it."""

from __future__ import annotations

FIRST_ACCEPTANCE = 0.7
"""Estimated acceptance of a token before the first draft."""


class DraftState:
    """Tokens of a sequence in the draft model's cache, its last draft and its acceptance."""

    __slots__ = ("acceptance", "admissions", "draft", "filled", "start")

    def __init__(self, admissions: int) -> None:
        self.admissions = admissions
        """`Sequence.admissions`: another number means other blocks."""
        self.filled = 0
        """Number of leading tokens whose KV is in the draft model's blocks."""
        self.acceptance = FIRST_ACCEPTANCE
        """Estimated probability that a draft token is accepted if those before it are."""
        self.start = 0
        """Position of the last draft."""
        self.draft: tuple[int, ...] = ()
        """The last draft, until its result is known. KV of all its tokens but the last was computed."""
