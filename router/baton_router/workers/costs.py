"""
Learned costs of one worker, in seconds: recursive least squares over its own answers.

Each worker differs, and its load changes it again, so nothing is configured: every first token is a
measurement of a prompt's time, every stream one of its steps. Before its first measurement, a worker is
assumed to be like others of its kind. The first of a kind starts with the profile of its model, or with the
costs of a small GPU without a profile.

Old measurements are forgotten exponentially: one counts a third after a hundred more. The prior counts as
much as a few measurements. There are always three inputs, and the recursion is written out for them because
it runs with every first token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from baton_api.profiles import Profile
from baton_api.workers import PEER
from baton_router.cache.prompt_chunks import BYTES_PER_TOKEN
from baton_router.cache.tiers import Tier

NEVER = float("inf")

LEAST_S = 1e-4
"""No prediction is below this, although a line through noise may be."""

RELIABLE_AFTER = 10
"""Measurements after which a prediction is reliable."""

SMOOTHING = 0.1
"""Weight of one measurement in a moving average."""


HALF_WEIGHT_BYTES = 2048
"""Size of a prompt that changes `BytesPerToken` by half as much as the longest."""

MIN_BYTES_PER_TOKEN, MAX_BYTES_PER_TOKEN = 1.0, 16.0
"""No token of a text has less; more is a client's oddity that would make all other prompts look short."""


@dataclass(frozen=True, slots=True)
class CostPrior:
    """Assumed costs of a model before the first measurement, in the units of the lines below."""

    prefill: Triple = (0.02, 0.1, 0.005)
    step: Triple = (0.01, 0.002, 0.002)
    transfer_token_s: float = 2e-6
    transfer_start_s: float = 0.001

    @classmethod
    def of(cls, profile: Profile) -> CostPrior:
        prefill, step = profile.prefill, profile.step
        return cls(
            prefill=(prefill.base_s, prefill.token_s * 1e3, prefill.pair_s * 1e6),
            step=(step.base_s, step.stream_s * 10, step.token_s * 1e4),
            transfer_token_s=profile.transfer.token_s,
            transfer_start_s=profile.transfer.start_s,
        )


DEFAULT_PRIOR = CostPrior()


RESTORE_PRIORS: dict[str, tuple[float, float]] = {
    Tier.MEMORY: (1e-5, 0.002),
    Tier.DISK: (5e-5, 0.005),
    Tier.SHARED: (1e-4, 0.01),
    PEER: (5e-5, 0.02),
}
"""Assumed seconds per restored token, and of starting, before the first measurement. With 128 KiB per token
they mean 13 GB/s, 2.6 GB/s and 1.3 GB/s: a copy to an accelerator, a local disk and a network. A peer is
asked first, and is often on the same machine."""


class WorkerKind:
    """
    Costs of workers of one kind: of restoring tokens, and of prompts, for those without a request so far.

    A new worker that was assumed to be slower than its peers would get no requests, and the assumption would
    never be corrected.
    """

    def __init__(self, prior: CostPrior = DEFAULT_PRIOR) -> None:
        self.prior = prior
        self.restore = {
            tier: TransferCost(RunningAverage(token_s), start_s)
            for tier, (token_s, start_s) in RESTORE_PRIORS.items()
        }
        """By tier, or `PEER`, what restoring tokens costs. Measurements are rare, so the kind shares them."""
        self._typical = LeastSquares(prior.prefill)
        self._untried: list[LeastSquares] = []

    def new_worker(self) -> PrefillCost:
        """The costs of one more worker of this kind."""
        line = LeastSquares(self._typical.coefficients)
        self._untried.append(line)
        return PrefillCost(line, self)

    def learn(self, line: LeastSquares, x: float, y: float, z: float, seconds: float) -> None:
        """A measurement of one worker, which is a hint for the others."""
        line.learn(x, y, z, seconds)
        self._typical.learn(x, y, z, seconds)
        if self._untried:
            self._untried = [one for one in self._untried if not one.measurements]
            for one in self._untried:
                one.coefficients = self._typical.coefficients


@dataclass(slots=True)
class PrefillCost:
    """
    Seconds to compute `uncached` tokens at the end of a context of `context` tokens.

    A constant, a share per token, and one per pair of tokens that attend to one another.
    """

    line: LeastSquares
    _kind: WorkerKind
    _read: Triple = (0.0, 0.0, 0.0)
    """The line's coefficients of which those below were made; a measurement replaces them."""
    _constant_s: float = 0.0
    _token_s: float = 0.0
    _pair_s: float = 0.0

    def seconds(self, uncached: int, context: int) -> float:
        if self.line.coefficients is not self._read:
            self._read_line()
        return self._constant_s + uncached * (self._token_s + self._pair_s * (context - uncached / 2))

    def _read_line(self) -> None:
        """More tokens never take less, whatever a line through noise would say."""
        self._read = constant, token, pair = self.line.coefficients
        self._constant_s = max(LEAST_S, constant)
        self._token_s = max(0.0, token) / 1e3
        self._pair_s = max(0.0, pair) / 1e6

    @property
    def is_calibrated(self) -> bool:
        """Whether enough measurements support the prediction."""
        return self.line.measurements >= RELIABLE_AFTER

    def learn(self, uncached: int, context: int, seconds: float) -> None:
        work = uncached * (context - uncached / 2)
        self._kind.learn(self.line, 1.0, uncached / 1e3, work / 1e6, seconds)


@dataclass(slots=True)
class StepCost:
    """Seconds from one token to the next, with `running` streams of `context` tokens in all."""

    line: LeastSquares = field(default_factory=lambda: LeastSquares(DEFAULT_PRIOR.step))

    def seconds(self, running: int, context: int) -> float:
        return self.with_added_stream(running, context, 0)[0]

    def with_added_stream(self, running: int, context: int, tokens: int) -> tuple[float, float]:
        """Seconds as it is now, and with one more stream of `tokens`."""
        constant, each, share = self.line.coefficients
        each, share = (each if each > 0 else 0.0), (share if share > 0 else 0.0)
        before = (constant if constant > LEAST_S else LEAST_S) + each * running / 10 + share * context / 1e4
        return before, before + each / 10 + share * tokens / 1e4

    def learn(self, running: int, context: int, seconds: float) -> None:
        self.line.learn(1.0, running / 10, context / 1e4, seconds)


@dataclass(slots=True)
class RunningAverage:
    """An exponential moving average."""

    value: float

    def learn(self, measured: float) -> None:
        self.value += SMOOTHING * (measured - self.value)


@dataclass(slots=True)
class BytesPerToken:
    """
    Bytes of a model's prompts for each token.

    Short prompts hardly count: most of their tokens are the template's, which long ones have only once, too.
    """

    value: float = BYTES_PER_TOKEN

    def learn(self, size: int, tokens: int) -> None:
        """A prompt of `size` bytes has `tokens` with its template."""
        measured = min(MAX_BYTES_PER_TOKEN, max(MIN_BYTES_PER_TOKEN, size / tokens))
        self.value += SMOOTHING * size / (size + HALF_WEIGHT_BYTES) * (measured - self.value)


@dataclass(slots=True)
class TransferCost:
    """Seconds to move a prompt's blocks between two workers, or from a tier to the pool."""

    seconds_per_token: RunningAverage = field(
        default_factory=lambda: RunningAverage(DEFAULT_PRIOR.transfer_token_s)
    )
    start_s: float = DEFAULT_PRIOR.transfer_start_s
    apart_until: float = 0.0
    """Time until which the two do not form a pair, because a transfer between them failed."""

    def seconds(self, tokens: int, now: float) -> float:
        """Infinite while the two are kept apart."""
        if now < self.apart_until:
            return NEVER
        return self.start_s + tokens * self.seconds_per_token.value

    def learn(self, tokens: int, seconds: float) -> None:
        if tokens > 0:
            self.seconds_per_token.learn(max(0.0, seconds - self.start_s) / tokens)


FORGETTING = 0.99
PRIOR_CONFIDENCE = 10.0
"""Initial variance of the coefficients against the noise: the larger, the less the prior counts."""

VARIANCE_LIMIT = 1e4
"""Limit of each coefficient's variance: with inputs that are always alike, it would grow for ever."""

Triple = tuple[float, float, float]


class LeastSquares:
    """
    `outcome = a * x + b * y + c * z`, for inputs of the size of 1.

    The textbook recursion: Haykin, Adaptive Filter Theory, chapter on RLS, with a limit of what it forgets.
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
        known = spread - FORGETTING
        share, kept = 1 / spread, FORGETTING
        if known > 0 and (xx > VARIANCE_LIMIT or yy > VARIANCE_LIMIT or zz > VARIANCE_LIMIT):
            # Forget in the direction of these inputs only (directional forgetting: Kulhavy 1987). Cut in any
            # other way, the matrix would let their noise change what other inputs cost.
            share, kept = (FORGETTING - (1 - FORGETTING) / known) / (FORGETTING * (1 + known)), 1.0
        xx = (xx - gain_x * gain_x * share) / kept
        xy = (xy - gain_x * gain_y * share) / kept
        xz = (xz - gain_x * gain_z * share) / kept
        yy = (yy - gain_y * gain_y * share) / kept
        yz = (yz - gain_y * gain_z * share) / kept
        zz = (zz - gain_z * gain_z * share) / kept
        self._variance = (xx, xy, xz, yy, yz, zz)
