"""
Metrics for scaling: the query, the client of Prometheus, and routers as the source while a service sleeps.

One query asks for all metrics of a service at one time. Each result has its name in the label `figure`; a
metric without a series is absent and unknown. Every failure is a MetricsLost with the reason. The client
sends the token only to the server that the operator is configured with, since a service may name any
server.

Recording rules map the metrics of other engines to the same names. Where these engines do not report a
metric, an expression names what replaces it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp

from baton_api import metrics
from baton_api.metrics import Metric
from baton_operator import answers
from baton_operator.scaling.decision import HIGH
from baton_operator.scaling.sample import Measurement, unknown
from baton_operator.scaling.sizing import DecodeSlots

log = logging.getLogger(__name__)

TIMEOUT_S = 5.0


class MetricsLost(Exception):
    """Prometheus did not return a usable result."""


class MetricsClient(Protocol):
    """Runs PromQL queries."""

    async def query(self, url: str, promql: str, label: str) -> Mapping[str, float]:
        """Return the samples of the result by the value of a label. Raises MetricsLost."""


class PrometheusClient:
    """Client of any server with the HTTP API of Prometheus. Close it at the end."""

    def __init__(self, own_url: str = "", token_file: str = "", ca_file: str = "") -> None:
        """`token_file`: bearer token for `own_url`, read for each query; `ca_file`: its certificate
        authority.
        """
        self._own_url = own_url
        self._token_file = token_file
        self._tls = ssl.create_default_context(cafile=ca_file) if ca_file else None
        self._session: aiohttp.ClientSession | None = None

    async def query(self, url: str, promql: str, label: str) -> Mapping[str, float]:
        if not url:
            raise MetricsLost("no Prometheus is set; set spec.autoscaling.prometheus.url or --prometheus-url")
        try:
            async with asyncio.timeout(TIMEOUT_S):
                status, body = await self._post(url, {"query": promql, "timeout": f"{TIMEOUT_S:g}s"})
        except TimeoutError as error:
            raise MetricsLost(f"no response from {url} within {TIMEOUT_S:g} s") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise MetricsLost(f"cannot query {url}: {type(error).__name__}: {error}") from error
        return _samples(url, status, body, label)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _post(self, url: str, form: Mapping[str, str]) -> tuple[int, bytes]:
        if self._session is None:
            self._session = answers.session()
        own = url == self._own_url
        return await answers.fetch(
            self._session,
            "POST",
            f"{url.rstrip('/')}/api/v1/query",
            data=form,
            headers=answers.bearer(self._token_file if own else ""),
            ssl=self._tls if own and self._tls else True,
        )


def _samples(url: str, status: int, body: bytes, label: str) -> dict[str, float]:
    try:
        answer: dict[str, Any] = json.loads(body)
        if status != 200 or answer["status"] != "success":
            raise MetricsLost(f"{url} rejected the query: {status} {str(answer.get('error', ''))[:300]}")
        samples = answer["data"]["result"]
        return {sample["metric"].get(label, ""): float(sample["value"][1]) for sample in samples}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise MetricsLost(f"{url} returned status {status} with an invalid response") from error


METRIC_LABEL = "figure"
"""Label with the name of a metric in the result."""

QUEUE_LEAST, QUEUE_SHARE = 2, 0.1
"""A worker has no slot left if it queues at least so many requests, and more than this share of those that it
runs."""

BUSY = 0.05
"""Minimum share of busy time of a worker for its speed to count."""


@dataclass(frozen=True, slots=True)
class MetricsQuery:
    """The query for the metrics of one service."""

    namespace: str
    service: str
    percentile: int
    """Percentile of the objectives."""
    window_s: int = 120
    """Window of rates in seconds: at least four scrape intervals."""
    decode_slots: DecodeSlots | None = None
    """Batch slots of a decode worker by the spec, for engines that do not report them."""

    @property
    def recent_s(self) -> int:
        """Seconds of the recent window, which shows a step sooner: three scrapes of 15 s for a window of 120
        s. With rarer scrapes it may hold too few samples.
        """
        return -(-3 * self.window_s // 8)

    @property
    def expressions(self) -> Mapping[str, str]:
        """PromQL expression of each metric, which yields one sample without labels, or none."""
        expressions = {
            "routers": f"count({self._up('router')} == 1)",
            "age": f'time() - max(timestamp(up{{{self._of}, role="router"}}))',
            "queued_prompt": f"sum({self._series(metrics.ROUTER_QUEUED_TOKENS)})",
            "in_flight": f"sum({self._series(metrics.ROUTER_IN_FLIGHT)})",
            "waiting": f"sum({self._series(metrics.ROUTER_QUEUE_DEPTH)})",
            "held": f"sum({self._series(metrics.ROUTER_HELD)})",
            "first_token": self._quantile(metrics.ROUTER_FIRST_BYTE),
        }
        for kind in ("prompt", "local", "answer"):
            expressions[f"demand_{kind}"] = self._rate(metrics.ROUTER_DEMAND, f'kind="{kind}"')
            expressions[f"demand_{kind}_lately"] = self._rate(
                metrics.ROUTER_DEMAND, f'kind="{kind}"', self.recent_s
            )
        of_roles = {"prefill": self._of_prefill(), "decode": self._of_decode()}
        for role, texts in of_roles.items():
            expressions |= {f"{role}_{name}": text for name, text in texts.items()}
        return expressions

    @property
    def text(self) -> str:
        """The query as PromQL."""
        parts = (
            f'label_replace({text}, "{METRIC_LABEL}", "{name}", "", "")'
            for name, text in self.expressions.items()
        )
        return "\nor ".join(parts)

    @property
    def running(self) -> str:
        """PromQL for requests by pod, including those whose blocks are not transferred yet."""
        running, queued = self._series(metrics.WORKER_RUNNING), self._series(metrics.WORKER_QUEUED)
        # Only Baton's workers report the prompts that they hold.
        held = f"({self._series(metrics.WORKER_HELD)} or 0 * {running})"
        return f"sum by (pod) ({running} + {queued} + {held})"

    @property
    def _of(self) -> str:
        return f'namespace="{self.namespace}", service="{self.service}"'

    def _of_prefill(self) -> Mapping[str, str]:
        which = 'role="prefill"'
        step = f"rate({self._series(metrics.WORKER_STEP, which, '_sum')}[{self.window_s}s])"
        computed = self._series(metrics.WORKER_PROMPT_TOKENS, f'{which}, source="computed"')
        prompts = self._series(metrics.WORKER_PREFILL_TIME, which, "_count")
        computed_prompts = f"sum(rate({prompts}[{self.window_s}s]))"
        # Without step times, the times of prompts count. Prompts of one batch overlap, so the sum of their
        # times is at least the busy time, and the speed rather too low.
        prefill = f"rate({self._series(metrics.WORKER_PREFILL_TIME, which, '_sum')}[{self.window_s}s])"
        busy = f"({step} or clamp_max({prefill}, 1))"
        speed = f"sum without (source) (rate({computed}[{self.window_s}s])) / ({busy} > {BUSY})"
        return {
            "workers": f"count({self._up('prefill')} == 1)",
            "queued_tokens": f"sum({self._series(metrics.WORKER_QUEUED_TOKENS, which)})",
            "queued": f"sum({self._series(metrics.WORKER_QUEUED, which)})",
            "speed": f"quantile(0.8, {speed})",
            # Mean computed tokens per prompt.
            "uncached": f"sum(rate({computed}[{self.window_s}s])) / ({computed_prompts} > 0)",
        }

    def _of_decode(self) -> Mapping[str, str]:
        # Without prefill workers the role is `both`.
        which = 'role=~"decode|both"'
        generated = self._rate(metrics.WORKER_GENERATION_TOKENS, which)
        ended = f"sum(rate({self._series(metrics.WORKER_REQUESTS, which)}[{self.window_s}s]))"
        usage = self._series(metrics.WORKER_KV_USAGE, which)
        running = self._series(metrics.WORKER_RUNNING, which)
        # An engine without transfers in progress as a metric counts them as queued.
        fetching = f"({self._series(metrics.WORKER_FETCHING, which)} or 0 * {running})"
        queued = self._series(metrics.WORKER_QUEUED, which)
        slots = self._series(metrics.WORKER_RUNNING_LIMIT, which)
        known = self.decode_slots
        if known is not None and known.exact:
            slots = f"({slots} or 0 * {running} + {known.count})"
        fullest_slots = f"max(({running} + {fetching} + {queued}) / ({slots} > 0))"
        all_slots = f"sum({slots})"
        if known is not None and not known.exact:
            # A worker that queues has no slot left: it has as many as it uses. One that does not is at most
            # HIGH, so that it counts as overloaded only when it queues.
            inside = f"({running} + {fetching})"
            queues = f"({queued} >= {QUEUE_LEAST} and {queued} > {QUEUE_SHARE} * {inside})"
            fullest_slots = (
                f"max(({inside} + {queued}) / ({inside} > 0) and {queues} "
                f"or clamp_max(({inside} + {queued}) / {known.count}, {HIGH}))"
            )
            all_slots = f"sum({inside}) and sum({queued}) > {QUEUE_SHARE} * sum({inside})"
        return {
            "workers": f"count({self._up('decode')} == 1)",
            "queued": f"sum({queued})",
            "generated": generated,
            "answer": f"{generated} / ({ended} > 0)",
            "fullest": f"max({usage})",
            "fullest_slots": fullest_slots,
            "usage": f"avg({usage})",
            "running": f"sum({running} + {fetching})",
            "slots": all_slots,
            # Averaged over the window of the rate.
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


ROUTER_TIMEOUT_S = 2.0


async def held_requests(urls: Sequence[str]) -> Measurement:
    """Return the requests that these routers hold for a worker; unknown if none responds."""
    replies = await asyncio.gather(*map(_held, urls))
    answered = [reply for reply in replies if reply is not None]
    return Measurement.of(sum(answered)) if answered else unknown("no router reports its held requests")


async def _held(url: str) -> float | None:
    try:
        text = await answers.pod_metrics(f"{url}/metrics", ROUTER_TIMEOUT_S)
        samples = answers.samples(text, metrics.ROUTER_HELD.name)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        log.info("Cannot read the held requests of %s: %s: %s", url, type(error).__name__, error)
        return None
    values = [sample.value for sample in samples if sample.name == metrics.ROUTER_HELD.name]
    return sum(values) if values else None
