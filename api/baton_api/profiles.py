"""
The measured performance of a model on one kind of machine, which `baton bench --find` writes.

A profile has three fitted lines: prompt, step and transfer. The capacity of a worker within its objectives
and the ratio of prefill to decode workers follow from them. The router starts with the lines, the autoscaler
with the capacity. Both continue to learn from measurements.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final, Literal

import msgspec

from baton_api.errors import SetupError

FORMAT: Final = 1

LATE_SHARE = 0.05
"""Share of prompts that may exceed the objective, which holds for the 95th percentile."""

MOST_BUSY = 0.95
"""Maximum planned utilization of a worker. The queue time at 1 is unbounded."""


class PrefillLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds to compute a prompt on an idle worker. All coefficients are >= 0."""

    base_s: float
    token_s: float
    """Per token."""
    pair_s: float
    """Per pair of tokens of which one attends to the other."""

    def seconds(self, uncached: int, context: int) -> float:
        """
        Return the seconds for the last `uncached` tokens of a prompt of `context` tokens.

        >>> PrefillLine(base_s=0.01, token_s=1e-4, pair_s=0.0).seconds(100, 500)
        0.02
        """
        return self.base_s + self.token_s * uncached + self.pair_s * uncached * (context - uncached / 2)


class StepLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of a decode step of all streams of a worker. All coefficients are >= 0."""

    base_s: float
    stream_s: float
    token_s: float
    """Per token of context, over all streams."""

    def seconds(self, streams: int, context: int) -> float:
        """Return the seconds of a step with `streams` of `context` tokens together."""
        return self.base_s + self.stream_s * streams + self.token_s * context


class TransferLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds to transfer the blocks of a prompt from a prefill to a decode worker."""

    start_s: float
    token_s: float

    def seconds(self, tokens: int) -> float:
        return self.start_s + self.token_s * tokens


class Objectives(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Objectives of a service, and the requests for which they hold."""

    ttft_s: float = 1.0
    """Seconds to the first token, for 95% of requests."""
    itl_s: float = 0.05
    """Seconds between tokens."""
    prompt_tokens: int = 1024
    """Mean prompt length."""
    output_tokens: int = 256
    cached_share: float = 0.0
    """Cached share of the prompt tokens, 0 to 1."""

    @property
    def uncached(self) -> int:
        """Computed tokens of a prompt, at least 1."""
        return max(1, round(self.prompt_tokens * (1 - self.cached_share)))


class Capacity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Capacity of one worker of each role within the objectives. 0: the objectives cannot be met."""

    prefill_tokens_per_s: float
    """Uncached prompt tokens of one prefill worker."""
    decode_tokens_per_s: float
    """Generated tokens of one decode worker."""
    decode_streams: int
    """Concurrent streams of one decode worker."""
    prefill_per_decode: float
    """Prefill workers per decode worker for equal utilization. 0: unknown."""


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measurement: the median of its repeats."""

    what: Literal["prefill", "step", "transfer"]
    tokens: int
    """Tokens of one prompt."""
    streams: int
    """Concurrent prompts or streams."""
    seconds: float


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model on one kind of machine."""

    format: Literal[1] = FORMAT
    model: str
    """Name of the model in the service."""
    machine: str
    """Description: processor or accelerator, and their number per worker."""
    baton: str
    """Measured version."""
    measured_at: float
    """Unix time of the measurement in seconds."""
    prefill: PrefillLine
    step: StepLine
    transfer: TransferLine
    kv_tokens: int
    """Tokens in the KV cache of a decode worker."""
    max_streams: int = 64
    """Maximum concurrent streams of a decode worker."""
    objectives: Objectives = Objectives()
    capacity: Capacity
    points: tuple[Point, ...] = ()
    """Measurements of the fitted lines."""


def capacity(
    prefill: PrefillLine,
    step: StepLine,
    transfer: TransferLine,
    kv_tokens: int,
    max_streams: int,
    objectives: Objectives,
) -> Capacity:
    """Return the load that one worker of each role serves within the objectives."""
    computing = prefill.seconds(objectives.uncached, objectives.prompt_tokens)
    prompts = 0.0
    if computing > 0:
        left = objectives.ttft_s - computing - transfer.seconds(objectives.uncached) - step.seconds(1, 0)
        prompts = busy_share(computing, left) * objectives.uncached / computing
    streams = decode_streams(step, kv_tokens, max_streams, objectives)
    context = mean_context(objectives)
    generated = streams / step.seconds(streams, streams * context) if streams else 0.0
    ratio = (
        (objectives.uncached / prompts) / (objectives.output_tokens / generated)
        if prompts and generated
        else 0.0
    )
    return Capacity(
        prefill_tokens_per_s=prompts,
        decode_tokens_per_s=generated,
        decode_streams=streams,
        prefill_per_decode=ratio,
    )


def busy_share(service_s: float, left_s: float) -> float:
    """
    Return the greatest share of its time, up to `MOST_BUSY`, that a worker may spend on prompts.

    The prompts take `service_s` each and arrive at random; at most `LATE_SHARE` of them may wait longer than
    `left_s`. The model is a queue of one server with constant service time. The share of prompts that wait
    equals the busy share, and their wait is about exponential with a mean of service / (2 (1 - share))
    (Kleinrock, Queueing Systems II, 2.1).

    >>> busy_share(0.1, -0.01)
    0.0
    >>> busy_share(0.1, 10.0)
    0.95
    """
    if left_s < 0:
        return 0.0
    low, high = 0.0, MOST_BUSY
    for _ in range(50):
        share = (low + high) / 2
        late = share * math.exp(-left_s * 2 * (1 - share) / service_s)
        low, high = (share, high) if late <= LATE_SHARE else (low, share)
    return round(high, 6)


def decode_streams(step: StepLine, kv_tokens: int, max_streams: int, objectives: Objectives) -> int:
    """Return the maximum streams within the objective and the KV cache."""
    in_time = streams_in_time(step, max_streams, objectives)
    return min(streams_in_cache(kv_tokens, objectives), max_streams, in_time)


def streams_in_cache(kv_tokens: int, objectives: Objectives) -> int:
    """Return the maximum streams whose whole contexts fit the KV cache."""
    return kv_tokens // (objectives.prompt_tokens + objectives.output_tokens)


def streams_in_time(step: StepLine, max_streams: int, objectives: Objectives) -> int:
    """Return the maximum streams within the objective. `max_streams`: their number does not matter."""
    of_stream_s = step.stream_s + step.token_s * mean_context(objectives)
    left = objectives.itl_s - step.base_s
    if left < of_stream_s:
        return 0
    return math.floor(left / of_stream_s + 1e-9) if of_stream_s > 0 else max_streams


def mean_context(objectives: Objectives) -> int:
    """Return the mean context length of a stream."""
    return objectives.prompt_tokens + objectives.output_tokens // 2


def read(path: Path) -> Profile:
    """Read a profile. Raises SetupError."""
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise SetupError(
            f"Cannot read the profile {path}: {error.strerror}. `baton bench --find` writes one."
        ) from error
    except SetupError as error:
        raise SetupError(f"{path}: {error.message}") from error


def parse(text: bytes | str) -> Profile:
    """Parse a profile. Raises SetupError."""
    try:
        return msgspec.json.decode(text, type=Profile)
    except msgspec.DecodeError as error:
        raise SetupError(
            f"Invalid profile of format {FORMAT}: {error}. `baton bench --find` writes one."
        ) from error


def write(profile: Profile, path: Path) -> None:
    """Write a profile. Raises SetupError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
    except OSError as error:
        raise SetupError(f"Cannot write the profile to {path}: {error.strerror}.") from error
