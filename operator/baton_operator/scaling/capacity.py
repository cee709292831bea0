"""
What one worker of a role can do, learned from what workers were seen to do.

It depends on the model, the machine and the prompts. Each look gives a sample, and the estimate is what four
fifths of the last samples do not exceed, so that neither one slow worker nor one lucky minute decides. An
estimate rises by a quarter at a time at most: what was never seen is not believed. Where something was known
beforehand, that counts until there are samples enough to know better.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SAMPLES = 64
ENOUGH = 20
"""Samples that count for more than what was believed before."""

QUANTILE = 0.8
STEP = 1.25
"""Times what was believed that one more sample can make of it."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Tokens a second of one worker at the load that is aimed at."""

    samples: tuple[float, ...] = ()
    """The last ones, the newest at the end."""
    seed: float | None = None
    """What was believed before: of the older generation, of a profile, or by the operator before this one."""

    @property
    def value(self) -> float | None:
        """
        What was believed before, until there are `ENOUGH` samples; None while there is neither.

        >>> Capacity((9.0, 10.0, 10.0, 11.0, 50.0)).value
        11.0
        >>> Capacity(seed=8.0).value, Capacity().value
        (8.0, None)
        >>> Capacity((2.0,) * 19, seed=8.0).value, Capacity((2.0,) * 20, seed=8.0).value
        (8.0, 2.0)
        """
        if not self.samples or (self.seed is not None and not self.learnt):
            return self.seed
        ordered = sorted(self.samples)
        return ordered[int(QUANTILE * (len(ordered) - 1))]

    @property
    def learnt(self) -> bool:
        """Whether what was seen counts."""
        return len(self.samples) >= (1 if self.seed is None else ENOUGH)

    def learned(self, sample: float | None) -> Capacity:
        """The same with one sample more, if there is one."""
        if sample is None or sample <= 0:
            return self
        before = self.value
        believed = sample if before is None else min(sample, STEP * before)
        return replace(self, samples=(*self.samples, believed)[-SAMPLES:])
