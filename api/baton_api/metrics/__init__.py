"""
The metrics contract: every metric that Baton exposes, with type, unit, labels and buckets, named once.

Dashboards, alert rules, the autoscaler and `baton top` take their names from here, and what a process exposes
is built from here, so that neither can drift from the other: tests scrape real processes and compare both
ways. `docs/reference/metrics.md` is written from it.

A router of several processes adds the label `process` to each series.
"""

from __future__ import annotations

from baton_api.metrics.autoscaler import *
from baton_api.metrics.batches import *
from baton_api.metrics.metric import *
from baton_api.metrics.metric import Metric
from baton_api.metrics.operator import *
from baton_api.metrics.process import *
from baton_api.metrics.router import *
from baton_api.metrics.worker import *

CONTRACT: tuple[Metric, ...] = tuple(value for value in vars().values() if isinstance(value, Metric))
"""All of them."""
