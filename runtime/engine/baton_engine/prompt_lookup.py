"""
Drafts from the request's own tokens: what followed the latest tokens when they occurred before.

Answers that edit code or quote documents repeat long parts of their prompt. The longest earlier occurrence of
the last tokens is found through a chain of the positions of each pair of tokens, as in LZ77. While the answer
follows an occurrence, it is not searched again.

Whether a continuation is correct is recorded for every generated token, also for tokens that were not
drafted. The estimate of acceptance therefore costs no computation, and drafts begin when they are likely to
be accepted. A request begins with the rates of those before it. Prompt lookup: https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Sequence

PAIR = 2
"""Length of the shortest match."""

LONGEST_MATCH = 16
"""Length at which a match is not compared further."""

CANDIDATES = 8
"""Maximum number of occurrences that are compared, the latest first."""

INDEXED_AT_ONCE = 4096
"""Maximum number of tokens that one call adds to the index: about a millisecond. A long prompt takes
several steps."""

GAP = -1
"""Token between a prediction and the prompt. It is never drafted."""

DECAY = 0.9
"""Weight of a result relative to the next one of the same class."""

PRIORS = (0.5, 0.4, 0.6, 0.8, 0.9)
"""Estimates without results, by class of the match: the start of a prediction, then lengths of 2, 4, 8 and 16
tokens."""

PRIOR_WEIGHT = 2.0
"""Number of results that a prior counts as, at a request's first draft."""

SHARED_DECAY, SHARED_WEIGHT = 0.99, 16.0
"""The same for the results of all requests, from which the prior of a request comes."""


class AcceptanceRates:
    """Averages of the results by class of the match, the latest with the largest weight."""

    def __init__(
        self, priors: Sequence[float] = PRIORS, weight: float = SHARED_WEIGHT, decay: float = SHARED_DECAY
    ) -> None:
        """`priors` has an estimate for each class; each counts as `weight` results."""
        self._decay = decay
        self._hits = [weight * prior for prior in priors]
        self._results = [weight] * len(priors)

    def add(self, kind: int, hit: bool) -> None:
        self._hits[kind] = self._hits[kind] * self._decay + hit
        self._results[kind] = self._results[kind] * self._decay + 1.0

    def of(self, kind: int) -> float:
        """Return the probability that the next token of a match of this class is correct."""
        return self._hits[kind] / self._results[kind]

    def all(self) -> list[float]:
        return [self.of(kind) for kind in range(len(self._hits))]


class Lookup:
    """The tokens of one request, their index, and the earlier position that its answer repeats."""

    def __init__(
        self,
        prompt: Sequence[int],
        prediction: Sequence[int] = (),
        shared: AcceptanceRates | None = None,
    ) -> None:
        """
        `prediction` is a text that the client expects; the answer is assumed to begin with it.

        `shared` has the results of earlier requests. They are the prior of this one, which adds its own.
        """
        self._tokens = [*prediction, GAP, *prompt] if prediction else list(prompt)
        self._latest: dict[int, int] = {}
        """By pair of tokens, the position after its last occurrence."""
        self._earlier: list[int] = [0] * PAIR
        """By position, that of the preceding occurrence of the same pair; 0: none."""
        self._match_end: int | None = 0 if prediction else None
        """Position of the token that follows if the answer continues like an earlier part."""
        self._matched = 0
        """Length of the match before `_match_end`."""
        self._pushed = 0
        self._predicted_end = len(prediction)
        self.predicted = 0
        """Number of generated tokens that followed the prediction."""
        self._shared = shared or AcceptanceRates()
        self._rates = AcceptanceRates(self._shared.all(), PRIOR_WEIGHT, DECAY)

    def follow(self, answer: Sequence[int]) -> None:
        """Add the tokens of `answer`, all generated ones, that were not added before."""
        for token in answer[self._pushed :]:
            self.push(token)

    def push(self, token: int) -> None:
        """Add a generated token."""
        position, tokens = self._match_end, self._tokens
        tokens.append(token)
        self._pushed += 1
        if position is not None:
            kind, hit = _kind(self._matched), tokens[position] == token
            self._rates.add(kind, hit)
            self._shared.add(kind, hit)
            self.predicted += hit and position < self._predicted_end
            if hit and tokens[position + 1] != GAP:
                self._match_end, self._matched = position + 1, self._matched + 1
                return
        self._match_end = None

    def propose(self, most: int) -> list[int]:
        """Return at most `most` tokens that may follow."""
        self._index()
        if self._match_end is None:
            self._search()
        if self._match_end is None:
            return []
        tokens, start = self._tokens, self._match_end
        draft = tokens[start : start + most]
        if GAP in draft:
            return draft[: draft.index(GAP)]
        period = len(tokens) - start
        while len(draft) < most:  # the occurrence overlaps the end: the text repeats itself
            draft.append(draft[-period])
        return draft

    def chances(self, count: int) -> list[float]:
        """Return for each of the next `count` draft tokens the probability that it and all before it are
        accepted.
        """
        chances, chance = [], 1.0
        for ahead in range(count):
            kind = _kind(self._matched + ahead)
            chance *= self._rates.of(kind)
            chances.append(chance)
        return chances

    def _index(self) -> None:
        tokens, latest, earlier = self._tokens, self._latest, self._earlier
        start = len(earlier)
        for position in range(start, min(len(tokens), start + INDEXED_AT_ONCE)):
            pair = tokens[position - 2] << 32 | tokens[position - 1]
            earlier.append(latest.get(pair, 0))
            latest[pair] = position

    def _search(self) -> None:
        tokens = self._tokens
        end = len(tokens)
        if end < PAIR or len(self._earlier) < end:
            return
        position = self._latest.get(tokens[-2] << 32 | tokens[-1], 0)
        longest = 0
        for _ in range(CANDIDATES):
            if not position or longest == LONGEST_MATCH:
                return
            length = PAIR
            while (
                length < LONGEST_MATCH
                and length < position
                and tokens[position - length - 1] == tokens[end - length - 1]
            ):
                length += 1
            if length > longest and tokens[position] != GAP:
                self._match_end, self._matched, longest = position, length, length
            position = self._earlier[position]


def _kind(matched: int) -> int:
    """Return the class of a match of `matched` tokens."""
    return min(matched.bit_length() - 1, len(PRIORS) - 1) if matched >= PAIR else 0
