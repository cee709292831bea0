"""
Metrics of batches: counts of the ledger, and this router's work for runners.

The batch controller queries the ledger on its rounds. A scrape never waits for the database.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector
from sqlalchemy import and_, func, select

from baton_api import metrics
from baton_api.errors import BatonError, StorageFull, StorageUnavailable
from baton_api.metrics.counters import LabeledCounter
from baton_batches.database import Database
from baton_batches.tables import batches
from baton_batches.values import BatchStatus


class BatchMetrics(Collector):
    """One router's. Threads may count what they have done for runners."""

    def __init__(self) -> None:
        self.summary = LedgerSummary()
        """The last one that was had."""
        self._lock = threading.Lock()
        self._lines = LabeledCounter(metrics.BATCH_LINES)
        self._retries = LabeledCounter(metrics.BATCH_RETRIES)
        self._errors = LabeledCounter(metrics.BATCH_STORAGE_ERRORS)

    def recorded(self, completed: int, failed: int) -> None:
        """So many lines have their result in the ledger now."""
        with self._lock:
            self._lines.more(completed, "completed")
            self._lines.more(failed, "failed")

    def retried(self, by_outcome: Mapping[str, int]) -> None:
        """Count the lines that a runner sent again, by the outcome of the attempt before."""
        with self._lock:
            for outcome, count in by_outcome.items():
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
        for status in BatchStatus:
            statuses.add_metric([status], summary.statuses.get(status, 0))
        yield statuses
        for metric, value in (
            (metrics.BATCH_LINES_LEFT, summary.lines_left),
            (metrics.BATCH_RUNNERS, summary.runners),
            (metrics.BATCHES_LATE, summary.late),
        ):
            yield GaugeMetricFamily(metric.name, metric.help, value=value)
        for counter in (self._lines, self._retries, self._errors):
            yield from counter.collect()


LATE = 0.9
"""Share of a batch's window after which the same share of its lines should be done."""


@dataclass(frozen=True, slots=True)
class LedgerSummary:
    """One moment of a ledger."""

    statuses: dict[BatchStatus, int] = field(default_factory=dict)
    """Batches by status; those without any are left out."""
    lines_left: int = 0
    """Of batches in progress."""
    runners: int = 0
    """Batches in progress with a live lease."""
    late: int = 0
    """Batches in progress that are behind."""


def summarize(database: Database, now: float) -> LedgerSummary:
    """`now` in seconds of the Unix epoch. Raises StorageUnavailable."""
    columns = batches.c
    done = columns.completed + columns.failed
    passed = columns.created_at + LATE * (columns.expires_at - columns.created_at)
    behind = and_(passed < now, done < LATE * columns.total)
    query = select(
        columns.status,
        func.count(),
        func.sum(columns.total - done),
        func.count().filter(columns.leased_until > now),
        func.count().filter(behind),
    ).group_by(columns.status)
    with database.reading() as connection:
        rows = {BatchStatus(status): tuple(map(int, rest)) for status, *rest in connection.execute(query)}
    _, left, runners, late = rows.get(BatchStatus.IN_PROGRESS, (0, 0, 0, 0))
    return LedgerSummary({status: counts[0] for status, counts in rows.items()}, left, runners, late)
