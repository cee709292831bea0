"""
What is measured of decisions: where prompts were to be computed, and what of them was cached as expected.

Belongs to the scheduler, which alone knows what was expected of a request.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from baton_api import metrics
from baton_api.metrics.counters import Spread, Tally
from baton_api.reports import PromptReport


class DecisionFigures(Collector):
    """Counted as decisions are made and as answers begin."""

    def __init__(self) -> None:
        self._decisions = Tally(metrics.ROUTER_DECISIONS)
        self._tokens = Tally(metrics.ROUTER_PREFIX_TOKENS)
        self._transfer = Spread(metrics.ROUTER_TRANSFER)

    def decided(self, *, remote: bool, prefills: bool) -> None:
        """`prefills`: whether a prefill worker could have been chosen."""
        if remote:
            self._decisions.add("remote", "cheaper")
        else:
            self._decisions.add("local", "cheaper" if prefills else "no_prefill")

    def computed(self, expected: int, report: PromptReport) -> None:
        """A prompt of which so many tokens were expected to be cached."""
        tokens = self._tokens
        tokens.more(expected, "expected")
        tokens.more(report.cached, "cached")
        tokens.more(report.tokens, "prompt")
        if report.remote:
            self._transfer.observe(report.transfer_s)
        elif report.fallback:
            self._decisions.add("fallback", report.fallback)

    def collect(self) -> Iterator[Family]:
        for one in (self._decisions, self._tokens, self._transfer):
            yield from one.collect()
