"""
What things take on one worker, in seconds, as its own answers have taught.

Each worker is its own kind of machine, and a loaded one is another machine again, so nothing is
configured: every first token tells how long its prompt took, every stream how long its steps took.
Before the first measurement a worker is believed to be like a small GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_router.least_squares import LeastSquares

NEVER = float("inf")

LEAST_S = 1e-4
"""No prediction is below this: a line through noise may well be."""

TAUGHT = 10
"""Measurements that make a prediction one to rely on."""

SMOOTHING = 0.1
"""What one measurement adds to an average that goes with the times."""


@dataclass(slots=True)
class PrefillCost:
    """
    Seconds to compute `uncached` tokens at the end of a context of `context` tokens.

    A constant, a share per token, and one per pair of tokens that attend to one another.
    """

    line: LeastSquares = field(default_factory=lambda: LeastSquares((0.02, 0.1, 0.005)))

    def seconds(self, uncached: int, context: int) -> float:
        constant, each, pairs = self.line.coefficients  # written out: it is asked for every worker
        work = uncached * (context - uncached / 2)
        seconds = constant + each * uncached / 1e3 + pairs * work / 1e6
        return seconds if seconds > LEAST_S else LEAST_S

    @property
    def taught(self) -> bool:
        """Whether it is more than a guess."""
        return self.line.measurements >= TAUGHT

    def learn(self, uncached: int, context: int, seconds: float) -> None:
        work = uncached * (context - uncached / 2)
        self.line.learn(1.0, uncached / 1e3, work / 1e6, seconds)


@dataclass(slots=True)
class StepCost:
    """Seconds from one token to the next, with `running` streams of `context` tokens in all."""

    line: LeastSquares = field(default_factory=lambda: LeastSquares((0.01, 0.002, 0.002)))

    def seconds(self, running: int, context: int) -> float:
        constant, each, tokens = self.line.coefficients
        seconds = constant + each * running / 10 + tokens * context / 1e4
        return seconds if seconds > LEAST_S else LEAST_S

    def beside(self, running: int, context: int, tokens: int) -> tuple[float, float]:
        """The same as it is, and with one stream of `tokens` more."""
        constant, each, share = self.line.coefficients
        before = constant + each * running / 10 + share * context / 1e4
        after = before + each / 10 + share * tokens / 1e4
        return before if before > LEAST_S else LEAST_S, after if after > LEAST_S else LEAST_S

    def learn(self, running: int, context: int, seconds: float) -> None:
        self.line.learn(1.0, running / 10, context / 1e4, seconds)


@dataclass(slots=True)
class Average:
    """A mean that goes with the times."""

    value: float

    def learn(self, measured: float) -> None:
        self.value += SMOOTHING * (measured - self.value)


@dataclass(slots=True)
class TransferCost:
    """Seconds to move a prompt's blocks between two workers."""

    seconds_per_token: Average = field(default_factory=lambda: Average(2e-6))
    start_s: float = 0.001
    apart_until: float = 0.0
    """Blocks did not come over between the two: until then they are no pair."""

    def seconds(self, tokens: int, now: float) -> float:
        """Infinite while the two are kept apart."""
        if now < self.apart_until:
            return NEVER
        return self.start_s + tokens * self.seconds_per_token.value

    def learn(self, tokens: int, seconds: float) -> None:
        if tokens > 0:
            self.seconds_per_token.learn(max(0.0, seconds - self.start_s) / tokens)
