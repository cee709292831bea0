"""
A line through measurements that goes with the times: recursive least squares with forgetting.

What was measured last counts most; a hundred measurements later it counts a third. The prior is what is
believed before the first one, worth as much as a few of them. There are always three inputs, and the
recursion is written out for them: it runs with every first token.
"""

from __future__ import annotations

FORGETTING = 0.99
PRIOR_CONFIDENCE = 10.0
"""Initial variance of the coefficients against the noise: the larger, the less the prior counts."""

VARIANCE_LIMIT = 1e4
"""Without it, an input that is always 0 would let its variance grow for ever."""

Triple = tuple[float, float, float]


class LeastSquares:
    """
    `outcome = a * x + b * y + c * z`, for inputs of the size of 1.

    The textbook recursion: Haykin, Adaptive Filter Theory, chapter on RLS.
    """

    __slots__ = ("_variance", "coefficients", "measurements")

    def __init__(self, prior: Triple) -> None:
        self.coefficients = prior
        self.measurements = 0
        first = PRIOR_CONFIDENCE
        self._variance = (first, 0.0, 0.0, first, 0.0, first)
        """The upper half of the matrix, row by row; the lower one mirrors it."""

    def predict(self, x: float, y: float, z: float) -> float:
        a, b, c = self.coefficients
        return a * x + b * y + c * z

    def learn(self, x: float, y: float, z: float, outcome: float) -> None:
        """One measurement."""
        xx, xy, xz, yy, yz, zz = self._variance
        gain_x = xx * x + xy * y + xz * z
        gain_y = xy * x + yy * y + yz * z
        gain_z = xz * x + yz * y + zz * z
        spread = FORGETTING + x * gain_x + y * gain_y + z * gain_z
        error = (outcome - self.predict(x, y, z)) / spread
        a, b, c = self.coefficients
        self.coefficients = (a + gain_x * error, b + gain_y * error, c + gain_z * error)
        self.measurements += 1
        xx = (xx - gain_x * gain_x / spread) / FORGETTING
        xy = (xy - gain_x * gain_y / spread) / FORGETTING
        xz = (xz - gain_x * gain_z / spread) / FORGETTING
        yy = (yy - gain_y * gain_y / spread) / FORGETTING
        yz = (yz - gain_y * gain_z / spread) / FORGETTING
        zz = (zz - gain_z * gain_z / spread) / FORGETTING
        if xx > VARIANCE_LIMIT or yy > VARIANCE_LIMIT or zz > VARIANCE_LIMIT:  # those beside them are less
            xx, yy, zz = min(xx, VARIANCE_LIMIT), min(yy, VARIANCE_LIMIT), min(zz, VARIANCE_LIMIT)
        self._variance = (xx, xy, xz, yy, yz, zz)
