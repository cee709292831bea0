"""
The metrics contract: every metric that Baton exposes, with type, unit, labels and buckets.

Dashboards, alerts and the autoscaler import their names from here, and processes register their
metrics from here. Tests compare the contract with real processes in both directions.
`docs/reference/metrics.md` is generated from it.

A router with several processes adds the label `process` to each series.
"""

from __future__ import annotations

from baton_api.metrics.metric import *
from baton_api.metrics.metric import Metric
from baton_api.metrics.operator import *
from baton_api.metrics.router import *
from baton_api.metrics.worker import *

CONTRACT: tuple[Metric, ...] = tuple(value for value in vars().values() if isinstance(value, Metric))
"""Every metric."""
