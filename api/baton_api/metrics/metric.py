"""
What a metric is: a name and a type, what its unit is, which labels it has and how many values those can take.

Whoever names a metric here says what bounds each label, because every value is a series that Prometheus
keeps: a label that clients or prompts can fill without end has no place in the contract.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

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
    "workers",
    "tenants",
    "batches",
    "objects",
    "pods",
    "gpus",
    "events",
    "yes or no",
]
"""Times are in seconds, sizes in bytes and shares from 0 to 1, as Prometheus asks; a name ends in the first
three of them where it is measured in them. All others count things."""


@dataclass(frozen=True, slots=True)
class Label:
    """One label, and what bounds the number of its values."""

    name: str
    values: tuple[str, ...] = ()
    """All that there can be; empty if they are not known beforehand, but `bound` says how many there are."""
    bound: str = ""
    """What the values are and how many, where they are not listed."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One family of time series."""

    name: str
    kind: Kind
    unit: Unit
    help: str
    by: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, without +Inf."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels' names, in their order."""
        return tuple(label.name for label in self.by)

    @property
    def foreseen(self) -> tuple[str, ...]:
        """
        The values of its only label, if they are known beforehand. Such series are there from the start: of
        one that comes to be at its first event, Prometheus never sees that event.
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
"""Close enough to tell who keeps to a limit, wherever between 10 ms and 5 minutes somebody sets it."""

# From a tiny model's step to the pause that a long prompt causes, and fine where objectives are: a percentile
# is near the upper end of its bucket, and one twice as high as its lower end hides half of what workers do.
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
"""Of prompts and answers, in tokens."""
