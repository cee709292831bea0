"""
What a model takes on one kind of machine, as it was measured there: `baton bench --find` writes it.

A profile is three lines through measurements (a prompt, a step, a transfer), from which everything else
follows: how many tokens a second one worker of a role serves while objectives hold, and how many prefill
workers a decode worker needs. The router begins with the lines, the autoscaler with the capacity; both go on
to learn from what they see.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final, Literal

import msgspec

from baton_api.errors import SetupError

FORMAT: Final = 1

LATE_SHARE = 0.05
"""Of the prompts, how many may wait for longer than the objective leaves: the 95th percentile keeps it."""

MOST_BUSY = 0.95
"""No worker is planned to be busier, whatever the objectives leave: the wait at 1 has no bound."""


class PrefillLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds to compute a prompt on a worker that does nothing else. None is negative."""

    base_s: float
    token_s: float
    """Each token."""
    pair_s: float
    """Each pair of tokens of which one attends to the other."""

    def seconds(self, uncached: int, context: int) -> float:
        """
        Of the last `uncached` tokens of a prompt of `context` tokens.

        >>> PrefillLine(base_s=0.01, token_s=1e-4, pair_s=0.0).seconds(100, 500)
        0.02
        """
        return self.base_s + self.token_s * uncached + self.pair_s * uncached * (context - uncached / 2)


class StepLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds from one token to the next of all streams of a decode worker. None is negative."""

    base_s: float
    stream_s: float
    token_s: float
    """Each token of context, of all streams together."""

    def seconds(self, streams: int, context: int) -> float:
        """With `streams` that have `context` tokens in all."""
        return self.base_s + self.stream_s * streams + self.token_s * context


class TransferLine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds in which a prompt's blocks are moved from a prefill to a decode worker."""

    start_s: float
    token_s: float

    def seconds(self, tokens: int) -> float:
        return self.start_s + self.token_s * tokens


class Objectives(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a service is to keep, and for what requests."""

    ttft_s: float = 1.0
    """Of 95 in 100 requests, seconds until the first token."""
    itl_s: float = 0.05
    """Seconds from one token to the next."""
    prompt_tokens: int = 1024
    """Of a request, on average."""
    output_tokens: int = 256
    cached_share: float = 0.0
    """Of a prompt's tokens, how many a prefix cache holds: 0 to 1."""

    @property
    def uncached(self) -> int:
        """Tokens of a prompt that are computed, at least 1."""
        return max(1, round(self.prompt_tokens * (1 - self.cached_share)))


class Capacity(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one worker of each role serves while the objectives hold; 0 where it cannot hold them at all."""

    prefill_tokens_per_s: float
    """Uncached prompt tokens that one prefill worker computes."""
    decode_tokens_per_s: float
    """Tokens that one decode worker generates."""
    decode_streams: int
    """Streams that it generates at a time."""
    prefill_per_decode: float
    """Prefill workers for each decode worker, such that neither waits for the other; 0 if unknown."""


class Point(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measurement: the median of its repeats."""

    what: Literal["prefill", "step", "transfer"]
    tokens: int
    """Of one prompt."""
    streams: int
    """Prompts at once, or streams that generate together."""
    seconds: float


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One model on one kind of machine."""

    format: Literal[1] = FORMAT
    model: str
    """As the service calls it."""
    machine: str
    """For people: processor or accelerator, and how many of them a worker had."""
    baton: str
    """The version that was measured."""
    made: float
    """When, in seconds since 1970."""
    prefill: PrefillLine
    step: StepLine
    transfer: TransferLine
    kv_tokens: int
    """Tokens for which a decode worker has room."""
    max_streams: int = 64
    """Streams that it generates at a time at most."""
    objectives: Objectives = Objectives()
    capacity: Capacity
    points: tuple[Point, ...] = ()
    """From what the lines were drawn."""

    def for_objectives(self, objectives: Objectives) -> Capacity:
        """The capacity with others than those that the profile was made for."""
        return capacity(self.prefill, self.step, self.transfer, self.kv_tokens, self.max_streams, objectives)


def capacity(
    prefill: PrefillLine,
    step: StepLine,
    transfer: TransferLine,
    kv_tokens: int,
    max_streams: int,
    objectives: Objectives,
) -> Capacity:
    """What one worker of each role serves while the objectives hold."""
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
    The greatest share of its time, up to `MOST_BUSY`, in which a worker may compute prompts that take
    `service_s` each and come by chance, such that all but `LATE_SHARE` of them wait for at most `left_s`.

    A queue of one server with constant service: of those that wait, which are as many as the share, the wait
    is about exponential with a mean of service / (2 (1 - share)) (Kleinrock, Queueing Systems II, 2.1).

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
    """Most streams whose tokens come in time, and for whose whole contexts there is room."""
    in_time = streams_in_time(step, max_streams, objectives)
    return min(streams_in_room(kv_tokens, objectives), max_streams, in_time)


def streams_in_room(kv_tokens: int, objectives: Objectives) -> int:
    """Most streams for whose whole contexts there is room."""
    return kv_tokens // (objectives.prompt_tokens + objectives.output_tokens)


def streams_in_time(step: StepLine, max_streams: int, objectives: Objectives) -> int:
    """Most streams whose tokens come in time; `max_streams` if their number does not matter."""
    each = step.stream_s + step.token_s * mean_context(objectives)
    left = objectives.itl_s - step.base_s
    if left < each:
        return 0
    return math.floor(left / each + 1e-9) if each > 0 else max_streams


def mean_context(objectives: Objectives) -> int:
    """Tokens of a stream's context, on average over its life."""
    return objectives.prompt_tokens + objectives.output_tokens // 2


def read(path: Path) -> Profile:
    """Raises SetupError."""
    try:
        return parse(path.read_bytes())
    except OSError as error:
        raise SetupError(
            f"The profile {path} cannot be read: {error.strerror}. `baton bench --find` writes one."
        ) from error
    except SetupError as error:
        raise SetupError(f"{path}: {error.message}") from error


def parse(text: bytes | str) -> Profile:
    """Raises SetupError."""
    try:
        return msgspec.json.decode(text, type=Profile)
    except msgspec.DecodeError as error:
        raise SetupError(
            f"This is no profile of format {FORMAT}: {error}. `baton bench --find` writes one."
        ) from error


def write(profile: Profile, path: Path) -> None:
    """Raises SetupError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=2) + b"\n")
    except OSError as error:
        raise SetupError(f"The profile cannot be written to {path}: {error.strerror}.") from error
