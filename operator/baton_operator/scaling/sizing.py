"""
The size of one worker of each role, from a profile and the forecast lengths of requests; its batch slots.

A profile gives the time of a prompt of any length, and of a step with any batch and context. One forecast
sizes both roles at each decision and names the limit that each of them reaches first. Measurements correct
the profile by one factor per role: the measured speed divided by the speed of the profile.
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
from baton_operator.kinds.inference_service import InferenceServiceSpec
from baton_operator.kinds.role_scaler import Bound
from baton_operator.kinds.service_policies import Objectives, ProfileSource
from baton_operator.manifests.engines import ENGINES
from baton_operator.manifests.engines.container import last_value
from baton_operator.rollout.decision import RoleName
from baton_operator.scaling.history import TREND_S, TimedValue, forecast
from baton_operator.scaling.sample import WorkerSize
from baton_operator.scaling.signals import ServiceMetrics


@dataclass(frozen=True, slots=True)
class DecodeSlots:
    """Batch slots of one worker."""

    count: int
    exact: bool
    """Whether an argument names them. If not, a worker has at least so many by the engine's defaults."""


def decode_slots(spec: InferenceServiceSpec) -> DecodeSlots | None:
    """Return the slots; None for engines that report them, or are not known. Arguments of the role override
    those of all workers.
    """
    slots = ENGINES[spec.engine.type].slots
    if slots is None:
        return None
    arguments = [*spec.engine.args, *spec.decode.args]
    value = last_value(arguments, slots.flag)
    if value.isdecimal() and int(value):
        return DecodeSlots(int(value), exact=True)
    return DecodeSlots(slots.default(spec, arguments), exact=False)


Line = TypeVar("Line", PrefillLine, StepLine)

SMOOTHING = 0.1
"""Weight of one sample in a speed."""

CHANCE = 1.645
"""Standard deviations that a number of streams exceeds with a probability of 5 %."""

UNLIMITED = 10**9
ROUNDING = 1e-3
LEAST_S = 1e-6

MOST_FACTOR = 4.0
"""Maximum factor between measured speed and profile, in either direction."""


@dataclass(frozen=True, slots=True)
class MeanLengths:
    """Mean lengths of the requests of a service in tokens."""

    prompt: float
    uncached: float
    """Uncached tokens of a prompt that a prefill worker computes."""
    answer: float


@dataclass(frozen=True, slots=True)
class LearnedRequests:
    """Learned lengths of the requests of a service, and speeds of its workers."""

    prompt: tuple[TimedValue, ...] = ()
    uncached: tuple[TimedValue, ...] = ()
    answer: tuple[TimedValue, ...] = ()
    prefill_speed: float = 1.0
    """Speed relative to the profile."""
    decode_speed: float = 1.0

    def looked(self, profile: Profile, metrics: ServiceMetrics, now: float) -> LearnedRequests:
        """Return the values updated by metrics; unknown ones stay."""
        learned = replace(
            self,
            prompt=_with(self.prompt, metrics.read("decode_prompt").value, now),
            uncached=_with(self.uncached, metrics.read("prefill_uncached").value, now),
            answer=_with(self.answer, metrics.read("decode_answer").value, now),
        )
        means = learned.requests(profile, 0.0)
        return replace(
            learned,
            prefill_speed=_smoothed(self.prefill_speed, _prefill_speed(profile.prefill, means, metrics)),
            decode_speed=_smoothed(self.decode_speed, _decode_speed(profile.step, means, metrics)),
        )

    def requests(self, profile: Profile, ahead_s: float) -> MeanLengths:
        """Return the lengths forecast for `ahead_s`; those of the profile if none were measured."""
        made_for = profile.objectives
        prompt = _forecast(self.prompt, float(made_for.prompt_tokens), ahead_s)
        share = made_for.uncached / made_for.prompt_tokens if made_for.prompt_tokens else 1.0
        uncached = _forecast(self.uncached, prompt * share, ahead_s)
        return MeanLengths(prompt, uncached, _forecast(self.answer, float(made_for.output_tokens), ahead_s))


def worker_sizes(
    profile: Profile, seen: LearnedRequests, wanted: Objectives, ahead_s: float, prefills: int | None
) -> Mapping[RoleName, WorkerSize]:
    """Return the size of one worker of each role for the demand in `ahead_s`. `prefills`: desired prefill
    workers. None: there is no such role, and decode workers also compute prompts.
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
    # All prefill workers share one queue in the routers. One worker less, so that the result still holds if
    # one is removed.
    busy = profiles.busy_share(computing_s, left_s * max(1, (prefills or 0) - 1))
    bound: Bound = "Throughput" if busy >= profiles.MOST_BUSY - ROUNDING else "TimeToFirstToken"
    return {
        "prefill": WorkerSize(busy * uncached / computing_s, bound),
        "decode": _decode(profile, step, objectives, computing_s if prefills is None else 0.0),
    }


def _decode(
    profile: Profile, step: StepLine, objectives: profiles.Objectives, computing_s: float
) -> WorkerSize:
    """`computing_s`: time for the prompt of each request, if decode workers compute it."""
    in_time = profiles.streams_in_time(step, UNLIMITED, objectives)
    limits: Mapping[Bound, float] = {
        "KVBlocks": profiles.streams_in_cache(profile.kv_tokens, objectives),
        "BatchSlots": profile.max_streams,
        # The number of streams varies. Excess streams queue for blocks and slots, but delay all tokens.
        "InterTokenLatency": max(1.0, in_time - CHANCE * math.sqrt(in_time)) if in_time else 0.0,
    }
    bound = min(limits, key=lambda limit: limits[limit])
    if not (streams := limits[bound]):
        return WorkerSize(0.0, bound)
    answer, context = objectives.output_tokens, profiles.mean_context(objectives)
    generating_s = answer * (step.base_s / streams + step.stream_s + step.token_s * context)
    return WorkerSize(answer / (generating_s + computing_s), bound)


def _prefill_speed(line: PrefillLine, means: MeanLengths, metrics: ServiceMetrics) -> float | None:
    """Return the speed of prefill workers relative to the profile; None if unknown."""
    measured = metrics.read("prefill_speed").value
    if not measured or metrics.read("prefill_uncached").value is None:
        return None
    tokens = round(means.uncached)
    return measured * line.seconds(tokens, tokens) / tokens if tokens else None


def _decode_speed(line: StepLine, means: MeanLengths, metrics: ServiceMetrics) -> float | None:
    """Return the speed of decode workers at their batch and context, likewise."""
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
    """Add a value and drop old ones. The last value stays, however old."""
    if value is None:
        return samples
    return (*(sample for sample in samples if sample[0] > now - TREND_S), (now, value))


def _forecast(samples: tuple[TimedValue, ...], otherwise: float, ahead_s: float) -> float:
    return forecast(samples, samples[-1][1], ahead_s) if samples else otherwise


def _smoothed(before: float, sample: float | None) -> float:
    if sample is None:
        return before
    believed = min(MOST_FACTOR, max(1 / MOST_FACTOR, sample))
    return before + SMOOTHING * (believed - before)


REREAD_S = 300.0
"""Seconds after which the profile is read again."""


async def read_profile(api: ApiServer, namespace: str, source: ProfileSource) -> profiles.Profile:
    """Return the profile in a ConfigMap. Raises SetupError and ApiException."""
    where = f"metadata.name={source.config_map_name}"
    config_maps = await api.list("v1", "ConfigMap", namespace, field=where)
    if not config_maps:
        raise SetupError(
            f"The ConfigMap {source.config_map_name} does not exist. Create it from a profile: "
            f"`kubectl create configmap {source.config_map_name} --from-file={source.key}`."
        )
    text = config_maps[0].get("data", {}).get(source.key)
    if text is None:
        raise SetupError(f"The ConfigMap {source.config_map_name} has no key {source.key}.")
    return profiles.parse(text)
