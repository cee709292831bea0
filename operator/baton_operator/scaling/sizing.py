"""
The size of one worker of each role, from a profile and the forecast lengths of requests.

A profile gives the time of a prompt of any length, and of a step with any batch and context. One forecast
sizes both roles at each decision and tells which limit each of them reaches first. Measurements correct the
profile by one factor per role: the measured speed divided by the speed of the profile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from baton_api import profiles
from baton_api.errors import SetupError
from baton_api.profiles import PrefillLine, Profile, StepLine
from baton_operator.cluster.api_server import ApiServer
from baton_operator.kinds.role_scaler import Bound
from baton_operator.kinds.service_policies import Objectives, ProfileSource
from baton_operator.rollout.decision import RoleName
from baton_operator.scaling.history import TREND_S, TimedValue, forecast
from baton_operator.scaling.sample import WorkerSize
from baton_operator.scaling.signals import ServiceMetrics

Line = TypeVar("Line", PrefillLine, StepLine)

SMOOTHING = 0.1
"""What one sample changes of a speed."""

CHANCE = 1.645
"""Standard deviations of a number of streams that it exceeds with a chance of one in twenty."""

UNLIMITED = 10**9
ROUNDING = 1e-3
LEAST_S = 1e-6

MOST_FACTOR = 4.0
"""Times the profile's speed, or a fraction of it, that a worker is believed to have."""


@dataclass(frozen=True, slots=True)
class MeanLengths:
    """Mean lengths of a service's requests, in tokens. Each may be a fraction."""

    prompt: float
    uncached: float
    """Of a prompt that a prefill worker computes, the tokens that are not cached."""
    answer: float


@dataclass(frozen=True, slots=True)
class LearnedRequests:
    """What is remembered of one service's requests, and of its workers against the profile."""

    prompt: tuple[TimedValue, ...] = ()
    uncached: tuple[TimedValue, ...] = ()
    answer: tuple[TimedValue, ...] = ()
    prefill_speed: float = 1.0
    """Times the profile's."""
    decode_speed: float = 1.0

    def looked(self, profile: Profile, metrics: ServiceMetrics, now: float) -> LearnedRequests:
        """The same with what one answer of Prometheus says; what it does not say stays."""
        known = replace(
            self,
            prompt=_with(self.prompt, metrics.read("decode_prompt").value, now),
            uncached=_with(self.uncached, metrics.read("prefill_uncached").value, now),
            answer=_with(self.answer, metrics.read("decode_answer").value, now),
        )
        means = known.requests(profile, 0.0)
        return replace(
            known,
            prefill_speed=_smoothed(self.prefill_speed, _prefill_speed(profile.prefill, means, metrics)),
            decode_speed=_smoothed(self.decode_speed, _decode_speed(profile.step, means, metrics)),
        )

    def requests(self, profile: Profile, ahead_s: float) -> MeanLengths:
        """Lengths forecast over `ahead_s`; the profile's own where none was seen."""
        made_for = profile.objectives
        prompt = _forecast(self.prompt, float(made_for.prompt_tokens), ahead_s)
        share = made_for.uncached / made_for.prompt_tokens if made_for.prompt_tokens else 1.0
        uncached = _forecast(self.uncached, prompt * share, ahead_s)
        return MeanLengths(prompt, uncached, _forecast(self.answer, float(made_for.output_tokens), ahead_s))


def worker_sizes(
    profile: Profile, seen: LearnedRequests, wanted: Objectives, ahead_s: float, prefills: int | None
) -> Mapping[RoleName, WorkerSize]:
    """
    One worker of each role for what comes in `ahead_s`.

    `prefills`: workers of that role that are asked for now; None if there is no such role, so that decode
    workers spend a part of their time on prompts.
    """
    requests = seen.requests(profile, ahead_s)
    line, step = _faster(profile.prefill, seen.prefill_speed), _faster(profile.step, seen.decode_speed)
    uncached = max(1, round(requests.uncached))
    objectives = profiles.Objectives(
        ttft_s=wanted.time_to_first_token.seconds,
        itl_s=wanted.inter_token_latency.seconds,
        prompt_tokens=max(1, round(requests.prompt)),
        output_tokens=max(1, round(requests.answer)),
    )
    computing_s = max(LEAST_S, line.seconds(uncached, max(uncached, objectives.prompt_tokens)))
    left_s = objectives.ttft_s - computing_s - profile.transfer.seconds(uncached) - step.seconds(1, 0)
    # Routers have one queue before all of them: it moves as much faster. Of one fewer, so that what follows
    # still holds when one goes.
    busy = profiles.busy_share(computing_s, left_s * max(1, (prefills or 0) - 1))
    bound: Bound = "Throughput" if busy >= profiles.MOST_BUSY - ROUNDING else "TimeToFirstToken"
    return {
        "prefill": WorkerSize(busy * uncached / computing_s, bound),
        "decode": _decode(profile, step, objectives, computing_s if prefills is None else 0.0),
    }


def _decode(
    profile: Profile, step: StepLine, objectives: profiles.Objectives, computing_s: float
) -> WorkerSize:
    """`computing_s`: of the prompt of each request, if the worker computes it as well."""
    in_time = profiles.streams_in_time(step, UNLIMITED, objectives)
    limits: Mapping[Bound, float] = {
        "KVBlocks": profiles.streams_in_room(profile.kv_tokens, objectives),
        "BatchSlots": profile.max_streams,
        # Streams come and go by chance. For blocks and slots they queue; too many make all tokens late.
        "InterTokenLatency": max(1.0, in_time - CHANCE * math.sqrt(in_time)) if in_time else 0.0,
    }
    bound = min(limits, key=lambda one: limits[one])
    if not (streams := limits[bound]):
        return WorkerSize(0.0, bound)
    answer, context = objectives.output_tokens, profiles.mean_context(objectives)
    generating_s = answer * (step.base_s / streams + step.stream_s + step.token_s * context)
    return WorkerSize(answer / (generating_s + computing_s), bound)


def _prefill_speed(line: PrefillLine, means: MeanLengths, metrics: ServiceMetrics) -> float | None:
    """Of prefill workers, times the profile's; None if it was not measured."""
    measured = metrics.read("prefill_speed").value
    if not measured or metrics.read("prefill_uncached").value is None:
        return None
    tokens = round(means.uncached)
    return measured * line.seconds(tokens, tokens) / tokens if tokens else None


def _decode_speed(line: StepLine, means: MeanLengths, metrics: ServiceMetrics) -> float | None:
    """Of decode workers at the batch and context that they have, likewise."""
    running, workers = metrics.read("decode_mean_running").value, metrics.read("decode_workers").value
    token_s = metrics.read("decode_token_mean").value
    if not running or not workers or not token_s:
        return None
    streams = running / workers
    context = streams * (means.prompt + means.answer / 2)
    return (line.base_s + line.stream_s * streams + line.token_s * context) / token_s


def _faster(line: Line, times: float) -> Line:
    return type(line)(**{name: value / times for name, value in msgspec.structs.asdict(line).items()})


def _with(samples: tuple[TimedValue, ...], value: float | None, now: float) -> tuple[TimedValue, ...]:
    """The last value stays, however old: where no request ends, the next one is likely to be as the last."""
    if value is None:
        return samples
    return (*(one for one in samples if one[0] > now - TREND_S), (now, value))


def _forecast(samples: tuple[TimedValue, ...], otherwise: float, ahead_s: float) -> float:
    return forecast(samples, samples[-1][1], ahead_s) if samples else otherwise


def _smoothed(before: float, sample: float | None) -> float:
    if sample is None:
        return before
    believed = min(MOST_FACTOR, max(1 / MOST_FACTOR, sample))
    return before + SMOOTHING * (believed - before)


REREAD_S = 300.0
"""After which a changed profile is noticed."""


async def read_profile(api: ApiServer, namespace: str, source: ProfileSource) -> profiles.Profile:
    """Raises SetupError, and ApiException."""
    where = f"metadata.name={source.config_map_name}"
    found = await api.list("v1", "ConfigMap", namespace, field=where)
    if not found:
        raise SetupError(
            f"There is no ConfigMap {source.config_map_name}; `kubectl create configmap "
            f"{source.config_map_name} --from-file={source.key}` makes one of a profile."
        )
    text = found[0].get("data", {}).get(source.key)
    if text is None:
        raise SetupError(f"The ConfigMap {source.config_map_name} has no key {source.key}.")
    return profiles.parse(text)
