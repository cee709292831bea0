"""
A line through measurements that goes with the times: recursive least squares with forgetting.

What was measured last counts most; a hundred measurements later it counts a third. The prior is what is
believed before the first one, worth as much as a few of them.
"""

from __future__ import annotations

from collections.abc import Sequence

FORGETTING = 0.99
PRIOR_CONFIDENCE = 10.0
"""Initial variance of the coefficients against the noise: the larger, the less the prior counts."""

VARIANCE_LIMIT = 1e4
"""Without it, an input that is always 0 would let its variance grow for ever."""


class LeastSquares:
    """
    `y = sum(c * x)`, for inputs of the size of 1.

    The textbook recursion: Haykin, Adaptive Filter Theory, chapter on RLS.
    """

    __slots__ = ("_variance", "coefficients", "measurements")

    def __init__(self, prior: Sequence[float]) -> None:
        size = len(prior)
        self.coefficients = [float(one) for one in prior]
        self.measurements = 0
        self._variance = [
            [PRIOR_CONFIDENCE if row == column else 0.0 for column in range(size)] for row in range(size)
        ]

    def predict(self, inputs: Sequence[float]) -> float:
        return sum(c * x for c, x in zip(self.coefficients, inputs, strict=True))

    def learn(self, inputs: Sequence[float], outcome: float) -> None:
        """One measurement."""
        variance = self._variance
        gains = [sum(v * x for v, x in zip(row, inputs, strict=True)) for row in variance]
        spread = FORGETTING + sum(x * g for x, g in zip(inputs, gains, strict=True))
        error = outcome - self.predict(inputs)
        self.measurements += 1
        size = range(len(inputs))
        for row in size:
            self.coefficients[row] += gains[row] / spread * error
        for row in size:
            for column in size:
                value = (variance[row][column] - gains[row] * gains[column] / spread) / FORGETTING
                variance[row][column] = min(max(value, -VARIANCE_LIMIT), VARIANCE_LIMIT)
