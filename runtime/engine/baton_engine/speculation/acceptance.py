"""The results of drafts, and the estimate of the next one's acceptance: the same for all models of drafts."""

from __future__ import annotations

from itertools import takewhile

from baton_engine.scheduling.sequence import FIRST_ACCEPTANCE, DraftState, Sequence

WEIGHT = 0.1
"""Weight of one result in the estimate of acceptance."""

RECOVERY = 0.02
"""Weight of `FIRST_ACCEPTANCE` for each pass without a draft, so that drafts are tried again."""


def state_of(sequence: Sequence) -> DraftState:
    """Return the state of a sequence, a new one after another admission, which may have other blocks."""
    state = sequence.draft_state
    if state is None:
        state = sequence.draft_state = DraftState(sequence.admissions)
    if state.admissions != sequence.admissions:
        state.admissions, state.filled, state.draft = sequence.admissions, 0, ()
    return state


def judge(sequence: Sequence, state: DraftState) -> int:
    """Process the result of the last draft, if there was one. Returns the number of accepted tokens."""
    if not state.draft:
        state.acceptance += (FIRST_ACCEPTANCE - state.acceptance) * RECOVERY
        return 0
    actual = sequence.tokens(state.start, min(sequence.length, state.start + len(state.draft)))
    pairs = zip(actual, state.draft, strict=False)
    accepted = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    for hit in (True,) * accepted + (False,) * (accepted < len(actual)):
        state.acceptance += (hit - state.acceptance) * WEIGHT
    state.draft = ()
    return accepted
