"""
The definition of a metric: name, type, unit, labels and the number of their values.

Each label states its bound, because Prometheus stores a series per value. A label that clients or prompts
can grow without limit has no place in the contract.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Format of all pages of metrics. All scrapers read it. A newer one is for names with other characters."""

Kind = Literal["counter", "gauge", "histogram"]

Unit = Literal[
    "seconds",
    "bytes",
    "ratio",
    "tokens",
    "tokens per second",
    "requests",
    "lines",
    "blocks",
    "chunks",
    "drafts",
    "workers",
    "tenants",
    "batches",
    "objects",
    "pods",
    "gpus",
    "events",
    "yes or no",
]
"""Times are in seconds, sizes in bytes and ratios from 0 to 1, as Prometheus recommends. Names end in these
three units. The other units are counts."""


@dataclass(frozen=True, slots=True)
class Label:
    """A label, and the bound of its values."""

    name: str
    values: tuple[str, ...] = ()
    """All possible values. Empty: unknown in advance; see `bound`."""
    bound: str = ""
    """Description and number of the values, when `values` is empty."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A family of time series."""

    name: str
    kind: Kind
    unit: Unit
    help: str
    by: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without +Inf."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the labels, in order."""
        return tuple(label.name for label in self.by)

    @property
    def foreseen(self) -> tuple[str, ...]:
        """
        The values of the only label, if they are known in advance.

        Such series exist from the start. Otherwise Prometheus misses the first event of a series.
        """
        return self.by[0].values if len(self.by) == 1 else ()


# From a cached prompt on a GPU to a million tokens on a CPU.
FIRST_TOKEN_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0,
)  # fmt: skip

LIMIT_BUCKETS = tuple(
    round(step * decade, 4)
    for decade in (0.01, 0.1, 1.0, 10.0, 100.0)
    for step in (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
    if step * decade <= 300.0
)
"""Narrow enough to measure any limit between 10 ms and 5 minutes."""

# From a step of a tiny model to the pause behind a long prompt. Narrow where objectives are, because a
# percentile is close to the upper bound of its bucket.
TOKEN_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.06, 0.08,
    0.1, 0.125, 0.15, 0.2, 0.25, 0.5, 1.0, 2.5, 10.0,
)  # fmt: skip

STEP_BUCKETS = (
    0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5,
)  # fmt: skip

TRANSFER_BUCKETS = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)

REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)

LENGTH_BUCKETS = (
    1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 1048576,
)  # fmt: skip
"""For prompts and outputs, in tokens."""


BUILD_INFO = Metric(
    "baton_build_info",
    "gauge",
    "yes or no",
    "Always 1. The labels are the component and its version.",
    (Label("component", ("worker", "router", "operator")), Label("version", bound="one")),
)
