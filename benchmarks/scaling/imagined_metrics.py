"""The metrics that Prometheus would have of an imagined cluster, computed from its counters."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence

from baton_operator.scaling.signals import ServiceMetrics
from benchmarks.scaling.case import WINDOW_S

PERCENTILE = 0.95
LATELY_S = WINDOW_S / 4
"""A scrape less than the operator asks for, since a rate is from the first one to the last."""
EXPECTED = 200.0
SMOOTHING = 0.05
"""Of the length that answers are expected to have, and what the last one changes of it."""


class Counter:
    """Events within a window that ends now."""

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self._window_s = window_s
        self._events: deque[tuple[float, float]] = deque()

    def add(self, now: float, value: float) -> None:
        self._events.append((now, value))

    def values(self, now: float) -> list[float]:
        while self._events and self._events[0][0] <= now - self._window_s:
            self._events.popleft()
        return [value for _, value in self._events]

    def rate(self, now: float) -> float:
        return sum(self.values(now)) / self._window_s

    def mean(self, now: float) -> float:
        """Of values of which there was one lately."""
        return statistics.fmean(self.values(now))

    def lately(self, now: float) -> float:
        """The rate over a shorter time, as the operator asks for it too."""
        return sum(value for at, value in self._events if at > now - LATELY_S) / LATELY_S


class Counters:
    """Of a service."""

    def __init__(self) -> None:
        self.prompt, self.local, self.answer = Counter(), Counter(), Counter()
        """Tokens that were asked for; local: of prompts that decode workers compute by themselves."""
        self.first = Counter()
        """Seconds to the first token."""
        self.token = Counter()
        """Seconds from token to token, of about as many tokens each."""
        self.computed, self.computing_s = Counter(), Counter()
        self.generated, self.ended = Counter(), Counter()
        self.ended_prompts = Counter()
        """Tokens of the prompts of requests that ended."""
        self.usage, self.streams = Counter(), Counter()
        """As they were at each look."""
        self._expected = EXPECTED

    def requested(self, now: float, prompt: int, answer: int, *, local: bool) -> None:
        self.prompt.add(now, prompt)
        self.local.add(now, prompt if local else 0)
        self.answer.add(now, min(answer, self._expected))

    def answered(self, now: float, prompt: int, answer: int) -> None:
        self.ended.add(now, 1)
        self.ended_prompts.add(now, prompt)
        self._expected += SMOOTHING * (answer - self._expected)

    def metrics(
        self,
        now: float,
        *,
        line: Sequence[int],
        held: int,
        in_flight: int,
        prefill: int,
        usages: Sequence[float],
        streams: Sequence[int],
        queued: Sequence[int],
        slots: int,
        sample: bool,
    ) -> ServiceMetrics:
        """
        Return the metrics.

        `line`: tokens of waiting prompts. `prefill`: number of workers. Of decode workers: `usages` of KV
        blocks, generating `streams`, requests `queued` for a slot, and `slots` of each. `sample`: whether
        routers report the demand.
        """
        full = [(running + waiting) / slots for running, waiting in zip(streams, queued, strict=True)]
        values = {
            "routers": 1.0,
            "age": 0.0,
            "demand_prompt": self.prompt.rate(now),
            "demand_local": self.local.rate(now),
            "demand_answer": self.answer.rate(now),
            "demand_prompt_lately": self.prompt.lately(now),
            "demand_local_lately": self.local.lately(now),
            "demand_answer_lately": self.answer.lately(now),
            "queued_prompt": sum(line),
            "waiting": len(line),
            "in_flight": in_flight,
            "held": held,
            "prefill_workers": prefill,
            "prefill_queued_tokens": 0.0,
            "decode_workers": len(usages),
            "prefill_queued": 0.0,
            "decode_queued": sum(queued),
            "decode_running": sum(streams),
            "decode_slots": slots * len(streams),
            "decode_generated": self.generated.rate(now),
        }
        if firsts := self.first.values(now):
            values["first_token"] = _percentile(firsts)
        if busy_s := self.computing_s.rate(now):
            values["prefill_speed"] = self.computed.rate(now) / busy_s
        if tokens := self.token.values(now):
            values["decode_token"] = _percentile(tokens)
            values["decode_token_mean"] = statistics.fmean(tokens)
        if prompts := self.computed.values(now):
            values["prefill_uncached"] = statistics.fmean(prompts)
        if prompts := self.ended_prompts.values(now):
            values["decode_prompt"] = statistics.fmean(prompts)
        if ended := self.ended.rate(now):
            values["decode_answer"] = values["decode_generated"] / ended
        if usages:
            values |= {"decode_fullest": max(usages), "decode_usage": sum(usages) / len(usages)}
            values["decode_fullest_slots"] = max(full)
            self.usage.add(now, sum(usages) / len(usages))
            self.streams.add(now, sum(streams))
            values |= {
                "decode_mean_usage": self.usage.mean(now),
                "decode_mean_running": self.streams.mean(now),
            }
        return ServiceMetrics(
            {name: float(value) for name, value in values.items() if sample or not name.startswith("demand_")}
        )


def _percentile(values: Sequence[float]) -> float:
    return sorted(values)[int(PERCENTILE * (len(values) - 1))]
