"""
What is asked of Prometheus, each figure named once: all of a service in one question, at one moment.

The metrics are those of the contract. Whose they are is told by the labels `namespace`, `service` and `role`
that a scrape gives its targets. Each figure stands in the answer under its name as the label `figure`; one
that has no series is not in it, and is unknown: a zero has to be seen. So nothing here is made up where a
series is missing, and what may rightly be missing is for `signals` to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton_api import metrics
from baton_api.metrics import Metric

FIGURE = "figure"
"""The label that names what a sample of the answer is."""

BUSY = 0.05
"""Of the time, that a worker has to have been at work for its speed to count."""


@dataclass(frozen=True, slots=True)
class Question:
    """About one service."""

    namespace: str
    service: str
    percentile: int
    """Of requests, that the objectives are for."""
    window_s: int = 120
    """Over which rates are taken: at least four times as long as from one scrape to the next."""

    @property
    def lately_s(self) -> int:
        """
        The end of the window, in which a step is seen sooner: of 120 s a rate over three scrapes of 15 s.

        If scrapes are rarer it may hold too few to say anything.
        """
        return -(-3 * self.window_s // 8)

    @property
    def figures(self) -> Mapping[str, str]:
        """An expression for each, which gives one sample without labels, or none."""
        made = {
            "routers": f"count({self._up('router')} == 1)",
            "age": f'time() - max(timestamp(up{{{self._of}, role="router"}}))',
            "queued_prompt": f"sum({self._series(metrics.ROUTER_QUEUED_TOKENS)})",
            "in_flight": f"sum({self._series(metrics.ROUTER_IN_FLIGHT)})",
            "waiting": f"sum({self._series(metrics.ROUTER_QUEUE_DEPTH)})",
            "held": f"sum({self._series(metrics.ROUTER_HELD)})",
            "first_token": self._quantile(metrics.ROUTER_FIRST_BYTE),
        }
        for kind in ("prompt", "local", "answer"):
            made[f"demand_{kind}"] = self._rate(metrics.ROUTER_DEMAND, f'kind="{kind}"')
            made[f"demand_{kind}_lately"] = self._rate(metrics.ROUTER_DEMAND, f'kind="{kind}"', self.lately_s)
        of_roles = {"prefill": self._of_prefill(), "decode": self._of_decode()}
        for role, texts in of_roles.items():
            made |= {f"{role}_{name}": text for name, text in texts.items()}
        return made

    @property
    def text(self) -> str:
        """As Prometheus is asked."""
        parts = (
            f'label_replace({text}, "{FIGURE}", "{name}", "", "")' for name, text in self.figures.items()
        )
        return "\nor ".join(parts)

    @property
    def running(self) -> str:
        """Requests by pod, with those whose blocks still wait to be pulled."""
        busy = " + ".join(
            self._series(one) for one in (metrics.WORKER_RUNNING, metrics.WORKER_QUEUED, metrics.WORKER_HELD)
        )
        return f"sum by (pod) ({busy})"

    @property
    def _of(self) -> str:
        return f'namespace="{self.namespace}", service="{self.service}"'

    def _of_prefill(self) -> Mapping[str, str]:
        which = 'role="prefill"'
        step = f"rate({self._series(metrics.WORKER_STEP, which, '_sum')}[{self.window_s}s])"
        computed = self._series(metrics.WORKER_PROMPT_TOKENS, f'{which}, source="computed"')
        prompts = self._series(metrics.WORKER_PREFILL_TIME, which, "_count")
        computed_prompts = f"sum(rate({prompts}[{self.window_s}s]))"
        speed = f"sum without (source) (rate({computed}[{self.window_s}s])) / ({step} > {BUSY})"
        return {
            "workers": f"count({self._up('prefill')} == 1)",
            "queued_tokens": f"sum({self._series(metrics.WORKER_QUEUED_TOKENS, which)})",
            "queued": f"sum({self._series(metrics.WORKER_QUEUED, which)})",
            "speed": f"quantile(0.8, {speed})",
            # Tokens of a prompt that is computed.
            "uncached": f"sum(rate({computed}[{self.window_s}s])) / ({computed_prompts} > 0)",
        }

    def _of_decode(self) -> Mapping[str, str]:
        # Without prefill workers the others are called both.
        which = 'role=~"decode|both"'
        generated = self._rate(metrics.WORKER_GENERATION_TOKENS, which)
        ended = f"sum(rate({self._series(metrics.WORKER_REQUESTS, which)}[{self.window_s}s]))"
        usage = self._series(metrics.WORKER_KV_USAGE, which)
        running = self._series(metrics.WORKER_RUNNING, which)
        fetching = self._series(metrics.WORKER_FETCHING, which)
        queued = self._series(metrics.WORKER_QUEUED, which)
        slots = self._series(metrics.WORKER_RUNNING_LIMIT, which)
        return {
            "workers": f"count({self._up('decode')} == 1)",
            "queued": f"sum({queued})",
            "generated": generated,
            "answer": f"{generated} / ({ended} > 0)",
            "fullest": f"max({usage})",
            "fullest_slots": f"max(({running} + {fetching} + {queued}) / ({slots} > 0))",
            "usage": f"avg({usage})",
            "running": f"sum({running} + {fetching})",
            "slots": f"sum({slots})",
            # Over the time of the rate that they explain.
            "mean_usage": f"avg(avg_over_time({usage}[{self.window_s}s]))",
            "mean_running": f"sum(avg_over_time({running}[{self.window_s}s]))",
            "token": self._quantile(metrics.WORKER_TOKEN, which),
            "token_mean": self._mean(metrics.WORKER_TOKEN, which),
            "prompt": self._mean(metrics.WORKER_PROMPT_LENGTH, which),
        }

    def _up(self, role: str) -> str:
        which = '=~"decode|both"' if role == "decode" else f'="{role}"'
        return f"up{{{self._of}, role{which}}}"

    def _series(self, metric: Metric, more: str = "", part: str = "") -> str:
        return f"{metric.name}{part}{{{self._of}{', ' if more else ''}{more}}}"

    def _rate(self, metric: Metric, more: str = "", window_s: int = 0) -> str:
        return f"sum(rate({self._series(metric, more)}[{window_s or self.window_s}s]))"

    def _mean(self, metric: Metric, more: str) -> str:
        total, count = (
            f"sum(rate({self._series(metric, more, part)}[{self.window_s}s]))" for part in ("_sum", "_count")
        )
        return f"{total} / ({count} > 0)"

    def _quantile(self, metric: Metric, more: str = "") -> str:
        buckets = f"rate({self._series(metric, more, '_bucket')}[{self.window_s}s])"
        return f"histogram_quantile({self.percentile / 100:g}, sum by (le) ({buckets}))"
