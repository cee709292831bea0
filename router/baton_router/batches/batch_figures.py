"""
What is measured of batches: the ledger as it was last looked at, and what this router did for runners.

The ledger is asked by the keeper on its rounds and never for a scrape, which must not wait for a database.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from baton_api import metrics
from baton_api.errors import BatonError, StorageFull, StorageUnavailable
from baton_router.batches.summary import Summary
from baton_router.batches.values import Status
from baton_router.tallies import Tally


class BatchFigures(Collector):
    """One router's. Threads may count what they have done for runners."""

    def __init__(self) -> None:
        self.summary = Summary()
        """The last one that was had."""
        self._lock = threading.Lock()
        self._lines = Tally(metrics.BATCH_LINES)
        self._retries = Tally(metrics.BATCH_RETRIES)
        self._errors = Tally(metrics.BATCH_STORAGE_ERRORS)

    def recorded(self, completed: int, failed: int) -> None:
        """So many lines have their result in the ledger now."""
        with self._lock:
            self._lines.more(completed, "completed")
            self._lines.more(failed, "failed")

    def retried(self, told: Mapping[str, int]) -> None:
        """A runner has tried lines again, by how the tries before ended."""
        with self._lock:
            for outcome, count in told.items():
                if outcome in metrics.BATCH_RETRIES.by[0].values:
                    self._retries.more(count, outcome)

    def failed(self, error: BatonError) -> None:
        """A call to ledger or files has; other errors than theirs are the caller's."""
        if isinstance(error, StorageFull):
            self._errors.add("full")
        elif isinstance(error, StorageUnavailable):
            self._errors.add("unavailable")

    def collect(self) -> Iterator[Family]:
        summary = self.summary
        statuses = GaugeMetricFamily(
            metrics.BATCHES.name, metrics.BATCHES.help, labels=metrics.BATCHES.labels
        )
        for status in Status:
            statuses.add_metric([status], summary.statuses.get(status, 0))
        yield statuses
        for metric, value in (
            (metrics.BATCH_LINES_LEFT, summary.lines_left),
            (metrics.BATCH_RUNNERS, summary.runners),
            (metrics.BATCHES_LATE, summary.late),
        ):
            yield GaugeMetricFamily(metric.name, metric.help, value=value)
        for tally in (self._lines, self._retries, self._errors):
            yield from tally.collect()
